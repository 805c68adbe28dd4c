"""Counts of calls: what clients sent to the generating endpoints, and what became of it.

A call has some prompts and `n` sequences of each; the engine's records know sequences only, and nothing of what never
reached it. Every call is counted once when it comes and once when it ends, under one outcome, whatever its sequences
went through. `noria.server.calls` feeds this; `noria.observe.prometheus` publishes it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from noria.observe.histogram import REQUEST_BUCKETS_S, TTFT_BUCKETS_S, Histogram


class Outcome(StrEnum):
    FINISHED = "finished"  # the answer is complete
    ABORTED = "aborted"  # the client went away or read too slowly, or somebody ended it
    REFUSED = "refused"  # the call was at fault, or there was no place for it: 4xx, or 503 before it began
    FAILED = "failed"  # the fault was ours, or a deadline passed


class Stage(StrEnum):
    WAITING = "waiting"  # no token yet
    RUNNING = "running"


class CountedCall(Protocol):
    """What is asked of a call, at its end or in between. Tokens are those that its client was told of."""

    @property
    def stage(self) -> Stage: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_completion_tokens(self) -> int: ...
    @property
    def ttft_s(self) -> float | None: ...
    @property
    def duration_s(self) -> float: ...


def _none_of_any() -> dict[Outcome, int]:
    return dict.fromkeys(Outcome, 0)


@dataclass(slots=True)
class CallStats:
    """At any time `num_submitted` = all that ended + all in progress, and so for the tokens."""

    num_submitted: int = 0
    num_ended: dict[Outcome, int] = field(default_factory=_none_of_any)
    num_prompt_tokens: dict[Outcome, int] = field(default_factory=_none_of_any)
    num_completion_tokens: dict[Outcome, int] = field(default_factory=_none_of_any)
    ttft_s: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS_S))
    duration_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))
    _in_progress: dict[int, CountedCall] = field(default_factory=dict)

    def begin(self, call: CountedCall) -> None:
        self.num_submitted += 1
        self._in_progress[id(call)] = call

    def end(self, call: CountedCall, outcome: Outcome) -> None:
        del self._in_progress[id(call)]
        self.num_ended[outcome] += 1
        self.num_prompt_tokens[outcome] += call.num_prompt_tokens
        self.num_completion_tokens[outcome] += call.num_completion_tokens
        self.duration_s.observe(call.duration_s)
        if call.ttft_s is not None:
            self.ttft_s.observe(call.ttft_s)

    @property
    def in_progress(self) -> Collection[CountedCall]:
        return self._in_progress.values()

    @property
    def num_in_progress(self) -> dict[Stage, int]:
        counts = dict.fromkeys(Stage, 0)
        for call in self._in_progress.values():
            counts[call.stage] += 1
        return counts
