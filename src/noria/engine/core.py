"""The engine: one loop that schedules, executes and updates.

Owned by a client in this process (`noria.engine.client`), or by the loop of an engine process
(`noria.engine.process`). It knows the runner only as a protocol, so the same object drives a real model, a script in
a test, or a simulator.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from noria.core.events import FinishReason, RequestEvent
from noria.core.plan import StepPlan, StepResult
from noria.core.record import StepRecord
from noria.core.request import Request
from noria.core.scheduler import Scheduler
from noria.engine.messages import EngineRequest
from noria.errors import EngineError

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 10


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
        self._num_failed_steps = 0

    @property
    def records(self) -> deque[StepRecord]:
        return self.scheduler.records

    @property
    def num_unfinished(self) -> int:
        return self.scheduler.num_unfinished

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do: requests to advance, or the worker to be told of those that ended."""
        return self.scheduler.has_work(self._clock())

    def add_request(self, request: EngineRequest) -> None:
        """Queues a request; raises `RequestError` if it can never be served, `UnavailableError` if not now."""
        own_seed = request.sampling.seed
        self.scheduler.add(
            Request(
                request.request_id,
                request.prompt_token_ids,
                request.sampling,
                seed=self._seeds.getrandbits(64) if own_seed is None else own_seed % 2**64,
                index=request.index,
                priority=request.priority,
                prefix_key=request.prefix_key,
            ),
            self._clock(),
        )

    def finish_request(self, request_id: str, reason: FinishReason) -> RequestEvent | None:
        """Ends a request now: `ABORT`, or `STOP` for a stop string. None if it has ended already."""
        return self.scheduler.finish(request_id, reason, self._clock())

    def step(self) -> list[RequestEvent]:
        """Advances every request that can advance; returns what is new.

        If the step fails, its requests end with `ERROR`, and the engine goes on with the others. Raises `EngineError`
        when `MAX_FAILED_STEPS` in a row have failed: then it is not the requests.
        """
        plan = self.scheduler.schedule(self._clock())
        try:
            events = self.scheduler.update(plan, self._runner.execute(plan), self._clock())
        except BaseException as error:
            events = self.scheduler.abandon(plan, self._clock(), f"{type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise  # somebody wants to leave: the requests are ended all the same
            logger.error("step %d failed: %s", plan.step, plan, exc_info=error)
            self._num_failed_steps += 1
            if self._num_failed_steps >= MAX_FAILED_STEPS:
                raise EngineError(f"{self._num_failed_steps} steps in a row failed, the last with {error!r}") from error
        else:
            self._num_failed_steps = 0
        return events
