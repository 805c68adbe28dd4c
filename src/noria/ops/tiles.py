"""How paged attention is cut into dense pieces: once per step, from the batch alone, for all layers.

The new tokens of every row are cut into tiles of up to `TILE_QUERIES` queries (a decode is a tile of one). Tiles of
similar size are put into one group and padded to its largest, so that a layer needs a few dense products per step
however many rows there are. Used by `noria.ops.reference`; numpy only. It knows nothing of heads or of values.

What padding can cost is bounded: the queries of a tile at most double, its keys grow at most by half or by
`SLACK_BLOCKS`, and a group gathers at most `group_keys` keys unless it is a single tile. A layer therefore holds,
beside the pool, keys and values of at most max(group_keys, the longest row) tokens at a time; a step holds one mask
entry for each padded query and key, which for a budget of 512 tokens at a context of 32,768 is at most 50 million.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from noria.runner.executor import ForwardBatch

Int64Array = npt.NDArray[np.int64]

TILE_QUERIES = 64
SLACK_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Tiles of one padded shape."""

    tokens: Int64Array  # [tiles, queries]; index of each query in the flattened batch; padding repeats the last one
    positions: Int64Array  # [tiles, queries]; a query sees keys at positions up to its own
    first_key: Int64Array  # [tiles]; the position of the first key gathered
    blocks: Int64Array  # [tiles, blocks]; keys gathered, in order; padding is the null block


@dataclass(frozen=True, slots=True)
class TilePlan:
    """All tiles of a step."""

    groups: tuple[TileGroup, ...]
    restore: Int64Array  # [tokens]; where each token's result is among all groups' queries, laid end to end


def plan_tiles(batch: ForwardBatch, block_size: int, group_keys: int, window: int | None = None) -> TilePlan:
    """Cuts a batch. `group_keys`: how many keys, padding included, one group may gather.

    `window`: how many keys each query sees; blocks that no query of a tile sees are not gathered.
    """
    query_start = batch.query_start.astype(np.int64)
    query_len = np.diff(query_start)
    tiles_per_row = -(-query_len // TILE_QUERIES)
    row = np.repeat(np.arange(len(query_len)), tiles_per_row)  # [tiles]
    first_tile = np.cumsum(tiles_per_row) - tiles_per_row
    offset = (np.arange(len(row)) - first_tile[row]) * TILE_QUERIES  # of the tile in its row's new tokens
    length = np.minimum(query_len[row] - offset, TILE_QUERIES)
    position = batch.context_len[row].astype(np.int64) - query_len[row] + offset  # of the tile's first query
    first_block = np.maximum(position - (window - 1), 0) // block_size if window else np.zeros_like(position)
    num_blocks = -(-(position + length) // block_size) - first_block
    padded = 1 << np.ceil(np.log2(length)).astype(np.int64)  # queries, to the next power of two

    order = np.lexsort((num_blocks, padded))
    groups = []
    restore = np.empty(len(batch.token_ids), dtype=np.int64)
    done = 0
    for begin, end in _runs(padded[order], num_blocks[order], group_keys // block_size):
        chosen = order[begin:end]
        queries, blocks = int(padded[chosen[0]]), int(num_blocks[chosen[-1]])
        within = np.minimum(np.arange(queries), length[chosen, None] - 1)  # [tiles, queries]
        tokens = query_start[row[chosen], None] + offset[chosen, None] + within
        index = np.minimum(first_block[chosen, None] + np.arange(blocks), batch.block_table.shape[1] - 1)
        gathered = batch.block_table[row[chosen, None], index]
        table = np.where(np.arange(blocks) < num_blocks[chosen, None], gathered, 0)
        first_key = first_block[chosen] * block_size
        groups.append(TileGroup(tokens, position[chosen, None] + within, first_key, table.astype(np.int64)))
        # Padding repeats a token, with an equal result each time: which of them is restored does not matter.
        restore[tokens.ravel()] = done + np.arange(tokens.size)
        done += tokens.size
    return TilePlan(tuple(groups), restore)


def _runs(padded: Int64Array, num_blocks: Int64Array, group_blocks: int) -> list[tuple[int, int]]:
    """Cuts tiles, sorted by padded queries and then by blocks, into groups: (begin, end) of each."""
    runs = []
    begin = 0
    for i in range(1, len(padded) + 1):
        if i < len(padded):
            smallest, largest = int(num_blocks[begin]), int(num_blocks[i])
            alike = padded[i] == padded[begin] and largest <= max(smallest * 3 // 2, smallest + SLACK_BLOCKS)
            if alike and (i + 1 - begin) * largest <= group_blocks:
                continue
        runs.append((begin, i))
        begin = i
    return runs
