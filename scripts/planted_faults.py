"""The faults that `mutations.py` plants: one small replacement each, and what would go wrong with it.

Every text stands exactly once in its file (a test sees to that, so that the list does not rot). A fault belongs here
when it could be written by accident and some promise of the scheduler or of KV memory would be broken by it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in `file` (below src/noria)."""

    name: str
    story: str
    file: str
    old: str
    new: str


FAULTS = [
    # --- preemption ---
    Fault(
        "wrong-victim",
        "the oldest request gives way instead of the latest, so nobody is sure to finish",
        "core/policies/base.py",
        "return max(running, key=self.victim_order)",
        "return min(running, key=self.victim_order)",
    ),
    Fault(
        "cursor-kept",
        "a preempted request keeps its cursor: it would resume in the middle of KV that is gone",
        "core/scheduler.py",
        "        victim.num_computed = 0\n",
        "",
    ),
    Fault(
        "budget-not-given-back",
        "the tokens planned for a victim of this step are lost to the others",
        "core/draft.py",
        "self.num_tokens_left += self._num_scheduled.pop(request_id, 0)",
        "self._num_scheduled.pop(request_id, 0)",
    ),
    Fault(
        "chunk-not-taken-back",
        "what was planned for a victim of this step is believed to have been executed",
        "core/draft.py",
        "        self.chunks.pop(request_id, None)\n",
        "",
    ),
    Fault(
        "blocks-not-taken-back",
        "the worker is told of new blocks for a request that it was told to forget",
        "core/draft.py",
        "        self._new_block_ids.pop(request_id, None)\n",
        "",
    ),
    Fault(
        "steady-not-unsettled",
        "a preempted decode stays among those that advance by themselves",
        "core/running.py",
        "        self._leave_steady(request)\n        del self.by_id[request.request_id]\n",
        "        del self.by_id[request.request_id]\n",
    ),
    Fault(
        "preempted-behind-newcomers",
        "work that was begun waits behind what never started",
        "core/policies/base.py",
        "return request.num_preemptions == 0, request.arrival_number",
        "return request.num_preemptions > 0, request.arrival_number",
    ),
    Fault(
        "max-preemptions-ignored",
        "the same request is chosen again and again",
        "core/policies/base.py",
        "return request.num_preemptions < self.config.max_preemptions, request.arrival_number",
        "return True, request.arrival_number",
    ),
    Fault(
        "admission-while-preempting",
        "the blocks that a victim gave back go to a newcomer in the same step",
        "core/admitting.py",
        "        if self._draft.preemptions:\n            return Limit.PREEMPTING_STEP\n",
        "",
    ),
    Fault(
        "preemption-told-once",
        "a step that preempts fails before the worker saw it: the victim's row stays there",
        "core/scheduler.py",
        "self._finished_ids[:0] = plan.finished + plan.preempted",
        "self._finished_ids[:0] = plan.finished",
    ),
    # --- KV memory ---
    Fault(
        "reference-leak",
        "a released request keeps a reference to its first block",
        "kv/manager.py",
        "self.pool.release(reversed(holding.block_ids))",
        "self.pool.release(reversed(holding.block_ids[1:]))",
    ),
    Fault(
        "beginning-reused-first",
        "a released sequence loses its beginning, which others may want, before its end",
        "kv/manager.py",
        "self.pool.release(reversed(holding.block_ids))",
        "self.pool.release(holding.block_ids)",
    ),
    Fault(
        "hash-registered-early",
        "a block can be found when its KV is planned, not when it has been executed",
        "core/advancing.py",
        "            self._draft.advance(request, num_tokens, limit, block_ids)\n",
        "            self._draft.advance(request, num_tokens, limit, block_ids)\n"
        "            end = request.num_computed + num_tokens\n"
        "            self._kv.register_computed(request.request_id, end, request.token_ids)\n",
    ),
    Fault(
        "off-by-one-on-a-full-hit",
        "a prompt that is all in the cache has no token left to compute logits from",
        "kv/manager.py",
        "return (num_tokens - 1) // self.block_size",
        "return num_tokens // self.block_size",
    ),
    Fault(
        "owed-blocks-not-counted",
        "newcomers take what the rest of an admitted prompt needs",
        "kv/manager.py",
        "return num_free - num_owed - num_needed",
        "return num_free - num_needed",
    ),
    Fault(
        "owed-blocks-never-paid",
        "blocks that a prompt has taken stay reserved for it",
        "kv/manager.py",
        "            self._settle_owed(holding)\n        return tuple(block_ids)\n",
        "            pass\n        return tuple(block_ids)\n",
    ),
    Fault(
        "idle-hits-count-as-free",
        "cached blocks that a newcomer takes over are believed to be free still",
        "kv/manager.py",
        "- len(match.full_ids) + num_idle",
        "- len(match.full_ids)",
    ),
    Fault(
        "match-evicted-by-its-own-admission",
        "new blocks are taken before the found ones are held",
        "kv/manager.py",
        "        pool.share(match.block_ids)  # before anything is taken, so that no match is evicted\n"
        "        block_ids = match.block_ids + pool.take(num_new)\n",
        "        block_ids = match.block_ids + pool.take(num_new)\n        pool.share(match.block_ids)\n",
    ),
    Fault(
        "window-freed-by-what-is-planned",
        "a block is given up as soon as a step is planned that moves the window past it",
        "kv/manager.py",
        "        return tuple(block_ids)\n\n    def _num_lacking",
        "        self._give_up_passed(holding, num_planned)\n        return tuple(block_ids)\n\n    def _num_lacking",
    ),
    Fault(
        "window-off-by-one",
        "a window gives up the block that the next query reads the last token of",
        "kv_layout.py",
        "return (num_computed - window + 1) // block_size",
        "return (num_computed - window + 2) // block_size",
    ),
    Fault(
        "windows-never-freed",
        "blocks behind a window stay with their request to its end",
        "kv/manager.py",
        "        if holding.passings:\n            self._give_up_passed",
        "        if False:\n            self._give_up_passed",
    ),
    Fault(
        "chunk-left-out-of-the-cap",
        "what a sliding group holds at most is counted without the chunk in flight",
        "kv_layout.py",
        "self.num_columns(window - 1 + self.max_chunk) + 1)",
        "self.num_columns(window) + 1)",
    ),
    Fault(
        "hit-with-a-hole-in-its-window",
        "a prefix is shared although the first block that its window reads is gone",
        "kv/groups.py",
        "self.num_columns_read = -(-(window - 1) // layout.block_size)",
        "self.num_columns_read = (window - 1) // layout.block_size",
    ),
    Fault(
        "hit-in-one-group-only",
        "the groups are not asked again when one has shortened the hit",
        "kv/groups.py",
        "if len(hits[group.number]) == length else 1",
        "if len(hits[group.number]) == length else num_agreed + 1",
    ),
    Fault(
        "groups-share-a-name",
        "a block of one group of layers is found for another",
        "kv/groups.py",
        'number.to_bytes(2, "big") if number else b""',
        'b""',
    ),
    Fault(
        "shared-window-counts-as-own",
        "a promise counts on blocks that have to be given up while somebody else keeps them",
        "kv/manager.py",
        "num_columns - num_passed - len(not_own), not_own)",
        "num_columns - num_passed, ())",
    ),
    Fault(
        "cold-kept-as-long-as-all",
        "a long prompt's middle pushes out what others need",
        "kv/manager.py",
        "self.pool.release(reversed(unwanted), is_cold=True)",
        "self.pool.release(reversed(unwanted))",
    ),
    Fault(
        "claims-not-ended-on-release",
        "others wait for a prefix that nobody computes any more",
        "kv/manager.py",
        "for block_hash in holding.hashes[holding.num_registered : holding.num_claimed]:",
        "for block_hash in holding.hashes[holding.num_claimed : holding.num_claimed]:",
    ),
    Fault(
        "reset-keeps-the-epoch",
        "what was begun before a reset of the cache becomes findable after it",
        "kv/manager.py",
        "        self.epoch += 1\n",
        "",
    ),
    Fault(
        "reset-keeps-idle-content",
        "a reset forgets the hashes, but its idle blocks are not blank",
        "kv/block_pool.py",
        "        self._blank[:0] = reversed([*self._cold, *self._idle])  # the order of reuse stays what it was\n",
        "",
    ),
    Fault(
        "no-event-on-eviction",
        "a router goes on believing in content that was reused",
        "kv/block_pool.py",
        "        if self.on_forget is not None:\n",
        "        if self.on_forget is None:\n",
    ),
    Fault(
        "duplicate-replaces-the-first",
        "a block computed twice points the index to the second, and the first keeps its hash",
        "kv/block_pool.py",
        "        if (kept := self._block_of.get(block_hash)) is not None:\n",
        "        if (kept := self._block_of.get(block_hash)) is not None and self._references[kept] == 0:\n",
    ),
    Fault(
        "idle-duplicate-stays",
        "content that is computed again is forgotten with its older, idle block",
        "kv/block_pool.py",
        "            if self._references[kept] == 0:\n",
        "            if False:\n",
    ),
    Fault(
        "key-ignored",
        "requests of different tenants, adapters or salts share blocks",
        "core/request.py",
        "self.tenant = self.prefix_key.tenant\n        self.prefix_root = self.prefix_key.root()",
        "self.tenant = self.prefix_key.tenant\n        self.prefix_root = PrefixKey().root()",
    ),
    # --- budgets and admission ---
    Fault(
        "steady-decodes-cost-nothing",
        "the budget is not reduced by those that advance by themselves",
        "core/draft.py",
        "        self.num_tokens_left -= len(steady)\n",
        "",
    ),
    Fault(
        "no-floor",
        "the first unfinished prompt takes everything, others stand still",
        "core/chunks.py",
        "floors = [1 if request.is_caught_up else min(floor, request.num_remaining) for request in catching_up]",
        "floors = [0 for _ in catching_up]",
    ),
    Fault(
        "floor-of-one-token",
        "an unfinished prompt behind another one advances by single tokens",
        "core/chunks.py",
        "floor = max(1, (num_left - len(catching_up) + num_prompts) // (2 * num_prompts))",
        "floor = 1",
    ),
    Fault(
        "no-cap-on-long-prompts",
        "a giant prompt takes the whole step while others wait",
        "core/chunks.py",
        "self._share = config.max_prefill_share",
        "self._share = 1.0",
    ),
    Fault(
        "long-prompts-not-added-up",
        "each of several giants takes its share, and together they take the step",
        "core/chunks.py",
        "self._num_for_newcomers = int(num_left * (1 - self._share) / 2)",
        "self._num_for_newcomers = 0",
    ),
    Fault(
        "margin-kept-for-nobody",
        "the watermark keeps a request out of an empty pool, for ever",
        "core/admitting.py",
        "num_kept = self._margin(without) if num_running else 0",
        "num_kept = self._margin(without)",
    ),
    Fault(
        "look-ahead-without-age-limit",
        "small requests overtake a large one for as long as they come",
        "core/admitting.py",
        "return self._now_s - since_s < self._config.lookahead_age_limit_s",
        "return True",
    ),
    Fault(
        "look-ahead-without-end",
        "any number of requests is looked at past one that waits for memory",
        "core/admitting.py",
        "            self._num_looks_left -= 1\n",
        "",
    ),
    Fault(
        "queue-cap-off-by-one",
        "one more request waits than may",
        "core/admission.py",
        "if num_running + num_waiting >= num_places:",
        "if num_running + num_waiting > num_places:",
    ),
    Fault(
        "queued-tokens-never-leave",
        "the cap on queued prompt tokens closes the door for good",
        "core/policies/base.py",
        "        self.num_queued_tokens -= request.num_queued_tokens\n",
        "",
    ),
    Fault(
        "adapter-limit-off-by-one",
        "one adapter more than a step may have",
        "core/gates.py",
        "return Limit.ADAPTERS if len(others) >= self._max_adapters else None",
        "return Limit.ADAPTERS if len(others) > self._max_adapters else None",
    ),
    # --- policies ---
    Fault(
        "equal-class-displaced",
        "urgent work takes the place of work that is just as urgent",
        "core/policies/priority.py",
        "r.priority > urgent.priority and",
        "r.priority >= urgent.priority and",
    ),
    Fault(
        "aged-request-displaced",
        "waiting does not protect a low class: it is displaced by later, more urgent requests for ever",
        "core/policies/priority.py",
        " and self.due_s(r) > self.due_s(urgent)",
        "",
    ),
    Fault(
        "newcomer-displaced",
        "a request admitted in this step is taken out of the plan again",
        "core/admitting.py",
        "candidates = [r for r in candidates if not self._draft.is_newcomer(r.request_id)]",
        "pass",
    ),
    Fault(
        "adapter-places-never-kept",
        "requests for the adapters that run go past one that waits for a place, for ever",
        "core/admitting.py",
        "            self._adapters_are_kept = True\n",
        "            pass\n",
    ),
    Fault(
        "sibling-takes-the-parents-place",
        "the sequences of a refused prompt are let in without it",
        "core/scheduler.py",
        "if request.parent_id is not None and request.parent_id in self.waiting:",
        "if request.parent_id is not None:",
    ),
    Fault(
        "old-weights-name",
        "what is computed with new weights is stored under the name of the old ones",
        "core/request.py",
        "            self.block_hashes = []\n",
        "            pass\n",
    ),
    Fault(
        "subscriber-stops-the-engine",
        "a subscriber that fails ends the requests of the step",
        "kv/manager.py",
        '            except Exception:\n                logger.exception("the subscriber',
        '            except KeyError:\n                logger.exception("the subscriber',
    ),
    Fault(
        "displaced-for-nothing",
        "a request is displaced whose room was not needed after all",
        "core/admitting.py",
        "            if self._lack(urgent, match, trial) is not None:\n                trial.add(victim)\n",
        "            trial.add(victim)\n",
    ),
    Fault(
        "recomputation-charged",
        "a tenant pays again for what a preemption threw away",
        "core/policies/fair.py",
        "start, end = max(start, request.num_charged), min(end, request.num_prompt_tokens)",
        "start, end = start, min(end, request.num_prompt_tokens)",
    ),
    Fault(
        "charged-before-it-is-sure",
        "a tenant pays for a chunk that is taken back in its own step",
        "core/advancing.py",
        "            self._draft.advance(request, num_tokens, limit, block_ids)\n",
        "            self._draft.advance(request, num_tokens, limit, block_ids)\n"
        "            self._policy.charge_prompt(request, request.num_computed, request.num_computed + num_tokens)\n",
    ),
    Fault(
        "no-lift-on-return",
        "a tenant that was away uses up what it saved, and the others wait for it",
        "core/policies/fair.py",
        "tenant.counter = max(tenant.counter, self._level)",
        "pass",
    ),
    Fault(
        "outputs-free-of-charge",
        "long answers cost a tenant nothing",
        "core/policies/fair.py",
        "self._tenants[request.tenant].counter += num_tokens * self.config.fair_output_weight",
        "pass",
    ),
    Fault(
        "overtaking-not-counted",
        "a request without cached tokens is overtaken for ever",
        "core/policies/lpm.py",
        "self._num_overtakes[other.request_id] += 1",
        "pass",
    ),
    # --- learning from results, ending, standing still ---
    Fault(
        "rejected-drafts-kept",
        "the cursor is not stepped back over drafts that the worker rejected",
        "core/scheduler.py",
        "min(request.num_computed + chunk.num_tokens - num_rejected, request.num_tokens)",
        "min(request.num_computed + chunk.num_tokens, request.num_tokens)",
    ),
    Fault(
        "preempted-for-a-guess",
        "drafts take blocks from those who need them",
        "core/advancing.py",
        "if not self._kv.has_spare_blocks_for(request.request_id, request.num_computed + num_tokens):",
        "if num_tokens < 1:",
    ),
    Fault(
        "tokens-of-the-dead",
        "a request that was aborted while its step ran gets that step's token",
        "core/scheduler.py",
        "if chunk.request.state is RequestState.RUNNING:  # it may have ended from outside while the step ran",
        "if True:",
    ),
    Fault(
        "one-token-too-many",
        "steady requests do not notice that they have reached their length",
        "core/scheduler.py",
        "len(tokens) >= request.max_num_tokens",
        "len(tokens) > request.max_num_tokens",
    ),
    Fault(
        "steady-blocks-not-registered",
        "what a decode fills is never found by a later turn of the conversation",
        "core/scheduler.py",
        "                self._register(request, request.num_computed + 1)\n",
        "                pass\n",
    ),
    Fault(
        "turn-missed",
        "decodes take their next block a step too late",
        "core/running.py",
        "return list(self._turns[self._tick % self._block_size].values())",
        "return list(self._turns[(self._tick - 1) % self._block_size].values())",
    ),
    Fault(
        "deadline-never-comes",
        "requests that are out of time go on",
        "core/deadlines.py",
        "while self._heap and self._heap[0][0] <= now_s:",
        "while self._heap and self._heap[0][0] <= -1:",
    ),
    Fault(
        "deadlines-pile-up",
        "deadlines of requests that ended long ago are kept until they pass",
        "core/deadlines.py",
        "if len(self._heap) > 64 + 4 * num_unfinished:",
        "if len(self._heap) < 0:",
    ),
    Fault(
        "pause-lets-newcomers-in",
        "a paused engine goes on admitting",
        "core/admitting.py",
        "return self._waiting.pop_resumed()",
        "return self._waiting.pop() if len(self._waiting) else None",
    ),
    Fault(
        "ending-leaves-the-queue",
        "an aborted request stays in the queue",
        "core/scheduler.py",
        "            self.waiting.remove(request_id)\n",
        "            pass\n",
    ),
]
