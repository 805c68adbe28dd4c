"""Admission within one step: waiting requests in the policy's order, into what running ones leave.

Each request looked at is admitted, or held with the limit that it waits for. Some limits close admission for
everybody behind (no tokens left, no slots, memory that nobody may be given before the head); others are the
request's own (its prefix is being computed, its grammar is not ready), and others go by. Past a request that waits
for memory the next few may be looked at, unless it has waited too long or has run before.

Made by `noria.core.scheduler` for each step; takes blocks and slots only when it says "now".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from noria.core.chunks import ChunkRule
from noria.core.draft import PlanDraft
from noria.core.gates import Refused
from noria.core.plan import Limit
from noria.core.request import Request, RequestState
from noria.kv.manager import PrefixMatch

if TYPE_CHECKING:
    from noria.core.scheduler import Scheduler

_OWN_LIMITS = frozenset({Limit.PREFIX_BEING_COMPUTED, Limit.GRAMMAR, Limit.ADAPTERS})
"""What a request waits for by itself: others go by."""


class Admitting:
    """One step's admission. `run` is called once."""

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

    def run(self) -> None:
        limit = self._closed()
        while limit is None:
            request = self._next()
            if request is None:
                break
            try:
                own_limit = self._try(request)
            except Refused as refusal:
                self._scheduler.refuse(request, str(refusal), self._now_s)
                continue
            if own_limit is not None:
                self._held.append(request)
            limit = self._ends_with(own_limit, request) or self._closed()
        if limit is None and self._scheduler.paused is not None:
            limit = Limit.PAUSED
        if limit is not None:
            self._draft.end_admission(limit, len(self._waiting), self._config.scheduling_policy, len(self._held))
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
        if not self._waiting.displaces:
            if self._draft.num_tokens_left == 0:
                return Limit.TOKEN_BUDGET
            if len(self._scheduler.running) >= self._config.num_slots:
                return Limit.MAX_NUM_SEQS
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
        return None if limit is None or limit in _OWN_LIMITS or limit is Limit.KV_BLOCKS else limit

    def _may_be_passed(self, request: Request, since_s: float) -> bool:
        if not self._waiting.looks_ahead or not self._config.admission_lookahead:
            return False
        if request.state is RequestState.PREEMPTED:  # work that was begun is not put off for newcomers
            return False
        return self._now_s - since_s < self._config.lookahead_age_limit_s

    def _try(self, request: Request) -> Limit | None:
        """Admits the request into this step, or holds it and says which limit it waits for."""
        scheduler, config, draft = self._scheduler, self._config, self._draft
        if limit := scheduler.ask_gates(request):
            draft.hold(request, limit)
            return limit
        hashes = request.hash_blocks(config.block_size) if config.enable_prefix_caching else []
        match = self._kv.match(hashes, request.num_tokens)
        computing = self._kv.computing(hashes, match, request.num_tokens)
        if computing is not None and draft.is_scheduled(computing):  # stands only while that one advances
            draft.hold(request, Limit.PREFIX_BEING_COMPUTED, f"by {computing}")
            return Limit.PREFIX_BEING_COMPUTED
        if lack := self._lack(request, match, []):
            if not self._displace_for(request, match):
                draft.hold(request, *lack)
                return lack[0]
            match = self._kv.match(hashes, request.num_tokens)
        return self._admit(request, hashes, match)

    def _lack(self, request: Request, match: PrefixMatch, without: list[Request]) -> tuple[Limit, str] | None:
        """What the request lacks to be admitted if the running requests `without` were not there."""
        scheduler, config = self._scheduler, self._config
        num_left = self._draft.num_tokens_left + sum(self._draft.num_planned(r.request_id) for r in without)
        num_missing = request.num_tokens - len(match.block_ids) * config.block_size
        if num_left == 0 or (num_missing > num_left and not config.enable_chunked_prefill):
            return Limit.TOKEN_BUDGET, f"{num_missing} tokens to run, {num_left} left in the budget"
        num_running = len(scheduler.running) - len(without)
        if num_running >= config.num_slots:
            return Limit.MAX_NUM_SEQS, f"{num_running} requests run"
        num_tokens = request.num_tokens
        if not config.reserve_full_sequence:
            num_tokens -= num_missing - self._rule.first_chunk(num_missing, num_left)[0]
        num_kept = self._margin(without) if num_running else 0
        num_spare = self._kv.num_spare_blocks(match, num_tokens, [r.request_id for r in without])
        if num_spare < num_kept:
            num_free, num_owed = self._kv.pool.num_free_blocks, self._kv.num_owed_blocks
            return Limit.KV_BLOCKS, (
                f"{num_free - num_owed - num_spare} blocks needed, {num_free} free, of which {num_owed} are owed and "
                f"{num_kept} kept free"
            )
        return None

    def _margin(self, without: list[Request]) -> int:
        running = self._scheduler.running
        num_tokens_ahead = running.num_tokens_ahead - sum(r.max_num_tokens - r.num_computed for r in without)
        return self._scheduler.margin.num_blocks_for(self._kv.num_blocks_for(num_tokens_ahead))

    def _displace_for(self, urgent: Request, match: PrefixMatch) -> bool:
        """Preempts running requests of lower classes if that makes room: none of them could be spared.

        Whoever was admitted in this step stays: it has gone first for some reason of its class.
        """
        candidates = [r for r in self._scheduler.running if not self._draft.is_newcomer(r.request_id)]
        victims: list[Request] = []
        for victim in self._waiting.displaceable(urgent, candidates):
            victims.append(victim)
            if self._lack(urgent, match, victims) is None:
                break
        else:
            return False
        for victim in victims[-2::-1]:  # the last one was needed; the others only perhaps
            others = [other for other in victims if other is not victim]
            if self._lack(urgent, match, others) is None:
                victims = others
        for victim in victims:
            self._scheduler.preempt(victim, urgent, self._draft)
        return True

    def _admit(self, request: Request, hashes: list[bytes], match: PrefixMatch) -> Limit | None:
        kv, draft, scheduler = self._kv, self._draft, self._scheduler
        num_cached = len(match.block_ids) * self._config.block_size
        num_tokens, limit = self._rule.first_chunk(request.num_tokens - num_cached, draft.num_tokens_left)
        num_planned = num_cached + num_tokens
        num_known = request.num_tokens if self._config.reserve_full_sequence else num_planned
        if not kv.admit(request.request_id, hashes, match, num_tokens=num_known, num_planned=num_planned):
            draft.hold(request, Limit.KV_BLOCKS, "no block could be taken although there should be some")
            return Limit.KV_BLOCKS
        request.move_to(RequestState.RUNNING)
        request.num_computed = num_cached
        request.held_for_memory_s = None
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached
        scheduler.running.add(request)
        draft.admit(request, num_tokens, limit, kv.block_ids(request.request_id))
        self._waiting.note_admitted(request)
        self._waiting.charge_prompt(request, num_cached, num_planned)
        return None
