"""What each step leaves behind: one frozen `StepRecord`. Metrics, traces and explanations read these and keep no
counts of their own."""

from __future__ import annotations

import msgspec

from noria.core.events import FinishReason
from noria.core.plan import StepPlan, StepResult
from noria.kv.manager import KVUsage


class Arrival(msgspec.Struct, frozen=True):
    """A request that was accepted since the previous record."""

    request_id: str
    num_prompt_tokens: int
    arrival_s: float


class Ending(msgspec.Struct, frozen=True):
    """A request that ended since the previous record, by the engine or from outside."""

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    arrival_s: float
    ended_s: float
    num_tokens_lost: int = 0
    """Computed tokens given up by its preemptions."""


class StepRecord(msgspec.Struct, frozen=True):
    """One step. Times are on the engine's clock, in seconds; counts are taken after the step.

    The plan is kept without the token ids of those it admitted: the ring would hold on to whole prompts.
    """

    plan: StepPlan
    result: StepResult
    arrivals: tuple[Arrival, ...]
    endings: tuple[Ending, ...]
    planned_s: float
    """When planning began."""
    started_s: float
    """When the plan was there, and its execution began."""
    updated_s: float
    """When it had been executed."""
    num_running: int
    num_waiting: int
    num_queued_tokens: int
    """Prompt tokens of waiting requests that have never run."""
    kv: KVUsage
    refusals: dict[str, int] = {}
    """Requests that were refused for now since the previous record, counted by the error's code."""
    pause_began: bool = False
    """Whether a pause began since the previous record: then the engine had no use for all the time from there."""
    error: str | None = None
    """Why the plan was not executed, if it was not; its requests have ended then."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached content or not."""
        return self.kv.num_cached_idle + self.kv.num_blank

    @property
    def duration_s(self) -> float:
        return self.updated_s - self.planned_s
