"""Which KV blocks each request has, and whether another may have some: prefix match, admit, extend, release.

Called by `noria.core.scheduler`. Speaks of requests by id and of tokens by number; it does not decide who runs
or who is preempted. What differs between groups of layers is in `noria.kv.groups`: here a request's table is a list of
columns, each with one block of every group for the same tokens.

Four facts keep it live and truthful:

- What remains of each admitted prefill's known sequence is owed to it (`num_owed_blocks`), and who asks for room is
  told what is left beside that, so that a first chunk need never start what cannot go on.
- A block is registered when its KV has been executed (`register_computed`), never when it was planned.
- Between the two, the block is *claimed*: `computing(hash)` names the request that is computing it, so that equal
  prompts which arrive together wait for the first one's work and do not repeat it.
- What a sliding window has moved past is given up while the request runs, measured by what has been executed. The
  worker sees the null block there from the next step on, by the same rule (`noria.kv_layout.columns_behind`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from noria.kv.block_pool import NULL_BLOCK, BlockPool
from noria.kv.events import AllCleared, BlockRemoved, BlockStored, KVEvent, Subscriber
from noria.kv.groups import Passing, PrefixMatch, SlidingGroup, common_hit, make_groups
from noria.kv_layout import KVLayout

logger = logging.getLogger(__name__)


_HASH_BYTES = 32


@dataclass(slots=True)
class _Holding:
    """One admitted request's blocks. `hashes` is the request's own list, which grows with its tokens."""

    block_ids: list[int]
    """Column after column, one of each group; the null block where its window has moved past."""
    hashes: list[bytes]
    num_registered: int
    """Leading columns whose content was offered to the index already."""
    num_claimed: int
    """Columns num_registered .. num_claimed are claimed (or were found claimed by somebody else)."""
    num_known: int
    """Columns of the sequence known at admission."""
    num_owed: int
    """Blocks that the rest of that will still take."""
    epoch: int
    """`KVManager.epoch` at admission: what was begun before a reset never becomes findable."""
    passings: tuple[Passing, ...] = ()
    """Of the sliding groups."""
    resume_at: tuple[int, ...] = ()
    """Columns up to which others may well want to share: the end of what was known at admission, and where the prefixes
    that it shared itself, or could have, ended."""

    def is_wanted(self, column: int, num_columns_read: int) -> bool:
        """Whether a hit at one of `resume_at` needs the column, in a group that reads so far back."""
        return any(end - num_columns_read <= column < end for end in self.resume_at)


@dataclass(slots=True, frozen=True)
class KVUsage:
    """The pool in blocks: held by requests, idle but findable in the cache, and blank. They add up to the pool.

    `num_unused_slots` counts token slots that requests hold and have not filled (a shared block counts for each
    holder, but is full; the blocks of all groups for the same tokens count once).
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
        for block_id in filter(None, self._kv.block_ids(request_id)):
            own = self._own[block_id] = self._own.get(block_id, 0) + 1
            self.num_given_back += own == self._kv.pool.num_references(block_id)
        self.num_owed += self._kv.num_owed_to(request_id)

    def remove(self, request_id: str) -> None:
        for block_id in filter(None, self._kv.block_ids(request_id)):
            self.num_given_back -= self._own[block_id] == self._kv.pool.num_references(block_id)
            self._own[block_id] -= 1
        self.num_owed -= self._kv.num_owed_to(request_id)


class KVManager:
    """Block tables of all admitted requests over one pool. Sizes are in blocks, lengths in tokens.

    `layout`: the groups of layers; None for one with full attention.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        layout: KVLayout | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.layout = KVLayout(block_size) if layout is None else layout
        self.block_size = self.layout.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_owed_blocks = 0
        self.num_table_entries = 0
        """Columns of all tables, a shared one as often as it is shared."""
        self._groups = make_groups(self.layout)
        self._num_groups = len(self._groups)
        self._sliding = [group for group in self._groups if isinstance(group, SlidingGroup)]
        self._num_full = self._num_groups - len(self._sliding)
        self.epoch = 0
        """Counts resets of the cache."""
        self._events: list[KVEvent] = []
        self._subscriber: Subscriber | None = None
        self._holdings: dict[str, _Holding] = {}
        self._claims: dict[bytes, str] = {}

    @property
    def has_windows(self) -> bool:
        """Whether requests give up blocks while they run: `register_computed` is called even without a cache then."""
        return bool(self._sliding)

    def num_blocks_ahead(self, num_tokens: int, num_requests: int) -> int:
        """About how many blocks so many requests hold more when they have come to so many more tokens, all together."""
        num_columns = -(-num_tokens // self.block_size)
        num_blocks = self._num_full * num_columns
        for group in self._sliding:
            num_blocks += min(num_columns, num_requests * group.most_blocks(num_tokens, 0))
        return num_blocks

    def block_ids(self, request_id: str) -> tuple[int, ...]:
        """Column after column, one of each group; the null block where its window has moved past."""
        return tuple(self._holdings[request_id].block_ids)

    def num_tokens_held(self, request_id: str) -> int:
        """How many leading tokens have (or had) a place in its blocks."""
        return len(self._holdings[request_id].block_ids) // self._num_groups * self.block_size

    def match(self, hashes: list[bytes], num_tokens: int, num_shareable: int | None = None) -> PrefixMatch:
        """The longest run of leading full blocks that can be shared by a sequence of `num_tokens` tokens, of which
        the first `num_shareable` need not be computed (None: all). It holds in all groups.

        At most all but the last token: that one must be computed, for its logits. So a fully cached prompt of whole
        blocks recomputes its last block, into a block of its own.
        """
        if not self.enable_prefix_caching:
            return PrefixMatch()
        most = self._max_shared(num_tokens, num_shareable)
        if self._num_groups == 1 and not self._sliding:
            block_ids = self._groups[0].hit(self.pool, hashes, most)
            num_columns = len(block_ids)
            return PrefixMatch(block_ids, num_columns, num_columns * self.block_size, block_ids, num_columns)
        most = min(len(hashes), most)
        hits, most_in_full = common_hit(self._groups, self.pool, hashes, most)
        full = [hit for group, hit in zip(self._groups, hits, strict=True) if group.window is None]
        num_columns = len(hits[0])
        return PrefixMatch(
            block_ids=[block_id for column in zip(*hits, strict=True) for block_id in column],
            num_columns=num_columns,
            num_tokens=num_columns * self.block_size,
            full_ids=[block_id for hit in full for block_id in hit],
            num_columns_in_full=most_in_full,
        )

    def computing(
        self, hashes: list[bytes], match: PrefixMatch, num_tokens: int, num_shareable: int | None = None
    ) -> str | None:
        """The running request that is computing the block after `match`, which would lengthen it."""
        position = match.num_columns
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
            num_idle = sum(self.pool.num_references(b) == 0 for b in match.full_ids)
        else:
            num_free += without.num_given_back
            num_owed -= without.num_owed
            num_idle = sum(self.pool.num_references(b) == without.num_own(b) for b in match.full_ids)
        num_needed = self._num_full * -(-num_tokens // self.block_size) - len(match.full_ids) + num_idle
        for group in self._sliding:  # what others hold as well is no saving there: it may have to be given up
            num_needed += group.most_blocks(num_tokens, match.num_tokens)
        return num_free - num_owed - num_needed

    def num_held_by(self, request_id: str) -> int:
        """Blocks in its table, shared ones included."""
        holding = self._holdings[request_id]
        return len(holding.block_ids) - sum(passing.num_passed for passing in holding.passings)

    def num_owed_to(self, request_id: str) -> int:
        return self._holdings[request_id].num_owed

    def admit(
        self, request_id: str, hashes: list[bytes], match: PrefixMatch, *, num_tokens: int, num_planned: int
    ) -> bool:
        """Gives a request the matched blocks and new ones for its first `num_planned` tokens (matched ones included);
        the rest up to `num_tokens` is owed. False, and nothing has changed, if too few are free: ask `num_spare_blocks`
        first."""
        assert request_id not in self._holdings
        pool = self.pool
        num_now, num_known = -(-num_planned // self.block_size), -(-num_tokens // self.block_size)
        num_new = (num_now - match.num_columns) * self._num_groups
        num_idle = sum(pool.num_references(b) == 0 for b in match.block_ids if b != NULL_BLOCK)
        if not pool.can_take(num_new + num_idle):
            return False
        passings = tuple(self._passing(group, match, num_tokens, num_now) for group in self._sliding)
        pool.share(match.block_ids)  # before anything is taken, so that no match is evicted
        block_ids = match.block_ids + pool.take(num_new)
        num_claimed = num_tokens // self.block_size if self.enable_prefix_caching else 0
        holding = _Holding(block_ids, hashes, match.num_columns, num_claimed, num_known, 0, self.epoch, passings)
        if passings:
            # The last block of a prompt of whole blocks is computed again by whoever shares it: so one less, too.
            holding.resume_at = (len(hashes), len(hashes) - 1, match.num_columns, match.num_columns_in_full)
        self._holdings[request_id] = holding
        self.num_table_entries += num_now
        self._settle_owed(holding)
        for block_hash in hashes[holding.num_registered : num_claimed]:
            self._claims.setdefault(block_hash, request_id)
        return True

    def _passing(self, group: SlidingGroup, match: PrefixMatch, num_tokens: int, num_columns: int) -> Passing:
        """What a request that is about to have `num_columns` columns, those of `match` among them, holds in a group."""
        num_passed = group.num_passed(match.num_tokens)
        not_own = [
            column
            for column in range(num_passed, match.num_columns)
            if self.pool.num_references(match.block_ids[column * self._num_groups + group.number])
        ]
        most = group.most_blocks(num_tokens, match.num_tokens)
        return Passing(group, num_passed, most, num_columns - num_passed - len(not_own), not_own)

    def _settle_owed(self, holding: _Holding) -> None:
        """Brings what the request is owed up to date with what it holds."""
        num_ahead = holding.num_known - len(holding.block_ids) // self._num_groups
        num_owed = 0
        if num_ahead > 0:
            num_owed = self._num_full * num_ahead + sum(p.num_owed(num_ahead) for p in holding.passings)
        self.num_owed_blocks += num_owed - holding.num_owed
        holding.num_owed = num_owed

    def has_spare_blocks_for(self, request_id: str, num_planned: int) -> bool:
        """Whether `extend` would need no block that is owed to somebody."""
        num_new = self._num_lacking(self._holdings[request_id], num_planned)
        return num_new <= 0 or num_new <= self.pool.num_free_blocks - self.num_owed_blocks

    def extend(self, request_id: str, num_planned: int) -> tuple[int, ...] | None:
        """Takes what the request's first `num_planned` tokens lack: the new blocks, column after column, or None if too
        few are free."""
        holding = self._holdings[request_id]
        num_new = self._num_lacking(holding, num_planned)
        if num_new <= 0:
            return ()
        if not self.pool.can_take(num_new):
            return None
        block_ids = self.pool.take(num_new)
        holding.block_ids += block_ids
        num_columns = num_new // self._num_groups
        self.num_table_entries += num_columns
        for passing in holding.passings:
            passing.num_own += num_columns
        if holding.num_owed or holding.passings:
            self._settle_owed(holding)
        return tuple(block_ids)

    def _num_lacking(self, holding: _Holding, num_planned: int) -> int:
        """Blocks of all groups that `num_planned` tokens need beyond those that it has; not above 0 if none."""
        return -(-num_planned // self.block_size) * self._num_groups - len(holding.block_ids)

    def register_computed(self, request_id: str, num_computed: int, token_ids: Sequence[int]) -> None:
        """Makes every full block among the first `num_computed` of `token_ids` findable: their KV has been executed.
        Claims on them end. Then gives up what no token from there on reads any more.

        The request's hashes reach that far, if there is a cache.
        """
        holding = self._holdings[request_id]
        if self.enable_prefix_caching:
            num_full = num_computed // self.block_size
            if holding.epoch == self.epoch:
                for position in range(holding.num_registered, num_full):
                    block_hash, first = holding.hashes[position], position * self._num_groups
                    for group in self._groups:
                        name = block_hash + group.suffix if group.suffix else block_hash
                        is_new = self.pool.register(holding.block_ids[first + group.number], name)
                        if is_new and self._subscriber is not None:
                            self._note_stored(holding, position, group.number, token_ids)
                    self._end_claim(request_id, block_hash)
            holding.num_registered = max(holding.num_registered, num_full)
        if holding.passings:
            self._give_up_passed(holding, num_computed)

    def _note_stored(self, holding: _Holding, position: int, group: int, token_ids: Sequence[int]) -> None:
        parent = holding.hashes[position - 1] if position else None
        tokens = tuple(token_ids[position * self.block_size : (position + 1) * self.block_size])
        self._events.append(BlockStored(holding.hashes[position], parent, tokens, group))

    def _give_up_passed(self, holding: _Holding, num_computed: int) -> None:
        """A window's passed blocks go back while the request runs. Their content is kept for as long as anything else
        where somebody may well want to go on from there, and only until something else is to be kept if not."""
        wanted: list[int] = []
        unwanted: list[int] = []
        for passing in holding.passings:
            for column in passing.passed_by(num_computed):
                place = column * self._num_groups + passing.group.number
                is_wanted = holding.is_wanted(column, passing.group.num_columns_read)
                (wanted if is_wanted else unwanted).append(holding.block_ids[place])
                holding.block_ids[place] = NULL_BLOCK
        if wanted or unwanted:
            self.pool.release(reversed(wanted))
            self.pool.release(reversed(unwanted), is_cold=True)
            self._settle_owed(holding)

    def release(self, request_id: str) -> int:
        """Takes everything back, last column first, and returns how many blocks became free by it. With what windows
        move past, the only way in which a request loses blocks."""
        holding = self._holdings.pop(request_id)
        num_free_before = self.pool.num_free_blocks
        self.pool.release(reversed(holding.block_ids))
        self.num_owed_blocks -= holding.num_owed
        self.num_table_entries -= len(holding.block_ids) // self._num_groups
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
        self.pool.on_forget = self._note_forgotten

    def _note_forgotten(self, name: bytes) -> None:
        block_hash, suffix = name[:_HASH_BYTES], name[_HASH_BYTES:]
        self._events.append(BlockRemoved(block_hash, int.from_bytes(suffix, "big")))

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
        """Asserts that blocks, promises, windows and claims add up."""
        self.pool.check(h.block_ids for h in self._holdings.values())
        assert self.num_owed_blocks == sum(h.num_owed for h in self._holdings.values())
        for holding in self._holdings.values():
            num_owed = holding.num_owed
            self._settle_owed(holding)
            assert holding.num_owed == num_owed >= 0, "a promise was not brought up to date"
            self._check_table(holding)
        num_columns = [len(h.block_ids) // self._num_groups for h in self._holdings.values()]
        assert self.num_table_entries == sum(num_columns)
        for block_hash, request_id in self._claims.items():
            holding = self._holdings[request_id]
            assert block_hash in holding.hashes[holding.num_registered : holding.num_claimed], "a claim nobody works on"

    def _check_table(self, holding: _Holding) -> None:
        num_passed = {group.number: 0 for group in self._groups}
        num_passed |= {passing.group.number: passing.num_passed for passing in holding.passings}
        num_tokens = len(holding.block_ids) // self._num_groups * self.block_size
        for group in self._groups:
            column_ids = holding.block_ids[group.number :: self._num_groups]
            num_null = column_ids.count(NULL_BLOCK)
            assert num_null == num_passed[group.number] == len([b for b in column_ids[:num_null] if b == NULL_BLOCK]), (
                "the null block stands elsewhere than where a window has moved past"
            )
            num_most = self.layout.most_blocks_of(group.window, num_tokens)
            assert len(column_ids) - num_null <= num_most, "a sequence holds more blocks than it was said to at most"
