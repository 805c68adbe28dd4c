"""Which KV blocks each request has, and whether another may have some: prefix match, admit, extend, release.

Called by `noria.core.scheduler`. Speaks of requests by id and of tokens by number; it does not decide who runs
or who is preempted. One group of layers (full attention) for now.

Three facts keep it live and truthful:

- What remains of each admitted prefill's known sequence is owed to it (`num_owed_blocks`), and who asks for room is
  told what is left beside that, so that a first chunk need never start what cannot go on.
- A block is registered when its KV has been executed (`register_computed`), never when it was planned.
- Between the two, the block is *claimed*: `computing(hash)` names the request that is computing it, so that equal
  prompts which arrive together wait for the first one's work and do not repeat it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from noria.kv.block_pool import BlockPool
from noria.kv.events import AllCleared, BlockRemoved, BlockStored, KVEvent, Subscriber

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Holding:
    """One admitted request's blocks. `hashes` is the request's own list, which grows with its tokens."""

    block_ids: list[int]
    hashes: list[bytes]
    num_registered: int
    """Leading blocks whose content was offered to the index already."""
    num_claimed: int
    """Blocks num_registered .. num_claimed are claimed (or were found claimed by somebody else)."""
    num_owed: int
    """Blocks that the rest of the sequence known at admission will still take."""
    epoch: int
    """`KVManager.epoch` at admission: what was begun before a reset never becomes findable."""


@dataclass(slots=True, frozen=True)
class PrefixMatch:
    """Leading blocks of a sequence that are in the pool already. Those of them that nobody holds count as free until
    they are taken: they use up free blocks like any other."""

    block_ids: list[int] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class KVUsage:
    """The pool in blocks: held by requests, idle but findable in the cache, and blank. They add up to the pool.

    `num_unused_slots` counts token slots that requests hold and have not filled (a shared block counts for each
    holder, but is full).
    """

    num_held: int
    num_cached_idle: int
    num_blank: int
    num_unused_slots: int = 0


class WithoutSome:
    """What would be free if some requests had given back what they hold. Changes nothing."""

    def __init__(self, kv: KVManager) -> None:
        self.num_given_back = 0
        self.num_owed = 0
        self._kv = kv
        self._own: dict[int, int] = {}

    def num_own(self, block_id: int) -> int:
        """How many of them hold the block."""
        return self._own.get(block_id, 0)

    def add(self, request_id: str) -> None:
        for block_id in self._kv.block_ids(request_id):
            own = self._own[block_id] = self._own.get(block_id, 0) + 1
            self.num_given_back += own == self._kv.pool.num_references(block_id)
        self.num_owed += self._kv.num_owed_to(request_id)

    def remove(self, request_id: str) -> None:
        for block_id in self._kv.block_ids(request_id):
            self.num_given_back -= self._own[block_id] == self._kv.pool.num_references(block_id)
            self._own[block_id] -= 1
        self.num_owed -= self._kv.num_owed_to(request_id)


class KVManager:
    """Block tables of all admitted requests over one pool. Sizes are in blocks, lengths in tokens."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_owed_blocks = 0
        self.num_table_entries = 0
        """Blocks in all tables, a shared one as often as it is shared."""
        self.epoch = 0
        """Counts resets of the cache."""
        self._events: list[KVEvent] = []
        self._subscriber: Subscriber | None = None
        self._holdings: dict[str, _Holding] = {}
        self._claims: dict[bytes, str] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_ids(self, request_id: str) -> tuple[int, ...]:
        return tuple(self._holdings[request_id].block_ids)

    def match(self, hashes: list[bytes], num_tokens: int, num_shareable: int | None = None) -> PrefixMatch:
        """The longest run of leading full blocks that can be shared by a sequence of `num_tokens` tokens, of which
        the first `num_shareable` need not be computed (None: all).

        At most all but the last token: that one must be computed, for its logits. So a fully cached prompt of whole
        blocks recomputes its last block, into a block of its own.
        """
        block_ids: list[int] = []
        if self.enable_prefix_caching:
            for block_hash in hashes[: self._max_shared(num_tokens, num_shareable)]:
                block_id = self.pool.find(block_hash)
                if block_id is None:
                    break
                block_ids.append(block_id)
        return PrefixMatch(block_ids)

    def computing(
        self, hashes: list[bytes], match: PrefixMatch, num_tokens: int, num_shareable: int | None = None
    ) -> str | None:
        """The running request that is computing the block after `match`, which would lengthen it."""
        position = len(match.block_ids)
        most = self._max_shared(num_tokens, num_shareable)
        if not self.enable_prefix_caching or position >= min(len(hashes), most):
            return None
        return self._claims.get(hashes[position])

    def num_spare_blocks(self, match: PrefixMatch, num_tokens: int, without: WithoutSome | None = None) -> int:
        """How many blocks would be free and owed to nobody once `num_tokens` tokens behind `match` had theirs.

        Negative by what is lacking. `without`: as if some requests had given back what they hold.
        """
        num_free, num_owed = self.pool.num_free_blocks, self.num_owed_blocks
        if without is None:
            num_idle = sum(self.pool.num_references(b) == 0 for b in match.block_ids)
        else:
            num_free += without.num_given_back
            num_owed -= without.num_owed
            num_idle = sum(self.pool.num_references(b) == without.num_own(b) for b in match.block_ids)
        return num_free - num_owed - (self.num_blocks_for(num_tokens) - len(match.block_ids) + num_idle)

    def num_held_by(self, request_id: str) -> int:
        """Blocks in its table, shared ones included."""
        return len(self._holdings[request_id].block_ids)

    def num_owed_to(self, request_id: str) -> int:
        return self._holdings[request_id].num_owed

    def admit(
        self, request_id: str, hashes: list[bytes], match: PrefixMatch, *, num_tokens: int, num_planned: int
    ) -> bool:
        """Gives a request the matched blocks and new ones for its first `num_planned` tokens (matched ones included);
        the rest up to `num_tokens` is owed. False, and nothing has changed, if too few are free: ask `num_spare_blocks`
        first."""
        assert request_id not in self._holdings
        num_now = self.num_blocks_for(num_planned)
        num_new = num_now - len(match.block_ids)
        if not self.pool.can_take(num_new + sum(self.pool.num_references(b) == 0 for b in match.block_ids)):
            return False
        self.pool.share(match.block_ids)  # before anything is taken, so that no match is evicted
        block_ids = match.block_ids + self.pool.take(num_new)
        num_owed = self.num_blocks_for(num_tokens) - num_now
        num_claimed = num_tokens // self.block_size if self.enable_prefix_caching else 0
        holding = _Holding(block_ids, hashes, len(match.block_ids), num_claimed, num_owed, self.epoch)
        self._holdings[request_id] = holding
        self.num_table_entries += len(block_ids)
        self.num_owed_blocks += num_owed
        for block_hash in hashes[holding.num_registered : num_claimed]:
            self._claims.setdefault(block_hash, request_id)
        return True

    def has_spare_blocks_for(self, request_id: str, num_planned: int) -> bool:
        """Whether `extend` would need no block that is owed to somebody."""
        num_new = self.num_blocks_for(num_planned) - len(self._holdings[request_id].block_ids)
        return num_new <= 0 or num_new <= self.pool.num_free_blocks - self.num_owed_blocks

    def extend(self, request_id: str, num_planned: int) -> tuple[int, ...] | None:
        """Takes what the request's first `num_planned` tokens lack: the new blocks, or None if too few are free."""
        holding = self._holdings[request_id]
        num_new = self.num_blocks_for(num_planned) - len(holding.block_ids)
        if num_new <= 0:
            return ()
        if not self.pool.can_take(num_new):
            return None
        block_ids = self.pool.take(num_new)
        holding.block_ids += block_ids
        self.num_table_entries += num_new
        num_paid = min(num_new, holding.num_owed)
        holding.num_owed -= num_paid
        self.num_owed_blocks -= num_paid
        return tuple(block_ids)

    def register_computed(self, request_id: str, num_computed: int, token_ids: Sequence[int]) -> None:
        """Makes every full block among the first `num_computed` of `token_ids` findable: their KV has been executed.

        The request's hashes reach that far. Claims on them end.
        """
        holding = self._holdings[request_id]
        num_full = num_computed // self.block_size
        if holding.epoch == self.epoch:
            for position in range(holding.num_registered, num_full):
                block_hash = holding.hashes[position]
                is_new = self.pool.register(holding.block_ids[position], block_hash)
                self._end_claim(request_id, block_hash)
                if is_new and self._subscriber is not None:
                    start = position * self.block_size
                    parent = holding.hashes[position - 1] if position else None
                    tokens = tuple(token_ids[start : start + self.block_size])
                    self._events.append(BlockStored(block_hash, parent, tokens))
        holding.num_registered = max(holding.num_registered, num_full)

    def release(self, request_id: str) -> int:
        """Takes everything back, last block first, and returns how many blocks became free by it. The only way in
        which a request loses its blocks."""
        holding = self._holdings.pop(request_id)
        num_free_before = self.pool.num_free_blocks
        self.pool.release(reversed(holding.block_ids))
        self.num_owed_blocks -= holding.num_owed
        self.num_table_entries -= len(holding.block_ids)
        if holding.epoch == self.epoch:
            for block_hash in holding.hashes[holding.num_registered : holding.num_claimed]:
                self._end_claim(request_id, block_hash)
        return self.pool.num_free_blocks - num_free_before

    def reset_prefix_cache(self) -> None:
        """Makes all content unfindable, and what running requests have begun will never be found. They go on."""
        self.pool.forget_all()
        self._claims.clear()
        self.epoch += 1
        if self._subscriber is not None:
            self._events.append(AllCleared())

    def usage(self, num_computed_tokens: int = 0) -> KVUsage:
        """`num_computed_tokens`: of all holders together."""
        return KVUsage(
            num_held=self.pool.num_blocks - self.pool.num_free_blocks,
            num_cached_idle=self.pool.num_idle_blocks,
            num_blank=self.pool.num_free_blocks - self.pool.num_idle_blocks,
            num_unused_slots=self.num_table_entries * self.block_size - num_computed_tokens,
        )

    def subscribe(self, subscriber: Subscriber) -> None:
        """From now on `publish` hands `subscriber` what happened to findable content. There is one subscriber."""
        self._subscriber = subscriber
        self.pool.on_forget = lambda block_hash: self._events.append(BlockRemoved(block_hash))

    def publish(self) -> None:
        """Hands over the events since the last time; called once per step.

        A subscriber that raises is told nothing more: its trouble is not the requests'.
        """
        if self._events and self._subscriber is not None:
            events, self._events = tuple(self._events), []
            try:
                self._subscriber(events)
            except Exception:
                logger.exception("the subscriber to KV events failed and is told nothing more")
                self._subscriber = self.pool.on_forget = None

    def is_computing(self, block_hash: bytes, request_id: str) -> bool:
        """Whether the request still works on the block of this hash: what `computing` said of it holds."""
        return self._claims.get(block_hash) == request_id

    def _max_shared(self, num_tokens: int, num_shareable: int | None) -> int:
        if num_shareable is not None:
            num_tokens = min(num_tokens, num_shareable + 1)
        return (num_tokens - 1) // self.block_size

    def _end_claim(self, request_id: str, block_hash: bytes) -> None:
        if self._claims.get(block_hash) == request_id:
            del self._claims[block_hash]

    def check(self) -> None:
        """Asserts that blocks, promises and claims add up."""
        self.pool.check(h.block_ids for h in self._holdings.values())
        assert self.num_owed_blocks == sum(h.num_owed for h in self._holdings.values())
        assert all(h.num_owed >= 0 for h in self._holdings.values())
        assert self.num_table_entries == sum(len(h.block_ids) for h in self._holdings.values())
        for block_hash, request_id in self._claims.items():
            holding = self._holdings[request_id]
            assert block_hash in holding.hashes[holding.num_registered : holding.num_claimed], "a claim nobody works on"
