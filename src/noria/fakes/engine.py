"""An engine without a model, for a process of its own: `functools.partial(build_scripted_engine, ...)`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from noria.config import SchedulerConfig
from noria.core.events import FinishReason, RequestEvent
from noria.core.plan import StepPlan, StepResult
from noria.core.scheduler import Scheduler
from noria.engine.core import EngineCore
from noria.errors import ModelError
from noria.fakes.runner import ScriptedRunner, arithmetic_token

logger = logging.getLogger(__name__)


class PacedRunner:
    """Answers plans with tokens from one repeating text, `step_s` seconds per step. Checks nothing, so it is fast."""

    def __init__(self, tokens: Sequence[int], step_s: float) -> None:
        self._tokens = tokens
        self._step_s = step_s
        self._num_left: dict[str, int] = {}
        self._num_sampled: dict[str, int] = {}
        self._silent: set[str] = set()
        """Those that may have no token."""

    def execute(self, plan: StepPlan) -> StepResult:
        if self._step_s:
            time.sleep(self._step_s)
        for request_id in plan.finished:
            self._num_left.pop(request_id, None)
            self._num_sampled.pop(request_id, None)
            self._silent.discard(request_id)
        for admitted in plan.admitted:
            self._num_left[admitted.request_id] = len(admitted.token_ids) - admitted.num_computed_tokens
            self._num_sampled[admitted.request_id] = len(admitted.token_ids) - admitted.num_prompt_tokens
            if admitted.sampling.max_tokens == 0:
                self._silent.add(admitted.request_id)
        sampled: dict[str, tuple[int, ...]] = {}
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            self._num_left[request_id] -= num_tokens
            if self._num_left[request_id] == 0 and request_id not in self._silent:
                self._num_left[request_id] = 1
                position = self._num_sampled[request_id]
                self._num_sampled[request_id] = position + 1
                sampled[request_id] = (self._tokens[position % len(self._tokens)],)
        return StepResult(sampled)


def letter_token(token_ids: Sequence[int]) -> int:
    """A lower-case letter that depends on all tokens so far."""
    return 97 + arithmetic_token(token_ids) % 26


class CheckedEngine(EngineCore):
    """Looks at all invariants after every step and every ending, and ends the process when one is broken."""

    def step(self) -> list[RequestEvent]:
        events = super().step()
        self._check()
        return events

    def finish_request(self, request_id: str, reason: FinishReason) -> RequestEvent | None:
        event = super().finish_request(request_id, reason)
        self._check()
        return event

    def _check(self) -> None:
        try:
            self.scheduler.check()
        except AssertionError:
            logger.exception("an invariant of the scheduler is broken")
            os._exit(70)


def build_scripted_engine(
    report: Callable[[str], None],
    *,
    text: bytes = b"the wheel turns and ",
    step_s: float = 0.0,
    checked: bool = False,
    num_blocks: int = 4096,
    block_size: int = 16,
    max_model_len: int = 4096,
    max_num_seqs: int = 64,
    vocab_size: int = 258,
    eos_token_ids: tuple[int, ...] = (257,),
    load_s: float = 0.0,
    scheduling: Mapping[str, Any] | None = None,
) -> EngineCore:
    """An engine over `ByteTokenizer`'s ids that says `text` again and again.

    `scheduling`: any other fields of `SchedulingOptions`.

    `checked` answers with letters that depend on all tokens before them, verifies every plan (`ScriptedRunner`), and
    ends the process if an invariant of the scheduler breaks. Loading takes `load_s`.
    """
    report("no model to load")
    time.sleep(load_s)
    config = SchedulerConfig(
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        **(scheduling or {}),
    )
    if checked:
        return CheckedEngine(
            Scheduler(config),
            ScriptedRunner(num_blocks, block_size, next_token=letter_token, keep_plans=False),
        )
    return EngineCore(Scheduler(config), PacedRunner(text, step_s))


def build_failing_engine(
    report: Callable[[str], None], *, message: str = "", exit_code: int | None = None
) -> EngineCore:
    """An engine that never starts: it raises a `ModelError`, or its process just ends with `exit_code`."""
    if exit_code is not None:
        os._exit(exit_code)
    raise ModelError(message)
