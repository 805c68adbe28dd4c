"""The KV manager against a naive model, over random histories.

The model keeps tables as lists, the findable content as one dictionary, and works out everything else (references,
what is free, what is owed, who computes what, what a subscriber must believe) from those when it is asked.
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


class ManagerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.holders: dict[str, Holder] = {}
        self.findable: dict[bytes, int] = {}
        self.claims: dict[bytes, str] = {}
        self.epoch = 0
        self.num_admitted = 0
        self.believed: dict[bytes, tuple[int, ...]] = {}
        self.num_batches = 0

    @initialize(block_size=st.sampled_from([1, 2, 4]), enable_prefix_caching=st.sampled_from([True, True, True, False]))
    def build(self, block_size: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.is_caching = enable_prefix_caching
        self.kv = KVManager(NUM_BLOCKS, block_size, enable_prefix_caching=enable_prefix_caching)
        self.kv.subscribe(self._hear)

    # --- the model's answers ---

    def _num_blocks(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def _free(self, without: tuple[str, ...] = ()) -> set[int]:
        held = {block for r, holder in self.holders.items() if r not in without for block in holder.table}
        return set(range(1, NUM_BLOCKS + 1)) - held

    def _num_owed(self, without: tuple[str, ...] = ()) -> int:
        holders = [holder for r, holder in self.holders.items() if r not in without]
        return sum(max(0, self._num_blocks(h.num_known) - len(h.table)) for h in holders)

    def _match(self, hashes: list[bytes], num_tokens: int) -> list[int]:
        found = []
        for position, block_hash in enumerate(hashes):
            if (position + 1) * self.block_size >= num_tokens or block_hash not in self.findable:
                break
            found.append(self.findable[block_hash])
        return found if self.is_caching else []

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
        num_cached = len(expected) * self.block_size
        num_planned = min(num_tokens, num_cached + first_chunk)
        num_known = num_tokens if promises_all else num_planned

        computing = None
        if self.is_caching and (len(expected) + 1) * self.block_size < num_tokens and len(expected) < len(hashes):
            computing = self.claims.get(hashes[len(expected)])
        assert self.kv.computing(hashes, match, num_tokens) == computing

        without = (
            tuple(data.draw(st.lists(st.sampled_from(sorted(self.holders)), unique=True), label="without"))
            if (self.holders)
            else ()
        )
        for absent in ((), without):
            free = self._free(absent)
            num_needed = self._num_blocks(num_known) - len([b for b in expected if b not in free])
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
        num_now = self._num_blocks(num_planned)
        request_id = f"r{self.num_admitted}"
        admitted = self.kv.admit(request_id, hashes, match, num_tokens=num_known, num_planned=num_planned)
        assert admitted == (num_now - len([b for b in expected if b not in free]) <= len(free))
        if not admitted:
            return
        self.num_admitted += 1
        table = list(self.kv.block_ids(request_id))
        new = table[len(expected) :]
        assert table[: len(expected)] == expected
        assert len(table) == num_now
        assert len(set(new)) == len(new)
        assert set(new) <= free - set(expected)
        self._reused(new)
        holder = Holder(token_ids, hashes, table, num_known, num_planned, num_cached, self.epoch)
        self.holders[request_id] = holder
        if self.is_caching:
            holder.claimed = hashes[len(expected) : num_known // self.block_size]
            for block_hash in holder.claimed:
                self.claims.setdefault(block_hash, request_id)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), num_more=st.integers(0, 9))
    def extend(self, data: st.DataObject, num_more: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.holders)))
        holder = self.holders[request_id]
        num_planned = holder.num_planned + num_more
        num_new = max(0, self._num_blocks(num_planned) - len(holder.table))
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
                self.findable.setdefault(block_hash, holder.table[position])
                if self.claims.get(block_hash) == request_id:
                    del self.claims[block_hash]
        holder.num_computed = end
        if self.is_caching:
            self.kv.register_computed(request_id, end, holder.token_ids)
        else:
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
                case BlockStored(block_hash, parent, token_ids):
                    assert block_hash not in self.believed
                    assert block_hash == sha256((parent or ROOT) + array("q", token_ids).tobytes()).digest()
                    self.believed[block_hash] = token_ids
                case BlockRemoved(block_hash):
                    del self.believed[block_hash]
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
        references = [block for holder in self.holders.values() for block in holder.table]
        assert all(pool.num_references(b) == references.count(b) for b in range(1, NUM_BLOCKS + 1))
        assert all(pool.find(block_hash) == block for block_hash, block in self.findable.items())
        assert len(pool._block_of) == len(self.findable)
        assert kv.num_owed_blocks == self._num_owed()
        assert kv._claims == self.claims
        free = self._free()
        idle = free & set(self.findable.values())
        num_computed = sum(holder.num_computed for holder in self.holders.values())
        usage = kv.usage(num_computed)
        assert usage.num_held == NUM_BLOCKS - len(free)
        assert usage.num_cached_idle == len(idle)
        assert usage.num_blank == len(free - idle)
        assert usage.num_unused_slots == len(references) * self.block_size - num_computed

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for request_id in list(self.holders):
            self.kv.release(request_id)
        self.kv.check()
        assert self.kv.pool.num_free_blocks == NUM_BLOCKS
        assert (self.kv.num_owed_blocks, self.kv.num_table_entries, self.kv._claims) == (0, 0, {})


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
