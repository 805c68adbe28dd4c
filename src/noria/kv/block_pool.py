"""Physical KV blocks: who holds each, which are free and in what order they are reused, which content they keep.

A block is in one of three conditions:

- held: reference count above 0; it stands in the tables of that many requests;
- idle: reference count 0, but its content is registered under a hash and can be found again;
- blank: reference count 0 and no hash.

Idle and blank blocks together are free. Blank blocks are reused first, the last released of them foremost; then idle
ones, least recently released first: those of little use (`release`'s `is_cold`) before all others. Block ids are
1 .. num_blocks; 0 is the null block, which stands in tables where there is none, is never handed out, and is passed
over by whatever is given a table. Called by `noria.kv` only; knows nothing of requests or tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

NULL_BLOCK = 0


class BlockPool:
    """`num_blocks` blocks, all blank at first. `on_forget` hears of each hash whose block is reused."""

    def __init__(self, num_blocks: int, on_forget: Callable[[bytes], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self.on_forget = on_forget
        self.version = 0
        """Changes whenever something becomes findable or stops being so."""
        self._references = [0] * (num_blocks + 1)
        self._hash_of: list[bytes | None] = [None] * (num_blocks + 1)
        self._block_of: dict[bytes, int] = {}
        self._blank = list(range(num_blocks, 0, -1))  # a stack
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._cold: OrderedDict[int, None] = OrderedDict()  # idle too

    @property
    def num_free_blocks(self) -> int:
        return len(self._blank) + len(self._idle) + len(self._cold)

    @property
    def num_idle_blocks(self) -> int:
        """Free blocks whose content can still be found."""
        return len(self._idle) + len(self._cold)

    def num_references(self, block_id: int) -> int:
        return self._references[block_id]

    def can_take(self, num_blocks: int) -> bool:
        """Whether so many are free. Everything that takes blocks asks this first."""
        return num_blocks <= len(self._blank) + len(self._idle) + len(self._cold)

    def take(self, num_blocks: int) -> list[int]:
        """Hands out blocks with one reference each, in the order of reuse; an idle block loses its content.

        The caller has asked `can_take`.
        """
        taken = []
        for _ in range(num_blocks):
            if self._blank:
                block_id = self._blank.pop()
            else:
                block_id, _ = (self._cold or self._idle).popitem(last=False)
                self._forget(block_id)
            self._references[block_id] = 1
            taken.append(block_id)
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds one reference to each block, held or idle; idle ones are free no more and keep their content."""
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            if self._references[block_id] == 0:
                del (self._idle if block_id in self._idle else self._cold)[block_id]
            self._references[block_id] += 1

    def release(self, block_ids: Iterable[int], *, is_cold: bool = False) -> None:
        """Drops one reference from each block; those nobody holds any more become free, in the given order.

        Give the end of a sequence first: then its tail is reused before the beginning that others may want. `is_cold`:
        their content is worth less than all that is kept.
        """
        idle = self._cold if is_cold else self._idle
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                if self._hash_of[block_id] is None:
                    self._blank.append(block_id)
                else:
                    idle[block_id] = None

    def find(self, block_hash: bytes) -> int | None:
        """The block whose content has this hash, if one is kept."""
        return self._block_of.get(block_hash)

    def register(self, block_id: int, block_hash: bytes) -> bool:
        """Makes a held block's content findable; False if it was so already, in another block.

        A second block that is held stays unregistered: tables are append-only, so it could not be merged into the
        first anyway. An idle one hands its place over and is blank then: it would be reused before this one, and the
        content be forgotten though it is there.
        """
        if (kept := self._block_of.get(block_hash)) is not None:
            if self._references[kept] == 0:
                del (self._idle if kept in self._idle else self._cold)[kept]
                self._hash_of[kept] = None
                self._blank.append(kept)
                self._keep(block_id, block_hash)
            return False
        self._keep(block_id, block_hash)
        self.version += 1
        return True

    def _keep(self, block_id: int, block_hash: bytes) -> None:
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash

    def forget_all(self) -> None:
        """Drops all registered content: nothing will be found until it is computed again. Holders keep their blocks."""
        for block_id in self._block_of.values():
            self._hash_of[block_id] = None
        self._block_of.clear()
        self.version += 1
        self._blank[:0] = reversed([*self._cold, *self._idle])  # the order of reuse stays what it was
        self._idle.clear()
        self._cold.clear()

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of[block_id]
        assert block_hash is not None, "an idle block has content"
        del self._block_of[block_hash]
        self._hash_of[block_id] = None
        self.version += 1
        if self.on_forget is not None:
            self.on_forget(block_hash)

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Asserts that references equal the entries of `tables`, that blocks are conserved and hashes unique."""
        counted = [0] * (self.num_blocks + 1)
        for table in tables:
            for block_id in table:
                counted[block_id] += 1
        counted[NULL_BLOCK] = 0
        assert counted == self._references, "references differ from table entries"
        free = [block_id for block_id in range(1, self.num_blocks + 1) if self._references[block_id] == 0]
        idle = [*self._idle, *self._cold]
        assert sorted([*self._blank, *idle]) == free, "the free blocks are not the unreferenced ones"
        registered = {b: h for b, h in enumerate(self._hash_of) if h is not None}
        assert {h: b for b, h in registered.items()} == self._block_of, "hash index and blocks disagree"
        assert len(registered) == len(self._block_of), "two blocks are registered under one hash"
        assert all(b in registered for b in idle), "a block is idle without content"
        assert not any(b in registered for b in self._blank), "a blank block has content"
