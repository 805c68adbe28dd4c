"""The scheduler: which requests advance in this step, by how many tokens, in which blocks.

One token budget is spent in every step: running requests first, in order of admission; then waiting ones, into
what is left of budget, sequence slots and KV blocks. A request is a pair of cursors that tries to catch up with
its target; prompts and outputs are the same thing here. Under memory pressure the last running request is
preempted: it gives its blocks back and goes to the front of the queue, to be computed again.

Why it never stalls: every accepted request fits into an empty pool (`noria.core.admission`); the first running
request advances in every step, since it is never anybody's victim but its own, and alone it always fits; and a
waiting request is passed over only for something that a running one will give back or finish.

Called by `noria.engine.core`. No clock, no randomness, no tensors, no text: time and ids come from outside.
"""

from __future__ import annotations

from collections import deque

import msgspec

from noria.config import SchedulerConfig
from noria.core.admission import judge
from noria.core.draft import PlanDraft
from noria.core.events import FinishReason, RequestEvent
from noria.core.plan import Limit, StepPlan, StepResult, TokenLogprobs
from noria.core.queues import FcfsQueue, RunningList
from noria.core.record import Arrival, Ending, StepRecord
from noria.core.request import Request, RequestState
from noria.core.stopping import why_stopped
from noria.errors import EngineError
from noria.kv.manager import KVManager


class Scheduler:
    """Plans steps and learns from their results. Not thread-safe: one owner calls it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv = KVManager(config.num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching)
        self.waiting = FcfsQueue()
        self.running = RunningList()
        self.records: deque[StepRecord] = deque(maxlen=config.num_records_kept)
        self._finished_ids: list[str] = []  # told to the worker with the next plan
        self._arrivals: list[Arrival] = []  # told to the next record
        self._endings: list[Ending] = []  # likewise
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
        """Whether requests ended that the worker has not been told of: one more step, if only an empty one."""
        return bool(self._finished_ids)

    def add(self, request: Request, now_s: float) -> None:
        """Accepts a request into the queue; raises `RequestError` if it could never be served.

        The id must not be in use: ids are internal and made by the engine's own side.
        """
        assert request.request_id not in self.running
        assert request.request_id not in self.waiting
        request.max_tokens = judge(request.token_ids, request.sampling.max_tokens, self.config)
        request.arrival_s = now_s
        self._arrivals.append(Arrival(request.request_id, request.num_prompt_tokens, now_s))
        self.waiting.push(request)

    # --- planning -------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> StepPlan:
        """Plans one step. The plan must be executed and its result given to `update` before the next one."""
        self._planned_s = now_s
        draft = PlanDraft(self.config.max_num_batched_tokens)
        self._advance_running(draft)
        if draft.preempted:
            draft.end_admission(Limit.PREEMPTING_STEP, len(self.waiting))
        else:
            self._admit_waiting(draft)
        finished, self._finished_ids = self._finished_ids, []
        self._num_steps += 1
        return draft.freeze(self._num_steps, finished)

    def _advance_running(self, draft: PlanDraft) -> None:
        for request in tuple(self.running):
            if request.state is not RequestState.RUNNING:
                break  # preempted for an earlier one, as are all behind it
            num_tokens = min(request.num_remaining, draft.num_tokens_left)
            if num_tokens == 0:
                draft.hold(request, Limit.TOKEN_BUDGET)
                continue
            new_block_ids = self._extend(request, request.num_computed + num_tokens, draft)
            if new_block_ids is None:
                break  # it was last and gave way itself
            draft.advance(request, num_tokens, new_block_ids)

    def _extend(self, request: Request, num_planned: int, draft: PlanDraft) -> tuple[int, ...] | None:
        """Blocks for the request's first `num_planned` tokens, preempting from the end until they are there."""
        while (new_block_ids := self.kv.extend(request.request_id, num_planned)) is None:
            assert len(self.running) > 1, f"{request!r} does not fit alone: admission let in what it must refuse"
            victim = self.running.pop_victim()
            self._preempt(victim, draft)
            if victim is request:
                return None
        return new_block_ids

    def _preempt(self, victim: Request, draft: PlanDraft) -> None:
        victim.move_to(RequestState.PREEMPTED)
        self.kv.release(victim.request_id)
        draft.preempt(victim)
        victim.num_computed = 0
        victim.num_preemptions += 1
        self.waiting.push_front(victim)

    def _admit_waiting(self, draft: PlanDraft) -> None:
        passed_over: list[Request] = []
        while self.waiting:
            if limit := self._admission_closed(draft, len(passed_over)):
                draft.end_admission(limit, len(self.waiting))
                break
            request = self.waiting.pop()
            limit = self._try_admit(request, draft)
            if limit is not None:
                passed_over.append(request)
            if limit is Limit.KV_BLOCKS:  # nobody overtakes a request that waits for memory
                draft.end_admission(limit, len(self.waiting))
                break
        for request in reversed(passed_over):
            self.waiting.push_front(request)

    def _admission_closed(self, draft: PlanDraft, num_passed_over: int) -> Limit | None:
        if draft.num_tokens_left == 0:
            return Limit.TOKEN_BUDGET
        if len(self.running) >= self.config.max_num_seqs:
            return Limit.MAX_NUM_SEQS
        if num_passed_over >= self.config.max_num_seqs:  # bounds the work of one step
            return Limit.ADMISSION_SCAN
        return None

    def _try_admit(self, request: Request, draft: PlanDraft) -> Limit | None:
        """Admits the request into this step, or says which limit it waits for."""
        hashes = request.hash_blocks(self.config.block_size) if self.config.enable_prefix_caching else []
        match = self.kv.match(hashes, request.num_tokens)
        computing = self.kv.computing(hashes, match, request.num_tokens)
        if computing is not None and draft.is_scheduled(computing):  # stands only while that one advances
            draft.hold(request, Limit.PREFIX_BEING_COMPUTED, f"by {computing}")
            return Limit.PREFIX_BEING_COMPUTED
        if not self.kv.can_admit(match, request.num_tokens):
            draft.hold(request, Limit.KV_BLOCKS)
            return Limit.KV_BLOCKS
        num_cached = len(match.block_ids) * self.config.block_size
        num_tokens = min(request.num_tokens - num_cached, draft.num_tokens_left)
        self.kv.admit(
            request.request_id, hashes, match, num_tokens=request.num_tokens, num_planned=num_cached + num_tokens
        )
        request.move_to(RequestState.RUNNING)
        request.num_computed = num_cached
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached
        self.running.append(request)
        draft.admit(request, num_tokens, self.kv.block_ids(request.request_id))
        return None

    # --- learning -------------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult, now_s: float) -> list[RequestEvent]:
        """Moves cursors past what was executed, accepts sampled tokens, ends what is done. Leaves a `StepRecord`.

        Raises `EngineError`, before anything has changed, if the result is not what the plan asked for: a request that
        is owed a token and gets none would wait for ever.
        """
        self._check_result(plan, result)
        events = []
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            request = self.running.get(request_id)
            if request is None:
                continue  # ended from outside while the step ran
            self._advance(request, num_tokens)
            if token_ids := result.token_ids.get(request_id):
                logprobs = result.logprobs.get(request_id, ())
                events.append(self._accept(request, token_ids, logprobs, now_s))
        self._leave_record(plan, result, now_s)
        return events

    def _check_result(self, plan: StepPlan, result: StepResult) -> None:
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            request = self.running.get(request_id)
            if request is not None and (num_tokens == request.num_remaining) != (request_id in result.token_ids):
                raise EngineError(f"the worker's result and the plan disagree on whether {request_id} has a new token")

    def abandon(self, plan: StepPlan, now_s: float, error: str) -> list[RequestEvent]:
        """The plan could not be executed: ends its requests, since what the worker knows of them is in doubt.

        For the same reason the next plan repeats whose rows the worker was to forget with this one.
        """
        self._finished_ids[:0] = plan.finished + plan.preempted
        events = []
        for request_id in plan.num_scheduled_tokens:
            event = self.finish(request_id, FinishReason.ERROR, now_s)
            if event is not None:
                events.append(msgspec.structs.replace(event, error=error))
        self._leave_record(plan, StepResult({}), now_s, error)
        return events

    def _leave_record(self, plan: StepPlan, result: StepResult, now_s: float, error: str | None = None) -> None:
        self.records.append(
            StepRecord(
                plan=plan.without_token_ids(),
                result=result,
                arrivals=tuple(self._arrivals),
                endings=tuple(self._endings),
                planned_s=self._planned_s,
                updated_s=now_s,
                num_running=len(self.running),
                num_waiting=len(self.waiting),
                num_free_blocks=self.kv.pool.num_free_blocks,
                error=error,
            )
        )
        self._arrivals.clear()
        self._endings.clear()

    def _advance(self, request: Request, num_tokens: int) -> None:
        block_size = self.config.block_size
        num_full_before = request.num_computed // block_size
        request.num_computed += num_tokens
        if self.config.enable_prefix_caching and request.num_computed // block_size > num_full_before:
            request.hash_blocks(block_size)
            self.kv.register_computed(request.request_id, request.num_computed)

    def _accept(
        self, request: Request, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], now_s: float
    ) -> RequestEvent:
        """Appends tokens one by one until one of them ends the request; what follows that one is dropped."""
        stopped, num_accepted = None, 0
        while stopped is None and num_accepted < len(token_ids):
            request.token_ids.append(token_ids[num_accepted])
            num_accepted += 1
            stopped = why_stopped(request, self.config.eos_token_ids)
        if stopped is not None:
            self._end(request, stopped[0], now_s)
        return RequestEvent(
            request_id=request.request_id,
            token_ids=token_ids[:num_accepted],
            logprobs=logprobs[:num_accepted],
            finish_reason=stopped[0] if stopped else None,
            stop_reason=stopped[1] if stopped else None,
            num_cached_tokens=request.num_cached_tokens or 0,
        )

    # --- ending ---------------------------------------------------------------------------------------------------

    def finish(self, request_id: str, reason: FinishReason, now_s: float) -> RequestEvent | None:
        """Ends a request from outside, in any state: aborted, or stopped by a string that its client found.

        Returns its last event; None if there is no such request (any more), which is no error.
        """
        request = self.running.get(request_id) or self.waiting.get(request_id)
        if request is None:
            return None
        self._end(request, reason, now_s)
        return RequestEvent(
            request_id=request_id, finish_reason=reason, num_cached_tokens=request.num_cached_tokens or 0
        )

    def _end(self, request: Request, reason: FinishReason, now_s: float) -> None:
        """The one way out of the scheduler."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request.request_id)
            self.kv.release(request.request_id)
        else:
            self.waiting.remove(request.request_id)
        request.move_to(RequestState.FINISHED)
        self._finished_ids.append(request.request_id)
        self._endings.append(
            Ending(
                request_id=request.request_id,
                reason=reason,
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=request.num_output_tokens,
                num_preemptions=request.num_preemptions,
                arrival_s=request.arrival_s,
                ended_s=now_s,
            )
        )

    def check(self) -> None:
        """Asserts everything that must hold between steps; tests call it after each."""
        self.kv.check()
        assert len(self.running) <= self.config.max_num_seqs
        for request in self.running:
            request.check()
            assert request.state is RequestState.RUNNING
            assert request.num_remaining > 0
            held = len(self.kv.block_ids(request.request_id)) * self.config.block_size
            assert request.num_computed <= held < request.num_computed + self.config.block_size + request.num_remaining
        for request in self.waiting:
            request.check()
            assert request.state in (RequestState.WAITING, RequestState.PREEMPTED)
            assert request.num_computed == 0
        if not self.running:
            assert self.kv.pool.num_free_blocks == self.config.num_blocks, "blocks are held, but nothing runs"
