"""A simulated server for experiments with the scheduler: arrivals on a clock, and a model that only takes time.

A step takes `c0_s + c1_s x tokens`. Unlike `worlds.World` nothing is checked on the way, so that minutes of service
take seconds; what is measured is what happens, never what the scheduler counts about itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from noria.config import SchedulerConfig
from noria.core.plan import StepPlan, StepResult
from noria.core.request import Request
from noria.core.scheduler import Scheduler
from noria.kv.prefix import PrefixKey
from noria.sampling import SamplingParams


@dataclass(slots=True)
class _Row:
    num_known: int
    num_computed: int


class StubModel:
    """Says token 1 wherever a token is due."""

    def __init__(self, c0_s: float, c1_s: float) -> None:
        self._c0_s, self._c1_s = c0_s, c1_s
        self._rows: dict[str, _Row] = {}

    def execute(self, plan: StepPlan) -> tuple[StepResult, float]:
        """The result, and how long it took."""
        for request_id in plan.finished + plan.preempted:
            self._rows.pop(request_id, None)
        for admitted in plan.admitted:
            self._rows[admitted.request_id] = _Row(len(admitted.token_ids), admitted.num_computed_tokens)
        sampled: dict[str, tuple[int, ...]] = {}
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            row = self._rows[request_id]
            row.num_computed += num_tokens
            if row.num_computed == row.num_known:
                row.num_known += 1
                sampled[request_id] = (1,)
        return StepResult(sampled), self._c0_s + self._c1_s * plan.num_tokens


@dataclass(slots=True, order=True)
class Job:
    """One request to come."""

    arrival_s: float
    number: int
    num_prompt: int = field(compare=False)
    num_output: int = field(compare=False)
    tenant: str | None = field(compare=False, default=None)
    prompt: list[int] | None = field(compare=False, default=None)

    def request(self) -> Request:
        first = 1_000_000 * (self.number + 1)
        prompt = self.prompt or list(range(first, first + self.num_prompt))
        sampling = SamplingParams(max_tokens=self.num_output, ignore_eos=True)
        return Request(f"r{self.number}", prompt, sampling, prefix_key=PrefixKey(tenant=self.tenant))


class Simulation:
    """Runs jobs through a scheduler. `watch` sees the scheduler after every step."""

    def __init__(
        self,
        config: SchedulerConfig,
        jobs: Iterable[Job],
        *,
        c0_s: float = 0.014,
        c1_s: float = 0.0015,
        scheduler: Scheduler | None = None,
        watch: Callable[[Simulation, StepPlan, StepResult], None] | None = None,
    ) -> None:
        self.scheduler = scheduler or Scheduler(config)
        self.now_s = 0.0
        self.requests: dict[str, Request] = {}
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self._jobs = sorted(jobs)
        self._model = StubModel(c0_s, c1_s)
        self._watch = watch

    def run(self, until_s: float = float("inf")) -> Simulation:
        """Until everything is done, or until a time."""
        next_job = 0
        while self.now_s < until_s:
            while next_job < len(self._jobs) and self._jobs[next_job].arrival_s <= self.now_s:
                job = self._jobs[next_job]
                next_job += 1
                request = job.request()
                self.requests[request.request_id] = request
                self.scheduler.add(request, job.arrival_s)
            if not self.scheduler.has_unfinished:
                if next_job == len(self._jobs):
                    break
                self.now_s = self._jobs[next_job].arrival_s
                continue
            self._step()
        return self

    def _step(self) -> None:
        plan = self.scheduler.schedule(self.now_s)
        result, took_s = self._model.execute(plan)
        self.now_s += took_s
        self.scheduler.update(plan, result, self.now_s)
        self.num_output_tokens += len(result.token_ids)
        self.num_computed_tokens += plan.num_tokens
        self.num_preemptions += len(plan.preemptions)
        if self._watch is not None:
            self._watch(self, plan, result)
