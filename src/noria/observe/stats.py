"""Counts, gauges and histograms derived from step records, and from nothing else.

`EngineStats.add` is called with every `StepRecord`, in the front's process; `noria.observe.prometheus` publishes the
result. Times are those of the engine's clock: from a request's arrival in the engine to the end of the step that made
a token. Not here: HTTP, tokenising, and the wire between.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from noria.core.events import FinishReason
from noria.core.plan import Limit
from noria.core.record import Ending, StepRecord
from noria.kv.manager import KVUsage

TTFT_BUCKETS_S = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
    2560.0,
)  # fmt: skip
GAP_BUCKETS_S = (
    .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS_S = (
    .3, .5, .8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TOKEN_BUCKETS = tuple(m * 10**e for e in range(7) for m in (1, 2, 5))
REFUSAL_CODES = ("queue_full", "draining")
PHASES = ("schedule", "execute", "between")
_NOBODY_WAITS = dict.fromkeys(Limit, 0)
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)


class Histogram:
    """Counts per bucket, an observation falling into the first bucket whose bound is not below it."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass(slots=True)
class _Request:
    """What must be remembered of a request until it ends."""

    arrival_s: float
    num_prompt_tokens: int
    was_admitted: bool = False
    last_token_s: float | None = None


@dataclass(slots=True)
class EngineStats:
    """Everything a metrics page needs. Token counts: `num_prompt_tokens = cached + computed` at first admissions."""

    num_blocks: int
    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    """Prompt tokens of waiting requests that have never run."""
    waiting_by_reason: dict[Limit, int] = field(default_factory=_NOBODY_WAITS.copy)
    """Which limit those wait for that wait; they add up to `num_waiting`."""
    kv: KVUsage = field(init=False)
    num_steps: int = 0
    num_arrived: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    num_computed_tokens: int = 0
    """All tokens run, recomputation after preemption included."""
    num_preemptions: int = 0
    num_tokens_lost: int = 0
    """Computed tokens whose KV preempted requests gave up."""
    num_refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REFUSAL_CODES, 0))
    """Requests that were refused for now, by the error's code. They are not among those that arrived."""
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Where the engine's time went while it had something to run: planning; the model and the choice of tokens; and
    from there to the next plan, which is updating, telling the front, and whatever kept the process from running."""
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKEN_BUCKETS))
    ttft_s: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS_S))
    gap_s: Histogram = field(default_factory=lambda: Histogram(GAP_BUCKETS_S))
    queue_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))
    e2e_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_BUCKETS))
    generation_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_BUCKETS))
    preemptions: Histogram = field(default_factory=lambda: Histogram(PREEMPTION_BUCKETS))
    _requests: dict[str, _Request] = field(default_factory=dict)
    _busy_since_s: float | None = None
    """When the last step had been executed, if it ran something and left something to run."""

    def __post_init__(self) -> None:
        self.kv = KVUsage(num_held=0, num_cached_idle=0, num_blank=self.num_blocks)

    @property
    def kv_usage(self) -> float:
        """Share of the pool that running requests hold, 0 to 1; idle cached blocks count as free."""
        return self.kv.num_held / self.num_blocks

    def add(self, record: StepRecord) -> None:
        """Takes one record, in order and once."""
        for arrival in record.arrivals:
            self.num_arrived += 1
            self._requests[arrival.request_id] = _Request(arrival.arrival_s, arrival.num_prompt_tokens)
        for code, count in record.refusals.items():
            self.num_refused[code] = self.num_refused.get(code, 0) + count
        self._add_times(record)
        self._add_plan(record)
        for request_id, token_ids in record.result.token_ids.items():
            self._add_tokens(request_id, len(token_ids), record.updated_s)
        for ending in record.endings:
            self._add_ending(ending)
        self.num_running, self.num_waiting = record.num_running, record.num_waiting
        self.num_queued_tokens = record.num_queued_tokens
        self.waiting_by_reason = _count_waiting(record)
        self.kv = record.kv

    def _add_times(self, record: StepRecord) -> None:
        is_busy = not record.plan.is_empty
        if is_busy:
            # A pause that goes on needs no look: its steps run something, or are empty and end the busy time.
            if self._busy_since_s is not None and not record.pause_began:
                self.phase_s["between"] += record.planned_s - self._busy_since_s
            self.phase_s["schedule"] += record.started_s - record.planned_s
            self.phase_s["execute"] += record.updated_s - record.started_s
        self._busy_since_s = record.updated_s if is_busy and record.num_running + record.num_waiting > 0 else None

    def _add_plan(self, record: StepRecord) -> None:
        plan = record.plan
        self.num_steps += 1
        self.num_preemptions += len(plan.preemptions)
        self.num_tokens_lost += sum(preemption.num_tokens_lost for preemption in plan.preemptions)
        if record.error is None and not plan.is_empty:
            self.num_computed_tokens += plan.num_tokens
            self.step_tokens.observe(plan.num_tokens)
        for admitted in plan.admitted:
            request = self._requests.get(admitted.request_id)
            if request is None or request.was_admitted:
                continue  # resumed: its prompt has been counted
            request.was_admitted = True
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_cached_tokens += admitted.num_computed_tokens
            self.queue_s.observe(record.planned_s - request.arrival_s)

    def _add_tokens(self, request_id: str, num_tokens: int, now_s: float) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return  # it ended from outside while the step ran, and its tokens were dropped
        self.num_generation_tokens += num_tokens
        if request.last_token_s is None:
            self.ttft_s.observe(now_s - request.arrival_s)
        else:
            self.gap_s.observe(now_s - request.last_token_s)
        request.last_token_s = now_s

    def _add_ending(self, ending: Ending) -> None:
        self._requests.pop(ending.request_id, None)
        self.num_finished[ending.reason] += 1
        self.e2e_s.observe(ending.ended_s - ending.arrival_s)
        self.prompt_tokens.observe(ending.num_prompt_tokens)
        self.generation_tokens.observe(ending.num_output_tokens)
        if ending.num_preemptions:
            self.preemptions.observe(ending.num_preemptions)


def _count_waiting(record: StepRecord) -> dict[Limit, int]:
    """Requests that the step left waiting, by what they wait for."""
    if not record.num_waiting:  # nearly always, and this is called for every step
        return _NOBODY_WAITS.copy()
    plan = record.plan
    counts = Counter(held.limit for held in plan.held if held.request_id not in plan.num_scheduled_tokens)
    if plan.admission_end is not None:
        counts[plan.admission_end.limit] += plan.admission_end.num_behind
    return _NOBODY_WAITS | counts
