"""The engine: one loop that schedules, executes and updates.

Owned by a client (`noria.engine.client`), in this process or, later, in one of its own. It knows the runner only
as a protocol, so the same object drives a real model, a script in a test, or a simulator.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from noria.core.events import FinishReason, RequestEvent
from noria.core.plan import StepPlan, StepResult
from noria.core.record import StepRecord
from noria.core.request import Request
from noria.core.scheduler import Scheduler
from noria.engine.messages import EngineRequest

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Executes plans; see `noria.core.plan` for what it owes in return."""

    def execute(self, plan: StepPlan) -> StepResult: ...


class EngineCore:
    """Scheduler and runner, joined. `seed` starts the stream from which unseeded requests get their seeds."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, *, seed: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._seeds = random.Random(seed)
        self._clock = clock

    @property
    def records(self) -> deque[StepRecord]:
        return self.scheduler.records

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished

    def add_request(self, request: EngineRequest) -> None:
        """Queues a request; raises `RequestError` if it can never be served."""
        own_seed = request.sampling.seed
        self.scheduler.add(
            Request(
                request.request_id,
                request.prompt_token_ids,
                request.sampling,
                seed=self._seeds.getrandbits(64) if own_seed is None else own_seed % 2**64,
                index=request.index,
                prefix_key=request.prefix_key,
            ),
            self._clock(),
        )

    def finish_request(self, request_id: str, reason: FinishReason) -> RequestEvent | None:
        """Ends a request now: `ABORT`, or `STOP` for a stop string. None if it has ended already."""
        return self.scheduler.finish(request_id, reason, self._clock())

    def step(self) -> list[RequestEvent]:
        """Advances every request that can advance; returns what is new.

        If the runner fails, the requests of that step end with `ERROR`, and the engine goes on with the others.
        """
        plan = self.scheduler.schedule(self._clock())
        try:
            result = self._runner.execute(plan)
        except BaseException as error:
            failed = self._fail(plan, error)
            if not isinstance(error, Exception):
                raise  # somebody wants to leave: the requests are ended all the same
            return failed
        return self.scheduler.update(plan, result, self._clock())

    def _fail(self, plan: StepPlan, error: BaseException) -> list[RequestEvent]:
        """Ends the requests of a step that was not executed: what the worker knows of them is in doubt."""
        logger.error("step %d failed: %s", plan.step, plan, exc_info=error)
        events = (self.finish_request(request_id, FinishReason.ERROR) for request_id in plan.num_scheduled_tokens)
        message = f"{type(error).__name__}: {error}"
        return [msgspec.structs.replace(event, error=message) for event in events if event is not None]
