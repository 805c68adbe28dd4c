"""What each group of layers keeps of a sequence, and when cached blocks of it make a hit: a policy for each kind.

A full group needs all columns of a prefix, so a hit is the longest run from the left. A sliding group needs only what
its window reaches back to from the end of the prefix, so the longest prefix is searched for from the right. A hit must
hold in all groups: `common_hit` shortens it until all agree. Called by `noria.kv.manager`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from noria.kv.block_pool import NULL_BLOCK, BlockPool
from noria.kv_layout import KVLayout, columns_behind


class Group:
    """A group with full attention: nothing of a sequence is given up before its end."""

    window: int | None = None

    def __init__(self, number: int, layout: KVLayout) -> None:
        self.number = number
        self.suffix = number.to_bytes(2, "big") if number else b""
        """Makes a block hash the group's own: the same tokens have a block in each."""

    def hit(self, pool: BlockPool, hashes: Sequence[bytes], num_columns: int) -> list[int]:
        """Blocks of the longest prefix of at most `num_columns` columns that can be shared in this group."""
        suffix, find, found = self.suffix, pool.find, []
        for block_hash in hashes[:num_columns]:
            block_id = find(block_hash + suffix if suffix else block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found


class SlidingGroup(Group):
    """A group whose layers read the last `window` tokens."""

    def __init__(self, number: int, layout: KVLayout, window: int) -> None:
        super().__init__(number, layout)
        self.window: int = window
        self._layout = layout
        self.num_columns_read = -(-(window - 1) // layout.block_size)
        """In front of a block's beginning: what a hit that ends there must have."""

    def hit(self, pool: BlockPool, hashes: Sequence[bytes], num_columns: int) -> list[int]:
        """As above; columns that the window does not reach have the null block."""
        found = [NULL_BLOCK] * num_columns
        end = num_columns
        for column in range(num_columns - 1, -1, -1):
            if end - column > self.num_columns_read:
                break
            block_id = pool.find(hashes[column] + self.suffix)
            if block_id is None:
                end = column
            else:
                found[column] = block_id
        return found[:end]

    def most_blocks(self, num_tokens: int, num_computed: int) -> int:
        """That a sequence holds at once on its way from `num_computed` to `num_tokens` tokens."""
        return self._layout.most_blocks_of(self.window, num_tokens, num_computed)

    def num_passed(self, num_computed: int) -> int:
        """Leading columns that are read no more once `num_computed` tokens have been executed."""
        return max(0, columns_behind(self.window, num_computed, self._layout.block_size))


def make_groups(layout: KVLayout) -> list[Group]:
    return [
        Group(number, layout) if window is None else SlidingGroup(number, layout, window)
        for number, window in enumerate(layout.windows)
    ]


@dataclass(slots=True)
class Passing:
    """One request's blocks in one sliding group: what has been given up, and what of the rest it has taken itself."""

    group: SlidingGroup
    num_passed: int
    """Leading columns that have the null block."""
    most: int
    """The most blocks that it may come to hold at once for the sequence known at admission."""
    num_own: int
    """Blocks that it has taken from the free ones and still holds."""
    not_own: Collection[int]
    """Columns whose block somebody else held when it was shared."""

    def passed_by(self, num_computed: int) -> range:
        """Moves the window on to `num_computed` executed tokens: the columns that it has left behind by that."""
        passed = range(self.num_passed, max(self.num_passed, self.group.num_passed(num_computed)))
        self.num_passed = passed.stop
        self.num_own -= len(passed) - sum(column in self.not_own for column in passed)
        return passed

    def num_owed(self, num_columns_ahead: int) -> int:
        """What it will still take on the next so many columns. A block that it shares is not counted as its own: it may
        have to give that up and to take another before anybody else gets it back."""
        return min(num_columns_ahead, self.most - self.num_own)


@dataclass(slots=True)
class PrefixMatch:
    """Leading blocks of a sequence that are in the pool already. Those of them that nobody holds count as free until
    they are taken: they use up free blocks like any other. Nobody changes one (freezing it would cost more than making
    it, and every waiting request that is looked at has one made)."""

    block_ids: list[int] = field(default_factory=list)
    """Column after column, one of each group."""
    num_columns: int = 0
    num_tokens: int = 0
    full_ids: list[int] = field(default_factory=list)
    """Those of the groups with full attention."""
    num_columns_in_full: int = 0
    """How long the hit would be without sliding groups."""


def common_hit(
    groups: Sequence[Group], pool: BlockPool, hashes: Sequence[bytes], most: int
) -> tuple[list[list[int]], int]:
    """The longest prefix of at most `most` columns that is a hit in every group: each group's blocks, equally many; and
    how long it would be if only full groups were asked.

    What a full group has holds for any shorter prefix too. Sliding groups are asked in turn until none shortens it.
    """
    hits: list[list[int]] = [[] for _ in groups]
    length = most
    for group in groups:
        if not isinstance(group, SlidingGroup):
            hits[group.number] = group.hit(pool, hashes, length)
            length = len(hits[group.number])
    most_in_full = length
    sliding = [group for group in groups if isinstance(group, SlidingGroup)]
    num_agreed, at = 0, 0
    while num_agreed < len(sliding):
        group = sliding[at % len(sliding)]
        hits[group.number] = group.hit(pool, hashes, length)
        num_agreed = num_agreed + 1 if len(hits[group.number]) == length else 1
        length = len(hits[group.number])
        at += 1
    return [hit[:length] for hit in hits], most_in_full
