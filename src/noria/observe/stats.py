"""Counts, gauges and histograms derived from step records, and from nothing else.

`EngineStats.add` is called with every `StepRecord`, in the front's process; `noria.observe.prometheus` publishes the
result. Times are those of the engine's clock: from a request's arrival in the engine to the end of the step that made
a token. Not here: HTTP, tokenising, and the wire between.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from noria.core.events import FinishReason
from noria.core.plan import Limit
from noria.core.record import Ending, StepRecord
from noria.kv.manager import KVUsage
from noria.observe.histogram import (
    GAP_BUCKETS_S,
    PREEMPTION_BUCKETS,
    REQUEST_BUCKETS_S,
    STEP_TOKEN_BUCKETS,
    TOKEN_BUCKETS,
    TTFT_BUCKETS_S,
    Histogram,
)
from noria.observe.pace import Pace

REFUSAL_CODES = ("queue_full", "draining")
PHASES = ("schedule", "execute", "between")
_NOBODY_WAITS = dict.fromkeys(Limit, 0)


@dataclass(slots=True)
class _Request:
    """What must be remembered of a request until it ends."""

    arrival_s: float
    num_prompt_tokens: int
    admitted_s: float | None = None
    """For the first time."""
    first_token_s: float | None = None
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
    pace: Pace = field(default_factory=Pace)
    """Of requests that were not aborted: calls of which one sequence is refused have all others aborted."""
    num_steps: int = 0
    num_arrived: int = 0
    num_arrived_prompt_tokens: int = 0
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
    prefill_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))
    decode_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))
    inference_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))
    token_s: Histogram = field(default_factory=lambda: Histogram(GAP_BUCKETS_S))
    """Mean time per token after the first, of each ended request."""
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

    @property
    def num_submitted(self) -> int:
        """Requests that came to the engine: it took them, or had no place."""
        return self.num_arrived + sum(self.num_refused.values())

    @property
    def num_unfinished_prompt_tokens(self) -> int:
        """Prompt tokens of requests that run or wait."""
        return self.num_arrived_prompt_tokens - int(self.prompt_tokens.sum)

    @property
    def num_unfinished_generation_tokens(self) -> int:
        """Tokens generated so far by requests that run or wait."""
        return self.num_generation_tokens - int(self.generation_tokens.sum)

    def add(self, record: StepRecord) -> None:
        """Takes one record, in order and once."""
        for arrival in record.arrivals:
            self.num_arrived += 1
            self.num_arrived_prompt_tokens += arrival.num_prompt_tokens
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
        self._add_pace(record)
        self.kv = record.kv

    def _add_pace(self, record: StepRecord) -> None:
        self.pace.note_busy(record.planned_s)
        for ending in record.endings:
            if ending.reason != FinishReason.ABORT:
                self.pace.note_ending(ending.ended_s)
        if record.num_running + record.num_waiting == 0:
            self.pace.note_idle()

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
            if request is None or request.admitted_s is not None:
                continue  # resumed: its prompt has been counted
            request.admitted_s = record.planned_s
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_cached_tokens += admitted.num_computed_tokens
            self.queue_s.observe(record.planned_s - request.arrival_s)

    def _add_tokens(self, request_id: str, num_tokens: int, now_s: float) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return  # it ended from outside while the step ran, and its tokens were dropped
        self.num_generation_tokens += num_tokens
        if request.last_token_s is None:
            request.first_token_s = now_s
            self.ttft_s.observe(now_s - request.arrival_s)
        else:
            self.gap_s.observe(now_s - request.last_token_s)
        request.last_token_s = now_s

    def _add_ending(self, ending: Ending) -> None:
        request = self._requests.pop(ending.request_id, None)
        if request is not None:
            self._add_phases(request, ending.num_output_tokens)
        self.num_finished[ending.reason] += 1
        self.e2e_s.observe(ending.ended_s - ending.arrival_s)
        self.prompt_tokens.observe(ending.num_prompt_tokens)
        self.generation_tokens.observe(ending.num_output_tokens)
        if ending.num_preemptions:
            self.preemptions.observe(ending.num_preemptions)

    def _add_phases(self, request: _Request, num_output_tokens: int) -> None:
        """Where an ended request's time went between its admission and its last token, preemptions included."""
        admitted_s, first_s, last_s = request.admitted_s, request.first_token_s, request.last_token_s
        if admitted_s is None or first_s is None or last_s is None:
            return
        self.prefill_s.observe(first_s - admitted_s)
        self.decode_s.observe(last_s - first_s)
        self.inference_s.observe(last_s - admitted_s)
        if num_output_tokens > 1:
            self.token_s.observe((last_s - first_s) / (num_output_tokens - 1))


def _count_waiting(record: StepRecord) -> dict[Limit, int]:
    """Requests that the step left waiting, by what they wait for."""
    if not record.num_waiting:  # nearly always, and this is called for every step
        return _NOBODY_WAITS.copy()
    plan = record.plan
    counts = Counter(held.limit for held in plan.held if held.request_id not in plan.num_scheduled_tokens)
    if plan.admission_end is not None:
        counts[plan.admission_end.limit] += plan.admission_end.num_behind
    return _NOBODY_WAITS | counts
