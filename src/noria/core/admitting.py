"""Admission within one step: waiting requests in the policy's order, into what running ones leave.

Each request looked at is admitted, or held with the limit that it waits for. Some limits close admission for
everybody behind (no tokens left, no slots, memory that nobody may be given before the head); others are the
request's own (its prefix is being computed, its grammar is not ready), and others go by. Past a request that waits
for memory the next few may be looked at, unless it has waited too long or has run before.

Made by `noria.core.scheduler` for each step; takes blocks and slots only when it says "now".
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from noria.core.chunks import ChunkRule
from noria.core.displacing import Displacement
from noria.core.draft import PlanDraft
from noria.core.gates import Refused
from noria.core.plan import Limit
from noria.core.request import Request, RequestState
from noria.kv.groups import PrefixMatch

if TYPE_CHECKING:
    from noria.core.scheduler import Scheduler

logger = logging.getLogger(__name__)

_OWN_LIMITS = frozenset({Limit.PREFIX_BEING_COMPUTED, Limit.GRAMMAR, Limit.ADAPTERS, Limit.PREFILL_SHARE})
"""What a request waits for by itself: others go by."""


class Admitting:
    """One step's admission: `run`, then `admit_late` with what is left at the end of the step, then `put_back`."""

    def __init__(self, scheduler: Scheduler, draft: PlanDraft, rule: ChunkRule, now_s: float) -> None:
        self._scheduler = scheduler
        self._config = scheduler.config
        self._waiting = scheduler.waiting
        self._kv = scheduler.kv
        self._draft = draft
        self._rule = rule
        self._now_s = now_s
        self._held: list[Request] = []
        self._num_looks_left: int | None = None
        """How many more may be looked at past one that waits for memory; None while nobody does."""
        self._adapters_are_kept = False

    def run(self) -> None:
        limit = self._closed()
        while limit is None:
            request = self._next()
            if request is None:
                break
            own_limit = self._try_or_refuse(request)
            limit = self._ends_with(own_limit, request) or self._closed()
        if limit is None and self._scheduler.paused is not None:
            limit = Limit.PAUSED
        if limit is not None:
            self._draft.end_admission(limit, len(self._waiting), self._config.scheduling_policy, len(self._held))

    def admit_late(self) -> None:
        """What neither short newcomers nor running prompts could use is for long newcomers after all."""
        self._rule.serve_everybody()
        for request in [r for r in self._held if self._draft.is_held_by(r.request_id, Limit.PREFILL_SHARE)]:
            if self._closed() is not None:
                return
            self._draft.unhold(request.request_id)
            self._held.remove(request)
            self._try_or_refuse(request)

    def put_back(self) -> None:
        """Whoever was looked at and not admitted waits as before. Comes last, whatever happened."""
        for request in reversed(self._held):
            self._waiting.put_back(request)

    def _next(self) -> Request | None:
        if self._scheduler.paused is not None:
            return self._waiting.pop_resumed()
        return self._waiting.pop() if len(self._waiting) else None

    def _closed(self) -> Limit | None:
        """Why nobody can be admitted any more in this step, whoever it is."""
        if self._draft.preemptions:
            return Limit.PREEMPTING_STEP
        is_full = len(self._scheduler.running) >= self._config.num_slots
        if self._draft.num_tokens_left == 0 and not is_full:
            return Limit.TOKEN_BUDGET
        if is_full and not self._waiting.can_displace(self._scheduler.running):
            is_budget = self._config.num_slots < self._config.max_num_seqs
            return Limit.TOKEN_BUDGET if is_budget else Limit.MAX_NUM_SEQS
        if len(self._held) >= self._config.max_num_looks:  # bounds the work of one step
            return Limit.ADMISSION_SCAN
        return None

    def _ends_with(self, limit: Limit | None, request: Request) -> Limit | None:
        """Whether admission ends because `limit` holds `request`, or because enough were looked at past others."""
        if limit is Limit.KV_BLOCKS:
            if request.held_for_memory_s is None:
                request.held_for_memory_s = self._now_s
            if not self._may_be_passed(request, request.held_for_memory_s):
                return limit
            if self._num_looks_left is None:
                self._num_looks_left = self._config.admission_lookahead
                return None
        if self._num_looks_left is not None:
            self._num_looks_left -= 1
            if self._num_looks_left == 0:
                return Limit.KV_BLOCKS
        if limit is Limit.ADAPTERS:
            self._note_adapter_wait(request)
        return None if limit is None or limit in _OWN_LIMITS or limit is Limit.KV_BLOCKS else limit

    def _may_be_passed(self, request: Request, since_s: float) -> bool:
        if not self._waiting.looks_ahead or not self._config.admission_lookahead:
            return False
        if request.state is RequestState.PREEMPTED:  # work that was begun is not put off for newcomers
            return False
        return self._now_s - since_s < self._config.lookahead_age_limit_s

    def _note_adapter_wait(self, request: Request) -> None:
        """Once a request has waited long for an adapter's place, the places are kept for it: else requests for the
        adapters that run could go past it for ever."""
        if request.held_for_adapter_s is None:
            request.held_for_adapter_s = self._now_s
        if self._now_s - request.held_for_adapter_s >= self._config.lookahead_age_limit_s:
            self._adapters_are_kept = True

    def _try_or_refuse(self, request: Request) -> Limit | None:
        """Admits the request, or notes that it is held and returns the limit, or ends it: it can never run."""
        try:
            limit = self._try(request)
        except Refused as refusal:
            self._scheduler.refuse(request, str(refusal), self._now_s)
            return None
        except Exception as error:  # of somebody's gate: its trouble is this request's, and nobody else's
            if request.state is RequestState.RUNNING:
                raise
            logger.exception("asking whether %s may run failed", request.request_id)
            self._scheduler.refuse(request, f"{type(error).__name__}: {error}", self._now_s, code=None)
            return None
        if limit is not None:
            self._held.append(request)
        return limit

    def _try(self, request: Request) -> Limit | None:
        """Admits the request into this step, or holds it and says which limit it waits for."""
        scheduler, draft = self._scheduler, self._draft
        limit = scheduler.ask_gates(request)
        if limit is None and self._adapters_are_kept and request.adapter is not None:
            limit = Limit.ADAPTERS
        if limit is not None:
            draft.hold(request, limit)
            return limit
        if self._waits_for_prefix(request):
            return Limit.PREFIX_BEING_COMPUTED
        hashes = self._hashes(request)
        match = self._kv.match(hashes, request.num_tokens, request.num_shareable)
        computing = self._kv.computing(hashes, match, request.num_tokens, request.num_shareable)
        if computing is not None:
            request.waits_for = (hashes[match.num_columns], computing)
            if self._waits_for_prefix(request):
                return Limit.PREFIX_BEING_COMPUTED
        if lack := self._lack(request, match):
            if not self._displace_for(request, match, lack[0]):
                draft.hold(request, *lack)
                return lack[0]
            match = self._kv.match(hashes, request.num_tokens, request.num_shareable)
        return self._admit(request, hashes, match)

    def _waits_for_prefix(self, request: Request) -> bool:
        """Whether the block that it was found to wait for is still being computed, by one that advances. This is what
        most of those that share a prefix cost in a step: they are not matched anew."""
        if request.waits_for is None:
            return False
        block_hash, computing = request.waits_for
        if not self._kv.is_computing(block_hash, computing) or not self._draft.is_scheduled(computing):
            request.waits_for = None
            return False
        self._draft.hold(request, Limit.PREFIX_BEING_COMPUTED, f"by {computing}")
        return True

    def _hashes(self, request: Request) -> list[bytes]:
        if not self._config.enable_prefix_caching:
            return []
        request.follow_weights(self._scheduler.weights_version)
        return request.hash_blocks(self._config.block_size)

    def _lack(
        self, request: Request, match: PrefixMatch, without: Displacement | None = None
    ) -> tuple[Limit, str] | None:
        """What the request lacks to be admitted, if those of `without` had given way."""
        scheduler, config = self._scheduler, self._config
        num_running = len(scheduler.running) - (len(without.victims) if without else 0)
        if num_running >= config.num_slots:
            return Limit.MAX_NUM_SEQS, f"{num_running} requests run"
        num_left = self._draft.num_tokens_left + (without.num_planned_tokens if without else 0)
        num_missing = request.num_tokens - match.num_tokens
        num_tokens = request.num_tokens
        if not config.reserve_full_sequence:
            num_tokens -= num_missing - max(1, self._first_chunk(request, num_missing, num_left)[0])
        num_kept = self._margin(without) if num_running else 0
        num_spare = self._kv.num_spare_blocks(match, num_tokens, without.kv if without else None)
        if num_spare < num_kept:
            num_free, num_owed = self._kv.pool.num_free_blocks, self._kv.num_owed_blocks
            return Limit.KV_BLOCKS, (
                f"{num_free - num_owed - num_spare} blocks needed, {num_free} free, of which {num_owed} are owed and "
                f"{num_kept} kept free"
            )
        num_tokens, limit = self._first_chunk(request, num_missing, num_left)
        if num_tokens <= 0 or (num_tokens < num_missing and not config.enable_chunked_prefill):
            return limit, f"{num_missing} tokens to run, {num_left} left in the budget"
        return None

    def _first_chunk(self, request: Request, num_missing: int, num_left: int) -> tuple[int, Limit]:
        may_wait = self._waiting.looks_ahead and request.state is RequestState.WAITING
        return self._rule.next_chunk(num_missing, num_left, may_wait=may_wait)

    def _margin(self, without: Displacement | None) -> int:
        running = self._scheduler.running
        num_tokens_ahead = running.num_tokens_ahead - (without.num_tokens_ahead if without else 0)
        num_requests = len(running) - (len(without.victims) if without else 0)
        return self._scheduler.margin.num_blocks_for(self._kv.num_blocks_ahead(num_tokens_ahead, num_requests))

    def _displace_for(self, urgent: Request, match: PrefixMatch, limit: Limit) -> bool:
        """Preempts running requests of lower classes if that makes room: none of them could be spared.

        Only for slots and blocks: tokens come back with the next step anyway. Whoever was admitted in this step stays:
        it has gone first for some reason of its class.
        """
        running = self._scheduler.running
        for_places = limit in (Limit.MAX_NUM_SEQS, Limit.KV_BLOCKS)
        candidates = self._waiting.displaceable(urgent, running) if for_places else []
        candidates = [r for r in candidates if not self._draft.is_newcomer(r.request_id)]
        if not candidates:
            return False
        if limit is Limit.KV_BLOCKS and not self._could_suffice(urgent, match, candidates):
            return False
        trial = Displacement(self._kv, self._draft)
        for victim in candidates:
            trial.add(victim)
            if self._lack(urgent, match, trial) is None:
                break
        else:
            return False
        for victim in list(trial.victims.values())[-2::-1]:  # the last one was needed; the others only perhaps
            trial.remove(victim)
            if self._lack(urgent, match, trial) is not None:
                trial.add(victim)
        for victim in trial.victims.values():
            self._scheduler.preempt(victim, urgent, limit, self._draft)
        return True

    def _could_suffice(self, urgent: Request, match: PrefixMatch, candidates: list[Request]) -> bool:
        """A bound that is cheap to take, since an urgent request that cannot be helped asks in every step."""
        num_given_back = sum(self._kv.num_held_by(r.request_id) for r in candidates)
        return num_given_back + self._kv.num_spare_blocks(match, urgent.num_tokens) >= 0

    def _admit(self, request: Request, hashes: list[bytes], match: PrefixMatch) -> Limit | None:
        kv, draft, scheduler = self._kv, self._draft, self._scheduler
        num_cached = match.num_tokens
        num_missing = request.num_tokens - num_cached
        num_tokens, limit = self._first_chunk(request, num_missing, draft.num_tokens_left)
        num_planned = num_cached + num_tokens
        num_known = request.num_tokens if self._config.reserve_full_sequence else num_planned
        if not kv.admit(request.request_id, hashes, match, num_tokens=num_known, num_planned=num_planned):
            draft.hold(request, Limit.KV_BLOCKS, "no block could be taken although there should be some")
            return Limit.KV_BLOCKS
        request.move_to(RequestState.RUNNING)
        request.num_computed = num_cached
        request.held_for_memory_s = request.held_for_adapter_s = request.waits_for = None
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached
        scheduler.running.add(request)
        draft.admit(request, num_tokens, limit, kv.block_ids(request.request_id))
        self._waiting.note_admitted(request)
        self._waiting.charge_prompt(request, num_cached, num_planned)
        return None
