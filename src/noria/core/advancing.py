"""The running requests' part of a step: decodes first, then whoever is catching up; memory taken from the policy's
victims when there is too little.

Made by `noria.core.scheduler` for each step. What it leaves of the budget is for admission (`noria.core.admitting`),
and what that leaves comes back to `top_up`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from noria.core.chunks import ChunkRule
from noria.core.draft import PlanDraft
from noria.core.plan import Limit
from noria.core.request import Request, RequestState

if TYPE_CHECKING:
    from noria.core.scheduler import Scheduler

logger = logging.getLogger(__name__)

Drafter = Callable[[Request], tuple[int, ...]]
"""Guesses what a request that is caught up will say next; () for no idea. Must not change the request."""


class Advancing:
    """One step's running pass. `run` is called once, `top_up` at the end of the step."""

    def __init__(self, scheduler: Scheduler, draft: PlanDraft, rule: ChunkRule) -> None:
        self._scheduler = scheduler
        self._policy = scheduler.waiting
        self._running = scheduler.running
        self._kv = scheduler.kv
        self._draft = draft
        self._rule = rule

    def run(self) -> None:
        self._draft.advance_steady(self._running.steady)
        self._rule.begin(self._draft.num_tokens_left)
        for request in self._running.at_block_end():
            if request.state is RequestState.RUNNING:  # and has not given way to one of the others
                block_ids = self._take_blocks(request, request.num_computed + 1)
                self._draft.add_blocks(request, block_ids or ())
        if self._running.catching_up:
            self._catch_up()

    def _catch_up(self) -> None:
        catching_up = list(self._running.catching_up.values())
        caught_up = [request for request in catching_up if request.is_caught_up]
        unfinished = [request for request in catching_up if not request.is_caught_up]
        if self._scheduler.drafter is not None:
            for request in caught_up:
                self._propose(request, self._scheduler.drafter)
        in_order = [*caught_up, *self._policy.prefill_order(unfinished)]
        for request in self._rule.in_turn(in_order, self._draft.num_tokens_left):
            if request.state is RequestState.RUNNING:
                self._run_chunk(request)
        for chunk in self._draft.chunks.values():  # only now is it sure that no running request takes them back
            start = chunk.request.num_computed
            self._policy.charge_prompt(chunk.request, start, start + chunk.num_tokens)

    def _propose(self, request: Request, drafter: Drafter) -> None:
        # The last token allowed is always the worker's own, so no draft is ever beyond the end.
        num_useful = request.max_num_tokens - request.num_tokens - 1
        try:
            request.draft_token_ids = drafter(request)[:num_useful] if num_useful > 0 else ()
        except Exception:
            logger.exception("the drafter failed for %s; it goes on without drafts", request.request_id)
            request.draft_token_ids = ()

    def _run_chunk(self, request: Request) -> None:
        num_tokens, limit = self._rule.next_chunk(request.num_remaining, self._draft.num_tokens_left)
        if request.draft_token_ids:
            num_tokens = self._cut_drafts(request, num_tokens)
        block_ids = self._take_blocks(request, request.num_computed + num_tokens)
        if block_ids is not None:
            self._draft.advance(request, num_tokens, limit, block_ids)

    def _cut_drafts(self, request: Request, num_tokens: int) -> int:
        """Leaves only drafts that fit, and returns how many tokens that makes: nobody is preempted for a guess."""
        if not self._kv.has_spare_blocks_for(request.request_id, request.num_computed + num_tokens):
            num_tokens = 1
        request.draft_token_ids = request.draft_token_ids[: num_tokens - 1]
        return num_tokens

    def _take_blocks(self, request: Request, num_planned: int) -> tuple[int, ...] | None:
        """Blocks for the request's first `num_planned` tokens, preempting until they are there; None if that took the
        request itself."""
        while (block_ids := self._kv.extend(request.request_id, num_planned)) is None:
            if len(self._running) == 1:  # accepted requests fit alone, so this is a passing failure: try again
                self._stand_still(request)
                return None
            victim = self._policy.victim(self._running)
            preemption = self._scheduler.preempt(victim, request, Limit.KV_BLOCKS, self._draft)
            num_blocks_ahead = self._kv.num_blocks_ahead(self._running.num_tokens_ahead, len(self._running))
            self._scheduler.margin.note_preemption(preemption.num_blocks_freed, num_blocks_ahead)
            if victim is request:
                return None
        return block_ids

    def _stand_still(self, request: Request) -> None:
        self._draft.unplan(request)
        if request.phase is not None:
            self._running.unsettle(request)
        self._draft.hold(request, Limit.KV_BLOCKS, "no block could be taken although nobody else runs")

    def top_up(self) -> None:
        """What nobody else could use goes to prompts that had to leave it to others."""
        for chunk in list(self._draft.chunks.values()):
            num_tokens, limit = self._rule.more(chunk, self._draft.num_tokens_left)
            if num_tokens == 0:
                continue
            start = chunk.request.num_computed + chunk.num_tokens
            block_ids = self._kv.extend(chunk.request.request_id, start + num_tokens)
            if block_ids is not None:
                self._draft.advance(chunk.request, num_tokens, limit, block_ids)
                self._policy.charge_prompt(chunk.request, start, start + num_tokens)
