"""The scheduler: which requests advance in this step, by how many tokens, in which blocks.

One token budget is spent in every step: running requests first, decodes before unfinished prompts; then waiting ones
in the policy's order, into what is left of budget, sequence slots and KV blocks. A request is a pair of cursors that
tries to catch up with its target; prompts and outputs are the same thing here. Under memory pressure the policy
names a victim: it gives its blocks back and waits again, to be computed anew.

Why it never stalls: every accepted request fits into an empty pool (`noria.core.admission`); there are never more
running requests than tokens in the budget, so each advances in every step; among them is one that is nobody's victim
(`noria.core.policies.base`), and alone it always fits; and a waiting request is passed over only for something that
a running one will give back or finish.

Called by `noria.engine.core`. No clock, no randomness, no tensors, no text: time and ids come from outside.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from noria.config import SchedulerConfig
from noria.core.admission import check_queue, check_sampling, judge
from noria.core.admitting import Admitting
from noria.core.advancing import Advancing, Drafter
from noria.core.chunks import ChunkRule
from noria.core.deadlines import Deadlines
from noria.core.draft import Chunk, PlanDraft
from noria.core.events import FinishReason, RequestEvent
from noria.core.gates import AdapterGate, Gate, GrammarGate
from noria.core.margin import Margin
from noria.core.plan import Limit, Preemption, StepPlan, StepResult, TokenLogprobs
from noria.core.policies import load_policy
from noria.core.record import Arrival, Ending, StepRecord
from noria.core.request import Request, RequestState
from noria.core.results import check_result
from noria.core.running import RunningSet
from noria.core.stopping import stop_ids, why_stopped
from noria.errors import UnavailableError
from noria.kv.manager import KVManager


class PauseMode(StrEnum):
    """What becomes of unfinished requests while the engine is paused. New ones are accepted, and wait."""

    ABORT = "abort"  # they end at once
    WAIT = "wait"  # those that have begun run to their end, the others wait
    KEEP = "keep"  # everything stands still


class Scheduler:
    """Plans steps and learns from their results. Not thread-safe: one owner calls it."""

    def __init__(self, config: SchedulerConfig, *, drafter: Drafter | None = None) -> None:
        self.config = config
        self.kv = KVManager(
            config.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            layout=config.kv_layout,
        )
        self._tells_computed = config.enable_prefix_caching or self.kv.has_windows
        self.waiting = load_policy(config, self._count_cached)
        self.running = RunningSet(config.block_size)
        self.records: deque[StepRecord] = deque()
        """Of the last steps, up to so many entries of requests: see `SchedulerConfig`."""
        self._num_entries_kept = 0
        self.paused: PauseMode | None = None
        self.is_draining = False
        self.weights_version: str | None = None
        """Which weights the worker has: part of the name of what it computes. None: what each request says."""
        self.drafter = drafter
        self._gates: list[Gate] = [GrammarGate()]
        if config.max_adapters is not None:
            self._gates.append(AdapterGate(config.max_adapters))
        self.margin = Margin(config.num_blocks, config.watermark, adaptive=config.adaptive_watermark)
        self._deadlines = Deadlines(config.first_token_deadline_s, config.request_deadline_s)
        self.last_plan: StepPlan | None = None
        self._in_flight = PlanDraft(0)
        self._cached_counts: dict[str, int] = {}  # good while the pool's content does not change
        self._counted_at = -1
        self._events: list[RequestEvent] = []  # of requests that ended by themselves between results
        self._finished_ids: list[str] = []  # told to the worker with the next plan
        self._arrivals: list[Arrival] = []  # told to the next record
        self._endings: list[Ending] = []  # likewise
        self._refusals: dict[str, int] = {}  # likewise
        self._pause_began = False  # likewise
        self.num_arrived = self.num_arrived_at_plan = 0
        self._num_steps = 0
        self._planned_s = 0.0

    @property
    def num_unfinished(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def has_unfinished(self) -> bool:
        return self.num_unfinished > 0

    @property
    def has_news(self) -> bool:
        """Whether something happened that the worker, the requests' owners or the records have not been told of: one
        more step, if an empty one."""
        return bool(self._finished_ids or self._events or self._arrivals or self._refusals)

    @property
    def next_deadline_s(self) -> float | None:
        """When a step is due for a deadline's sake, whatever else there is to do."""
        return self._deadlines.next_s

    def has_work(self, now_s: float) -> bool:
        """Whether a step has something to do."""
        if self.has_news or (self.next_deadline_s is not None and self.next_deadline_s <= now_s):
            return True
        match self.paused:
            case None:
                return self.has_unfinished
            case PauseMode.KEEP:
                return False
            case _:
                return not self.is_quiet

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has begun that is not finished: what a pause that waits, waits for."""
        return not self.running and all(request.state is RequestState.WAITING for request in self.waiting)

    def add(self, request: Request, now_s: float) -> None:
        """Accepts a request into the queue.

        Raises `RequestError` if it could never be served, `UnavailableError` if it cannot wait here now. The id must
        not be in use: ids are internal and made by the engine's own side.
        """
        assert request.request_id not in self.running
        assert request.request_id not in self.waiting
        config = self.config
        request.max_tokens = judge(request.token_ids, request.sampling.max_tokens, config)
        check_sampling(request.sampling, request.max_tokens, config)
        try:
            self._check_place(request)
        except UnavailableError as refusal:
            self._refusals[refusal.code] = self._refusals.get(refusal.code, 0) + 1
            raise
        self.num_arrived += 1
        request.arrival_number, request.arrival_s = self.num_arrived, now_s
        request.max_num_tokens = request.num_prompt_tokens + request.max_tokens
        request.stop_ids = stop_ids(request, config.eos_token_ids)
        if config.enable_prefix_caching:
            request.hash_blocks(config.block_size)
        self._arrivals.append(Arrival(request.request_id, request.num_prompt_tokens, now_s))
        self._deadlines.add(request)
        self.waiting.note_arrival(request)
        self.waiting.push(request)

    def _check_place(self, request: Request) -> None:
        if self.is_draining:
            raise UnavailableError(
                "the engine is draining: it finishes what it has and takes nothing new", code="draining"
            )
        if request.parent_id is not None and request.parent_id in self.waiting:
            request.num_queued_tokens = 0  # one prompt, computed once
        num_queued_tokens = self.waiting.num_queued_tokens
        check_queue(len(self.running), len(self.waiting), num_queued_tokens, request.num_queued_tokens, self.config)

    # --- planning -------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> StepPlan:
        """Plans one step. The plan must be executed and its result given to `update` before the next one."""
        self._planned_s = now_s
        self.num_arrived_at_plan = self.num_arrived
        for request, why in self._deadlines.pop_overdue(now_s):
            self._end(request, FinishReason.TIMEOUT, now_s, error=why, error_code="deadline_exceeded")
        draft = self._in_flight = PlanDraft(self.config.max_num_batched_tokens)
        if self.paused is PauseMode.KEEP:
            draft.end_admission(Limit.PAUSED, len(self.waiting), self.config.scheduling_policy, 0)
        else:
            rule = ChunkRule(self.config, is_alone=self.num_unfinished == 1, somebody_waits=len(self.waiting) > 0)
            advancing, admitting = Advancing(self, draft, rule), Admitting(self, draft, rule, now_s)
            advancing.run()
            try:
                admitting.run()
                advancing.top_up()
                admitting.admit_late()
            finally:
                admitting.put_back()
        self.margin.note_step()
        finished, self._finished_ids = self._finished_ids, []
        self._num_steps += 1
        self.last_plan = draft.freeze(self._num_steps, finished)
        return self.last_plan

    def preempt(self, victim: Request, in_favour_of: Request, limit: Limit, draft: PlanDraft) -> Preemption:
        """Takes everything from a running request, also what this step had planned for it; it waits again.

        `limit` is what the other one lacked.
        """
        draft.unplan(victim)
        self.running.remove(victim)
        victim.move_to(RequestState.PREEMPTED)
        preemption = Preemption(
            request_id=victim.request_id,
            in_favour_of=in_favour_of.request_id,
            limit=limit,
            num_tokens_lost=victim.num_computed,
            num_blocks_freed=self.kv.release(victim.request_id),
            num_preemptions=victim.num_preemptions + 1,
        )
        draft.preemptions.append(preemption)
        victim.num_tokens_lost += victim.num_computed
        victim.num_computed = 0
        victim.draft_token_ids = ()
        victim.num_preemptions += 1
        self.waiting.push(victim)
        return preemption

    def ask_gates(self, request: Request) -> Limit | None:
        """The limit outside tokens, slots and memory that the request waits for. Raises `Refused`."""
        for gate in self._gates:
            if limit := gate.ask(request, self.running.by_id):
                return limit
        return None

    def refuse(self, request: Request, why: str, now_s: float, *, code: str | None = "refused") -> None:
        """A waiting request turned out to be one that can never run; without a code, by a failure of ours."""
        self._end(request, FinishReason.ERROR, now_s, error=why, error_code=code)

    def _count_cached(self, request: Request) -> int:
        if not self.config.enable_prefix_caching:
            return 0
        if self.kv.pool.version != self._counted_at:
            self._counted_at = self.kv.pool.version
            self._cached_counts.clear()
        count = self._cached_counts.get(request.request_id)
        if count is None:
            match = self.kv.match(
                request.hash_blocks(self.config.block_size), request.num_tokens, request.num_shareable
            )
            count = self._cached_counts[request.request_id] = match.num_tokens
        return count

    # --- learning -------------------------------------------------------------------------------------------------

    def update(
        self, plan: StepPlan, result: StepResult, now_s: float, *, started_s: float | None = None
    ) -> list[RequestEvent]:
        """Moves cursors past what was executed, accepts sampled tokens, ends what is done. Leaves a `StepRecord`.

        `started_s` is when the execution began, for the record; without it, when planning did.

        Raises `EngineError`, before anything has changed, if the result is not what the plan asked for: a request that
        is owed a token and gets none would wait for ever.
        """
        assert plan.step == self._num_steps, "the result is for another plan than the last"
        draft = self._in_flight
        check_result(plan, result, draft.chunks)
        for request_id, error in result.failed.items():  # first, so that nothing they computed becomes findable
            if (request := self.running.get(request_id)) is not None:
                code = "refused" if request_id in result.refused else None
                self._end(request, FinishReason.ERROR, now_s, error=error, error_code=code)
        if draft.has_steady:
            for request in self.running.filling_a_block():
                self._register(request, request.num_computed + 1)
            self.running.tick()
            self._accept_steady(result, now_s)
        for chunk in draft.chunks.values():
            if chunk.request.state is RequestState.RUNNING:  # it may have ended from outside while the step ran
                self._accept_chunk(chunk, result, now_s)
        self.kv.publish()
        events, self._events = self._events, []
        self._leave_record(plan, result, now_s, started_s)
        return events

    def _accept_steady(self, result: StepResult, now_s: float) -> None:
        """The loop over all running requests: it does as little as it can for each."""
        by_id, logprobs, charges = self.running.by_id, result.logprobs, self.waiting.charges_outputs
        append_event = self._events.append
        for request_id, token_ids in result.token_ids.items():
            request = by_id.get(request_id)
            if request is None or request.phase is None:
                continue  # ended from outside while the step ran, or not steady
            request.num_computed += 1
            tokens = request.token_ids
            tokens.append(token_ids[0])
            if charges:
                self.waiting.charge_output(request, 1)
            own_logprobs = logprobs.get(request_id, ()) if logprobs else ()
            if token_ids[0] in request.stop_ids or len(tokens) >= request.max_num_tokens:
                self._end_if_stopped(request, token_ids, own_logprobs, now_s)
            else:
                append_event(RequestEvent(request_id, token_ids, own_logprobs))

    def _accept_chunk(self, chunk: Chunk, result: StepResult, now_s: float) -> None:
        request = chunk.request
        token_ids = result.token_ids.get(request.request_id, ())
        logprobs = result.logprobs.get(request.request_id, ())
        num_rejected = len(request.draft_token_ids) - (len(token_ids) - 1) if request.draft_token_ids else 0
        request.draft_token_ids = ()
        num_accepted, stopped = 0, False
        while num_accepted < len(token_ids) and not stopped:
            request.token_ids.append(token_ids[num_accepted])
            num_accepted += 1
            stopped = why_stopped(request, self.config.eos_token_ids) is not None
        # Drafts behind a token that ends the request were computed, but are none of its tokens.
        num_computed = min(request.num_computed + chunk.num_tokens - num_rejected, request.num_tokens)
        self.running.num_computed_tokens += num_computed - request.num_computed
        request.num_computed = num_computed
        self._register(request, num_computed)
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if request.num_scored is not None:
            prompt_logprobs = result.prompt_logprobs.get(request.request_id, ())
            request.num_scored += len(prompt_logprobs)
        if request.max_tokens == 0 and num_computed == request.num_tokens:
            self._end(request, FinishReason.LENGTH, now_s, prompt_logprobs=prompt_logprobs)
            return
        if not token_ids:
            if prompt_logprobs:
                self._events.append(RequestEvent(request.request_id, prompt_logprobs=prompt_logprobs))
            return
        if self.waiting.charges_outputs:
            self.waiting.charge_output(request, num_accepted)
        if stopped:
            token_ids, logprobs = token_ids[:num_accepted], logprobs[:num_accepted]
            self._end_if_stopped(request, token_ids, logprobs, now_s, prompt_logprobs)
            return
        num_cached = request.num_cached_tokens or 0
        self._events.append(
            RequestEvent(
                request.request_id, token_ids, logprobs, num_cached_tokens=num_cached, prompt_logprobs=prompt_logprobs
            )
        )
        if self.drafter is None:
            self.running.settle(request)

    def _register(self, request: Request, num_computed: int) -> None:
        if self.config.enable_prefix_caching:
            request.hash_blocks(self.config.block_size)
        if self._tells_computed:
            self.kv.register_computed(request.request_id, num_computed, request.token_ids)

    def _end_if_stopped(
        self,
        request: Request,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        now_s: float,
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        stopped = why_stopped(request, self.config.eos_token_ids)
        assert stopped is not None
        self._end(request, stopped[0], now_s, token_ids, logprobs, prompt_logprobs, stop_reason=stopped[1])

    def abandon(
        self, plan: StepPlan, now_s: float, error: str, *, started_s: float | None = None
    ) -> list[RequestEvent]:
        """The plan could not be executed: ends its requests, since what the worker knows of them is in doubt.

        For the same reason the next plan repeats whose rows the worker was to forget with this one.
        """
        self._finished_ids[:0] = plan.finished + plan.preempted
        for request_id in plan.num_scheduled_tokens:
            request = self.running.get(request_id)
            if request is not None:
                self._end(request, FinishReason.ERROR, now_s, error=error)
        self.kv.publish()
        events, self._events = self._events, []
        self._leave_record(plan, StepResult({}), now_s, started_s, error)
        return events

    def _leave_record(
        self, plan: StepPlan, result: StepResult, now_s: float, started_s: float | None, error: str | None = None
    ) -> None:
        self.records.append(
            StepRecord(
                plan=plan.without_token_ids(),
                result=result.without_prompt_logprobs(),
                arrivals=tuple(self._arrivals),
                endings=tuple(self._endings),
                refusals=self._refusals,
                pause_began=self._pause_began,
                planned_s=self._planned_s,
                started_s=self._planned_s if started_s is None else started_s,
                updated_s=now_s,
                num_running=len(self.running),
                num_waiting=len(self.waiting),
                num_queued_tokens=self.waiting.num_queued_tokens,
                kv=self.kv.usage(self.running.num_computed_tokens),
                error=error,
            )
        )
        self._arrivals.clear()
        self._endings.clear()
        self._refusals = {}
        self._pause_began = False
        self._num_entries_kept += len(plan.num_scheduled_tokens)
        config = self.config
        while len(self.records) > config.num_records_kept or (
            self._num_entries_kept > config.num_record_entries_kept and len(self.records) > 1
        ):
            self._num_entries_kept -= len(self.records.popleft().plan.num_scheduled_tokens)

    # --- ending and standing still --------------------------------------------------------------------------------

    def finish(self, request_id: str, reason: FinishReason, now_s: float) -> RequestEvent | None:
        """Ends a request from outside, in any state: aborted, or stopped by a string that its client found.

        Returns its last event; None if there is no such request (any more), which is no error.
        """
        request = self.running.get(request_id) or self.waiting.get(request_id)
        if request is None:
            return None
        self._end(request, reason, now_s)
        return self._events.pop()

    def pause(self, mode: PauseMode, now_s: float) -> list[RequestEvent]:
        """Stops admitting, or everything, until `resume`. Returns the last events of those that it ends."""
        self.paused = mode
        self._pause_began = True
        if mode is not PauseMode.ABORT:
            return []
        everybody = [*self.running, *self.waiting]
        events = [self.finish(request.request_id, FinishReason.ABORT, now_s) for request in everybody]
        return [event for event in events if event is not None]

    def resume(self) -> None:
        self.paused = None

    def drain(self) -> None:
        """From now on nothing is accepted; what has been is finished."""
        self.is_draining = True

    def reset_prefix_cache(self) -> None:
        """Makes all cached content unfindable, also what running requests are about to add; they go on undisturbed."""
        self.kv.reset_prefix_cache()

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        now_s: float,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
        *,
        stop_reason: int | None = None,
        error: str | None = None,
        error_code: str | None = None,
    ) -> None:
        """The one way out of the scheduler, from any state."""
        request_id = request.request_id
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self.kv.release(request_id)
        elif request_id in self.waiting:  # else it is being looked at for admission
            self.waiting.remove(request_id)
        request.move_to(RequestState.FINISHED)
        self._cached_counts.pop(request_id, None)
        self.waiting.note_ended(request)
        self._deadlines.note_ending(self.num_unfinished)
        self._finished_ids.append(request_id)
        self._endings.append(
            Ending(
                request_id=request_id,
                reason=reason,
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=request.num_output_tokens,
                num_preemptions=request.num_preemptions,
                arrival_s=request.arrival_s,
                ended_s=now_s,
                num_tokens_lost=request.num_tokens_lost,
            )
        )
        num_cached = request.num_cached_tokens or 0
        self._events.append(
            RequestEvent(
                request_id, token_ids, logprobs, reason, stop_reason, num_cached, error, error_code, prompt_logprobs
            )
        )

    def check(self) -> None:
        """Asserts everything that must hold between steps; tests call it after each."""
        self.kv.check()
        self.running.check()
        self.waiting.check()
        assert len(self.running) <= self.config.num_slots
        for request in self.running:
            request.check()
            assert request.state is RequestState.RUNNING
            assert request.num_remaining > 0
            assert request.num_computed <= self.kv.num_tokens_held(request.request_id)
        for request in self.waiting:
            request.check()
            assert request.state in (RequestState.WAITING, RequestState.PREEMPTED)
            assert request.num_computed == 0
            assert not request.draft_token_ids
        if not self.running:
            assert self.kv.pool.num_free_blocks == self.config.num_blocks, "blocks are held, but nothing runs"
