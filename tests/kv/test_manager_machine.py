"""The KV manager against a naive model, over random histories.

The model keeps tables as lists, the findable content as one dictionary, and works out everything else (references,
what is free, what is owed, who computes what, what a subscriber must believe) from those when it is asked. One machine
does it for one group with full attention, the other for several groups: there tables have a column of blocks for the
same tokens, and a block is gone when the window of its group has moved past its last token.
"""

from array import array
from dataclasses import dataclass, field
from hashlib import sha256

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from noria.kv.events import AllCleared, BlockRemoved, BlockStored, KVEvent
from noria.kv.manager import KVManager, WithoutSome
from noria.kv.prefix import PrefixKey, extend_block_hashes
from noria.kv_layout import KVLayout

ROOT = PrefixKey().root()
NUM_BLOCKS = 9
FAMILIES = [list(range(100 * family, 100 * family + 30)) for family in range(3)]


@dataclass
class Holder:
    """One admitted request: its tokens and hashes grow, its table never shrinks."""

    token_ids: list[int]
    hashes: list[bytes]
    table: list[int]
    num_known: int
    """The sequence that was promised room at admission."""
    num_planned: int
    num_computed: int
    epoch: int
    claimed: list[bytes] = field(default_factory=list)
    not_own: set[int] = field(default_factory=set)
    """Places in the table whose block somebody else held at admission."""
    num_cached: int = 0


class ManagerMachine(RuleBasedStateMachine):
    windows_to_try: tuple[tuple[int | None, ...], ...] = ((None,),)
    max_chunk = 1000

    def __init__(self) -> None:
        super().__init__()
        self.holders: dict[str, Holder] = {}
        self.findable: dict[tuple[bytes, int], int] = {}
        self.claims: dict[bytes, str] = {}
        self.epoch = 0
        self.num_admitted = 0
        self.believed: dict[tuple[bytes, int], tuple[int, ...]] = {}
        self.num_batches = 0

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        choice=st.integers(0, 100),
    )
    def build(self, block_size: int, enable_prefix_caching: bool, choice: int) -> None:
        self.block_size = block_size
        self.is_caching = enable_prefix_caching
        self.windows = self.windows_to_try[choice % len(self.windows_to_try)]
        self.num_groups = len(self.windows)
        self.num_blocks = NUM_BLOCKS * self.num_groups
        layout = KVLayout(block_size, self.windows, self.max_chunk)
        self.kv = KVManager(self.num_blocks, block_size, enable_prefix_caching=enable_prefix_caching, layout=layout)
        self.kv.subscribe(self._hear)

    # --- the model's answers ---

    def _num_columns(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def _free(self, without: tuple[str, ...] = ()) -> set[int]:
        held = {block for r, holder in self.holders.items() if r not in without for block in holder.table}
        return set(range(1, self.num_blocks + 1)) - held

    def _is_read(self, group: int, column: int, num_computed: int) -> bool:
        """Whether a query at position `num_computed`, or a later one, reads something of the column."""
        window = self.windows[group]
        return window is None or (column + 1) * self.block_size - 1 >= num_computed - window + 1

    def _most(self, group: int, num_tokens: int, num_computed: int) -> int:
        """What a sequence holds at most in a group while it goes from one length to another, by trying all of its ways:
        it holds whatever is read after some number of computed tokens, and the chunk that follows."""
        most = 0
        for start in range(num_computed, num_tokens):
            end = min(num_tokens, start + self.max_chunk)
            columns = [c for c in range(self._num_columns(end)) if self._is_read(group, c, start)]
            most = max(most, len(columns))
        return most

    def _num_owed(self, without: tuple[str, ...] = ()) -> int:
        num_owed = 0
        for holder in [holder for r, holder in self.holders.items() if r not in without]:
            num_ahead = self._num_columns(holder.num_known) - len(holder.table) // self.num_groups
            for group, window in enumerate(self.windows):
                if num_ahead > 0 and window is None:
                    num_owed += num_ahead
                elif num_ahead > 0:
                    places = range(group, len(holder.table), self.num_groups)
                    num_own = sum(holder.table[place] > 0 and place not in holder.not_own for place in places)
                    num_owed += min(num_ahead, self._promise(group, holder.num_known, holder.num_cached) - num_own)
        return num_owed

    def _promise(self, group: int, num_tokens: int, num_computed: int) -> int:
        layout = KVLayout(self.block_size, self.windows, self.max_chunk)
        promise = layout.most_blocks_of(self.windows[group], num_tokens, num_computed)
        assert self._most(group, num_tokens, num_computed) <= promise, "more may be held than was said"
        return promise

    def _match(self, hashes: list[bytes], num_tokens: int) -> list[int]:
        """The longest of all prefixes that has what its groups read from there on."""
        most = min(len(hashes), (num_tokens - 1) // self.block_size)
        for length in range(most if self.is_caching else 0, 0, -1):
            columns = [
                [
                    self.findable.get((hashes[column], group))
                    if self._is_read(group, column, length * self.block_size)
                    else 0
                    for group in range(self.num_groups)
                ]
                for column in range(length)
            ]
            if not any(block is None for column in columns for block in column):
                return [block for column in columns for block in column]
        return []

    def _reused(self, blocks: list[int]) -> None:
        self.findable = {h: b for h, b in self.findable.items() if b not in blocks}

    def _hashes(self, token_ids: list[int]) -> list[bytes]:
        hashes: list[bytes] = []
        extend_block_hashes(hashes, ROOT, token_ids, self.block_size)
        return hashes

    # --- a request's life ---

    @rule(
        family=st.sampled_from(FAMILIES),
        num_tokens=st.integers(1, 20),
        first_chunk=st.integers(1, 20),
        promises_all=st.sampled_from([True, True, False]),
        data=st.data(),
    )
    def admit(
        self, family: list[int], num_tokens: int, first_chunk: int, promises_all: bool, data: st.DataObject
    ) -> None:
        token_ids = family[:num_tokens]
        hashes = self._hashes(token_ids)
        match = self.kv.match(hashes, num_tokens)
        expected = self._match(hashes, num_tokens)
        assert match.block_ids == expected
        num_found = len(expected) // self.num_groups
        num_cached = num_found * self.block_size
        assert (match.num_columns, match.num_tokens) == (num_found, num_cached)
        num_planned = min(num_tokens, num_cached + min(first_chunk, self.max_chunk))
        num_known = num_tokens if promises_all else num_planned

        computing = None
        if self.is_caching and (num_found + 1) * self.block_size < num_tokens and num_found < len(hashes):
            computing = self.claims.get(hashes[num_found])
        assert self.kv.computing(hashes, match, num_tokens) == computing

        without = (
            tuple(data.draw(st.lists(st.sampled_from(sorted(self.holders)), unique=True), label="without"))
            if (self.holders)
            else ()
        )
        for absent in ((), without):
            free = self._free(absent)
            num_needed = 0
            for group, window in enumerate(self.windows):
                if window is None:
                    found = expected[group :: self.num_groups]
                    num_needed += self._num_columns(num_known) - len([b for b in found if b not in free])
                else:
                    num_needed += self._promise(group, num_known, num_cached)
            num_spare = len(free) - self._num_owed(absent) - num_needed
            gone = WithoutSome(self.kv)
            for request_id in absent:
                gone.add(request_id)
            for request_id in absent[::2]:  # and back, and again
                gone.remove(request_id)
                gone.add(request_id)
            assert self.kv.num_spare_blocks(match, num_known, gone) == num_spare
            assert absent or self.kv.num_spare_blocks(match, num_known) == num_spare

        free = self._free()
        num_now = self._num_columns(num_planned)
        num_new = (num_now - num_found) * self.num_groups
        not_own = {place for place, block in enumerate(expected) if block and block not in free}
        request_id = f"r{self.num_admitted}"
        admitted = self.kv.admit(request_id, hashes, match, num_tokens=num_known, num_planned=num_planned)
        assert admitted == (num_new + len([b for b in expected if b in free]) <= len(free))
        if not admitted:
            return
        self.num_admitted += 1
        table = list(self.kv.block_ids(request_id))
        new = table[len(expected) :]
        assert table[: len(expected)] == expected
        assert len(new) == num_new
        assert len(set(new)) == len(new)
        assert set(new) <= free - set(expected)
        self._reused(new)
        holder = Holder(token_ids, hashes, table, num_known, num_planned, num_cached, self.epoch)
        holder.not_own, holder.num_cached = not_own, num_cached
        self.holders[request_id] = holder
        if self.is_caching:
            holder.claimed = hashes[num_found : num_known // self.block_size]
            for block_hash in holder.claimed:
                self.claims.setdefault(block_hash, request_id)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), num_more=st.integers(0, 9))
    def extend(self, data: st.DataObject, num_more: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.holders)))
        holder = self.holders[request_id]
        num_planned = min(holder.num_planned + num_more, max(holder.num_planned, holder.num_computed + self.max_chunk))
        num_new = max(0, self._num_columns(num_planned) * self.num_groups - len(holder.table))
        free = self._free()
        new = self.kv.extend(request_id, num_planned)
        assert (new is None) == (num_new > len(free))
        if new is None:
            return
        assert len(new) == len(set(new)) == num_new
        assert set(new) <= free
        holder.table += new
        holder.num_planned = num_planned
        self._reused(list(new))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), part=st.integers(1, 4))
    def compute(self, data: st.DataObject, part: int) -> None:
        """Executes up to a part of what is planned; tokens beyond the known ones are generated on the way."""
        request_id = data.draw(st.sampled_from(sorted(self.holders)))
        holder = self.holders[request_id]
        end = holder.num_computed + -(-(holder.num_planned - holder.num_computed) * part // 4)
        while len(holder.token_ids) < end:
            holder.token_ids.append(data.draw(st.integers(0, 1)))
        extend_block_hashes(holder.hashes, ROOT, holder.token_ids, self.block_size)
        for position in range(holder.num_computed // self.block_size, end // self.block_size):
            block_hash = holder.hashes[position]
            if holder.epoch == self.epoch:
                for group in range(self.num_groups):
                    if self.findable.get((block_hash, group), 0) in {0} | self._free():  # the latest that is held
                        self.findable[block_hash, group] = holder.table[position * self.num_groups + group]
                if self.claims.get(block_hash) == request_id:
                    del self.claims[block_hash]
        holder.num_computed = end
        for place in range(len(holder.table)):
            if not self._is_read(place % self.num_groups, place // self.num_groups, end):
                holder.table[place] = 0
        if self.is_caching or self.kv.has_windows:
            self.kv.register_computed(request_id, end, holder.token_ids)
        if not self.is_caching:
            self.findable.clear()

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.holders)))
        num_free = len(self._free())
        holder = self.holders.pop(request_id)
        if holder.epoch == self.epoch:
            self.claims = {h: r for h, r in self.claims.items() if r != request_id}
        assert self.kv.release(request_id) == len(self._free()) - num_free

    @rule(is_wanted=st.sampled_from([True, False, False]))
    def reset(self, is_wanted: bool) -> None:
        if is_wanted:
            self.kv.reset_prefix_cache()
            self.findable.clear()
            self.claims.clear()
            self.epoch += 1

    # --- what a subscriber believes ---

    def _hear(self, events: tuple[KVEvent, ...]) -> None:
        self.num_batches += 1
        assert events, "an empty batch"
        for event in events:
            match event:
                case BlockStored(block_hash, parent, token_ids, group):
                    assert (block_hash, group) not in self.believed
                    assert block_hash == sha256((parent or ROOT) + array("q", token_ids).tobytes()).digest()
                    self.believed[block_hash, group] = token_ids
                case BlockRemoved(block_hash, group):
                    del self.believed[block_hash, group]
                case AllCleared():
                    self.believed.clear()

    @rule()
    def publish(self) -> None:
        self.kv.publish()
        assert self.believed.keys() == self.findable.keys()
        num_batches = self.num_batches
        self.kv.publish()
        assert self.num_batches == num_batches, "the same news twice"

    # --- always ---

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "kv"):
            return
        kv, pool = self.kv, self.kv.pool
        kv.check()
        for request_id, holder in self.holders.items():
            assert list(kv.block_ids(request_id)) == holder.table
        references = [block for holder in self.holders.values() for block in holder.table if block]
        assert all(pool.num_references(b) == references.count(b) for b in range(1, self.num_blocks + 1))
        for (block_hash, group), block in self.findable.items():
            assert pool.find(block_hash + (group.to_bytes(2, "big") if group else b"")) == block
        assert len(pool._block_of) == len(self.findable)
        assert kv.num_owed_blocks == self._num_owed()
        assert kv._claims == self.claims
        free = self._free()
        idle = free & set(self.findable.values())
        num_computed = sum(holder.num_computed for holder in self.holders.values())
        usage = kv.usage(num_computed)
        assert usage.num_held == self.num_blocks - len(free)
        assert usage.num_cached_idle == len(idle)
        assert usage.num_blank == len(free - idle)
        num_columns = sum(len(holder.table) for holder in self.holders.values()) // self.num_groups
        assert usage.num_unused_slots == num_columns * self.block_size - num_computed
        for request_id, holder in self.holders.items():
            assert kv.num_held_by(request_id) == len([block for block in holder.table if block])

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for request_id in list(self.holders):
            self.kv.release(request_id)
        self.kv.check()
        assert self.kv.pool.num_free_blocks == self.num_blocks
        assert (self.kv.num_owed_blocks, self.kv.num_table_entries, self.kv._claims) == (0, 0, {})


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


class HybridManagerMachine(ManagerMachine):
    windows_to_try = ((None, 3), (None, 8, 8), (5,), (1, None), (6, None, 2))
    max_chunk = 6


TestHybridManagerMachine = HybridManagerMachine.TestCase
TestHybridManagerMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
