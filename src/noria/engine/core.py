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

import msgspec

from noria.core.events import FinishReason, RequestEvent
from noria.core.explain import Explanation, explain
from noria.core.plan import StepPlan, StepResult
from noria.core.record import StepRecord
from noria.core.request import Request
from noria.core.scheduler import PauseMode, Scheduler
from noria.engine.messages import EngineRequest
from noria.errors import EngineError
from noria.kv.events import Subscriber

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
        scheduler.weights_version = ""

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

    def seconds_to_deadline(self) -> float | None:
        """When a request may run out of time next, from now: then there is work. None if none has a deadline."""
        deadline_s = self.scheduler.next_deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - self._clock())

    @property
    def weights_version(self) -> str:
        """Which weights the runner has; part of the name of all KV content."""
        return self.scheduler.weights_version or ""

    @weights_version.setter
    def weights_version(self, version: str) -> None:
        """Says that the weights have changed: nothing that was or is being computed with the old ones will be found.

        Running requests go on with the KV that they have; pause the engine before the weights are changed if they
        should not.
        """
        self.scheduler.weights_version = version
        self.reset_prefix_cache()

    def add_request(self, request: EngineRequest) -> None:
        """Queues a request; raises `RequestError` if it can never be served, `UnavailableError` if not now."""
        prefix_key = msgspec.structs.replace(request.prefix_key, weights_version=self.weights_version)
        own_seed = request.sampling.seed
        self.scheduler.add(
            Request(
                request.request_id,
                request.prompt_token_ids,
                request.sampling,
                seed=self._seeds.getrandbits(64) if own_seed is None else own_seed % 2**64,
                index=request.index,
                parent_id=request.parent_id,
                priority=request.priority,
                prefix_key=prefix_key,
            ),
            self._clock(),
        )

    def finish_request(self, request_id: str, reason: FinishReason) -> RequestEvent | None:
        """Ends a request now: `ABORT`, or `STOP` for a stop string. None if it has ended already."""
        return self.scheduler.finish(request_id, reason, self._clock())

    def explain(self, request_id: str) -> Explanation | None:
        """Where a request stands and what holds it back; None if there is no such request (any more)."""
        return explain(self.scheduler, request_id)

    def pause(self, mode: PauseMode) -> list[RequestEvent]:
        """Stops admitting, or everything, until `resume`. Returns the last events of requests that this ends."""
        return self.scheduler.pause(mode, self._clock())

    def resume(self) -> None:
        self.scheduler.resume()

    def drain(self) -> None:
        """From now on new requests are refused; those that were accepted are finished."""
        self.scheduler.drain()

    def reset_prefix_cache(self) -> None:
        """Nothing cached will be found any more. Running requests go on."""
        self.scheduler.reset_prefix_cache()
        self.scheduler.kv.publish()  # a subscriber should not have to wait for the next step

    def subscribe_kv_events(self, subscriber: Subscriber) -> None:
        """From now on `subscriber` is told what happens to findable KV content; see `noria.kv.events`. There is one."""
        self.scheduler.kv.subscribe(subscriber)

    def step(self) -> list[RequestEvent]:
        """Advances every request that can advance; returns what is new.

        If the step fails, its requests end with `ERROR`, and the engine goes on with the others. Raises `EngineError`
        when `MAX_FAILED_STEPS` in a row have failed: then it is not the requests.
        """
        plan = self.scheduler.schedule(self._clock())
        started_s = self._clock()
        try:
            result = self._runner.execute(plan)
            for request_id, failure in result.failed.items():
                level = logging.INFO if request_id in result.refused else logging.ERROR
                logger.log(level, "step %d: request %s failed: %s", plan.step, request_id, failure)
            events = self.scheduler.update(plan, result, self._clock(), started_s=started_s)
        except BaseException as error:
            what = f"{type(error).__name__}: {error}"
            events = self.scheduler.abandon(plan, self._clock(), what, started_s=started_s)
            if not isinstance(error, Exception):
                raise  # somebody wants to leave: the requests are ended all the same
            logger.error("step %d failed: %s", plan.step, plan, exc_info=error)
            self._num_failed_steps += 1
            if self._num_failed_steps >= MAX_FAILED_STEPS:
                raise EngineError(f"{self._num_failed_steps} steps in a row failed, the last with {error!r}") from error
        else:
            self._num_failed_steps = 0
        return events
