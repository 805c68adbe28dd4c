"""How layers share one KV pool, and how many of its blocks a sequence holds at once: one formula for all who ask.

Layers with full attention read all earlier tokens of a sequence; layers with a sliding window of w tokens read the last
w, the query's own included. Layers of a kind are dealt into *groups* of equally many layers. A block holds `block_size`
tokens of one group, so blocks of all groups have the same size and lie in one pool. A sequence's table has a *column*
for each `block_size` of its tokens: one block of each group, or the null block where the group's window has moved past.

`KVLayout` is asked by admission, by the promises made to those admitted (`noria.kv`), by the sizing of the pool and by
the bound on `max_model_len`: if any two of them counted differently, a request could be accepted that never fits.
Arithmetic only; imports nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Lengths = TypeVar("Lengths", int, "npt.NDArray[np.int32]")


def columns_behind(window: int, num_computed: Lengths, block_size: int) -> Lengths:
    """How many leading columns no query from position `num_computed` on reads any more (none if not above 0).

    A query at position p reads keys p - window + 1 .. p. Also for arrays of numpy.
    """
    return (num_computed - window + 1) // block_size


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The groups of one pool: `windows` has the window of each, None for full attention.

    `max_chunk`: the most tokens of one sequence that one step computes (they are all held, window or not, until the
    step has been executed).
    """

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    max_chunk: int = 1

    def __post_init__(self) -> None:
        if not self.windows or any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"KV groups need windows of at least one token each, or None: {self.windows}")

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def num_columns(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def most_blocks_of(self, window: int | None, num_tokens: int, num_computed: int = 0) -> int:
        """The most blocks that a sequence holds at once in a group, while it grows from `num_computed` to `num_tokens`
        tokens."""
        num_columns = self.num_columns(num_tokens)
        if window is None:
            return num_columns
        num_columns -= max(0, columns_behind(window, num_computed, self.block_size))
        # The window before the chunk and the chunk itself, and a column more where neither edge is a block's.
        return min(num_columns, self.num_columns(window - 1 + self.max_chunk) + 1)

    def most_blocks(self, num_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` tokens holds at once, in all groups together."""
        return sum(self.most_blocks_of(window, num_tokens) for window in self.windows)

    def longest(self, num_blocks: int, wanted: int) -> int:
        """The greatest length up to `wanted` that a pool of `num_blocks` has room for; 0 if there is none."""
        if self.most_blocks(wanted) <= num_blocks:
            return wanted
        fits, too_many = 0, self.num_columns(wanted)  # in columns
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.most_blocks(middle * self.block_size) <= num_blocks:
                fits = middle
            else:
                too_many = middle
        return fits * self.block_size


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Which group each layer's KV belongs to. A block has room for `layers_per_group` layers of one group."""

    windows: tuple[int | None, ...]
    """Of each group."""
    group_of: tuple[int, ...]
    """Of each layer."""
    array_of: tuple[int, ...]
    """Of each layer: its place among the layers of its group, 0 .. layers_per_group - 1."""
    layers_per_group: int


def group_layers(layer_windows: Sequence[int | None]) -> LayerGroups:
    """Deals layers into groups of equally many layers that have the same window; windows in order of appearance.

    A last group of a kind may be left with fewer layers; its blocks are the same size, and what would be the missing
    layers' is unused. So the number of layers in a group is chosen by what is wasted, where a group more counts as
    much as the room of one layer: each group costs blocks that are not full, and work in every step.
    """
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(layer_windows):
        by_window.setdefault(window, []).append(layer)

    def waste(size: int) -> tuple[int, int]:
        num_groups = sum(-(-len(layers) // size) for layers in by_window.values())
        num_unused = num_groups * size - len(layer_windows)
        return num_unused + num_groups, num_unused

    size = min(range(1, max(map(len, by_window.values())) + 1), key=waste)
    windows: list[int | None] = []
    group_of, array_of = [0] * len(layer_windows), [0] * len(layer_windows)
    for window, layers in by_window.items():
        for place, layer in enumerate(layers):
            if place % size == 0:
                windows.append(window)
            group_of[layer], array_of[layer] = len(windows) - 1, place % size
    return LayerGroups(tuple(windows), tuple(group_of), tuple(array_of), size)
