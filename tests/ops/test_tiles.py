"""Cutting attention into tiles: every query once, with all its keys, and with bounded padding."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.ops.tiles import SLACK_BLOCKS, TILE_QUERIES, plan_tiles
from noria.runner.executor import ForwardBatch

ROW = st.tuples(st.integers(0, 3000), st.one_of(st.just(1), st.integers(1, 600)))  # computed, new


def batch_of(rows: list[tuple[int, int]], block_size: int) -> ForwardBatch:
    context = np.array([computed + new for computed, new in rows], dtype=np.int32)
    blocks = -(-context // block_size)
    table = np.zeros((len(rows), blocks.max()), dtype=np.int32)
    for row, n in enumerate(blocks):
        table[row, :n] = 1 + blocks[:row].sum() + np.arange(n)
    starts = np.cumsum([0, *(new for _, new in rows)]).astype(np.int32)
    positions = np.concatenate([np.arange(c, c + n) for c, n in rows]).astype(np.int32)
    row_of = np.repeat(np.arange(len(rows)), np.diff(starts))
    slots = table[row_of, positions // block_size] * block_size + positions % block_size
    return ForwardBatch(positions, positions, slots, starts, context, table, starts[1:] - 1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(ROW, min_size=1, max_size=12),
    st.sampled_from([1, 16, 32]),
    st.sampled_from([512, 4096]),
    st.sampled_from([None, None, 1, 7, 64, 1000]),
)
def test_tiles(rows: list[tuple[int, int]], block_size: int, group_keys: int, window: int | None) -> None:
    batch = batch_of(rows, block_size)
    plan = plan_tiles(batch, block_size, group_keys, window)
    all_tokens = np.concatenate([group.tokens.ravel() for group in plan.groups])
    np.testing.assert_array_equal(all_tokens[plan.restore], np.arange(len(batch.token_ids)))

    row_of = np.repeat(np.arange(len(rows)), np.diff(batch.query_start))
    for group in plan.groups:
        np.testing.assert_array_equal(group.positions, batch.positions[group.tokens])
        assert len(group.blocks) == 1 or group.blocks.size * block_size <= group_keys
        for tokens, positions, first_key, blocks in zip(
            group.tokens, group.positions, group.first_key, group.blocks, strict=True
        ):
            (row,) = dict.fromkeys(row_of[tokens])  # a tile is of one row
            first_seen = 0 if window is None else max(positions.min() - window + 1, 0)
            first_block = first_seen // block_size
            assert first_key == first_block * block_size
            needed = positions.max() // block_size + 1 - first_block
            np.testing.assert_array_equal(blocks[:needed], batch.block_table[row, first_block : first_block + needed])
            assert not blocks[needed:].any()
            assert len(blocks) <= max(needed * 3 // 2, needed + SLACK_BLOCKS)
            assert len(tokens) <= min(TILE_QUERIES, 2 * len(dict.fromkeys(tokens)) - 1)


def test_decodes_of_like_length_are_one_group_in_order() -> None:
    plan = plan_tiles(batch_of([(100, 1), (100, 1), (105, 1)], 16), 16, 4096)
    (group,) = plan.groups
    assert group.tokens.tolist() == [[0], [1], [2]]
    assert plan.restore.tolist() == [0, 1, 2]


def test_a_short_row_is_not_padded_to_a_long_one() -> None:
    plan = plan_tiles(batch_of([(4000, 1), (10, 1)], 16), 16, 1 << 20)
    assert [group.blocks.shape for group in plan.groups] == [(1, 1), (1, 251)]
    assert plan.restore.tolist() == [1, 0]
