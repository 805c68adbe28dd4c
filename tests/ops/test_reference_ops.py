"""Each op of the torch reference against a naive float64 implementation of what `noria.ops.base` says it does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.ops.base import AttentionSpec, Linear
from noria.ops.reference import TorchOps
from noria.runner.executor import ForwardBatch

Array = np.ndarray

torch.set_num_threads(1)


@pytest.fixture
def ops() -> TorchOps:
    return TorchOps(torch.float32, torch.device("cpu"))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def batch_of(
    rows: list[tuple[int, int]], tables: list[list[int]], block_size: int, wanted: list[int] | None = None
) -> ForwardBatch:
    """Rows of (context length, new tokens), with arbitrary token ids."""
    positions = np.concatenate([np.arange(context - new, context) for context, new in rows])
    slots = [
        table[p // block_size] * block_size + p % block_size
        for (context, new), table in zip(rows, tables, strict=True)
        for p in range(context - new, context)
    ]
    table = np.zeros((len(rows), max(map(len, tables))), dtype=np.int32)
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = blocks
    starts = np.cumsum([0, *(new for _, new in rows)])
    arrays = (np.arange(len(positions)), positions, slots, starts, [context for context, _ in rows])
    ints = [np.array(a, dtype=np.int32) for a in arrays]
    return ForwardBatch(*ints, table, np.array([0] if wanted is None else wanted, dtype=np.int32))


def naive_attention(q: Array, keys: Array, values: Array, position: int, spec: AttentionSpec) -> Array:
    """One query [heads, d] at `position` over keys and values [context, kv_heads, d]."""
    result = np.empty_like(q, dtype=np.float64)
    for head in range(spec.num_heads):
        kv_head = head // (spec.num_heads // spec.num_kv_heads)
        seen = slice(0 if spec.window is None else max(position - spec.window + 1, 0), position + 1)
        scores = keys[seen, kv_head].astype(np.float64) @ q[head].astype(np.float64) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
        weights = np.exp(scores - scores.max())
        result[head] = weights @ values[seen, kv_head] / weights.sum()
    return result


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], list[list[int]], int]:
    """Block size, rows of (context, new tokens), a table for each with blocks in any order, blocks in the pool."""
    block_size = draw(st.sampled_from([1, 4, 16]))
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        new = draw(st.sampled_from([1, 1, 1, 2, 3, 17, 64, 65, 130]))
        rows.append((new + draw(st.sampled_from([0, 0, 1, 7, 50, 200])), new))
    sizes = [-(-context // block_size) for context, _ in rows]
    num_blocks = sum(sizes) + draw(st.integers(0, 3))
    order = draw(st.randoms(use_true_random=False)).sample(range(1, num_blocks + 1), sum(sizes))
    ends = np.cumsum(sizes)
    return block_size, rows, [order[e - n : e] for e, n in zip(ends, sizes, strict=True)], num_blocks


@settings(max_examples=40, deadline=None)
@given(
    placements(),
    st.sampled_from([(4, 4, 8), (4, 2, 16), (6, 2, 8), (3, 1, 24)]),
    st.sampled_from([None, 1, 5, 16, 100]),
    st.sampled_from([None, 0.5]),
    st.integers(0, 2**16),
    st.booleans(),
)
def test_paged_attention(
    placement: tuple[int, list[tuple[int, int]], list[list[int]], int],
    heads: tuple[int, int, int],
    window: int | None,
    soft_cap: float | None,
    seed: int,
    poisoned: bool,
) -> None:
    """Contexts written in one go, then attended by the last tokens of each row; what is unwritten may be NaN.

    So may be the blocks that no query's window reaches any more: they could be somebody else's by then.
    """
    block_size, rows, tables, num_blocks = placement
    num_heads, num_kv_heads, head_dim = heads
    spec = AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=0.3, window=window, soft_cap=soft_cap
    )
    ops = TorchOps(torch.float32, torch.device("cpu"))
    ops.allocate_kv(2, num_blocks, block_size, num_kv_heads, head_dim)
    for pool in ops._keys + ops._values:
        pool[1:] = math.nan if poisoned else 1e6
    still = torch.zeros(1, head_dim)
    still[:, : head_dim // 2] = 1  # cosines 1 and sines 0: no rotation

    whole = ops.batch(batch_of([(context, context) for context, _ in rows], tables, block_size))
    total = sum(context for context, _ in rows)
    qkv = random(total, spec.qkv_size, seed=seed)
    ops.rotary_and_write_kv(qkv, still.expand(total, -1), 1, spec, whole)
    for (context, new_tokens), blocks in zip(rows, tables, strict=True):
        left_behind = 0 if window is None else max(context - new_tokens - window + 1, 0) // block_size
        for pool in (ops._keys[1], ops._values[1]):
            pool[blocks[:left_behind]] = math.nan
    new = batch_of(rows, tables, block_size)
    q = random(len(new.token_ids), spec.q_size, seed=seed + 1)
    got = ops.paged_attention(q, 1, spec, ops.batch(new)).numpy().reshape(-1, num_heads, head_dim)

    heads_of_all = qkv.numpy().reshape(total, -1, head_dim)
    row_start = np.cumsum([0, *(context for context, _ in rows)])
    for row, (context, _) in enumerate(rows):
        own = heads_of_all[row_start[row] : row_start[row] + context]
        keys, values = own[:, num_heads : num_heads + num_kv_heads], own[:, num_heads + num_kv_heads :]
        for token in range(new.query_start[row], new.query_start[row + 1]):
            query = q[token].numpy().reshape(num_heads, head_dim)
            expected = naive_attention(query, keys, values, int(new.positions[token]), spec)
            np.testing.assert_allclose(got[token], expected, rtol=1e-4, atol=1e-5)


def test_layers_have_memory_of_their_own(ops: TorchOps) -> None:
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=4, scale=0.5)
    ops.allocate_kv(2, 2, 4, 1, 4)
    batch = ops.batch(batch_of([(3, 3)], [[2]], 4))
    table = torch.cat((torch.ones(3, 2), torch.zeros(3, 2)), dim=-1)
    for layer in (0, 1):
        ops.rotary_and_write_kv(random(3, spec.qkv_size, seed=layer), table, layer, spec, batch)
    q = random(3, spec.q_size, seed=9)
    assert not torch.equal(ops.paged_attention(q, 0, spec, batch), ops.paged_attention(q, 1, spec, batch))


def test_rotary_turns_pairs_half_a_head_apart(ops: TorchOps) -> None:
    """As complex numbers: the pair (i, i + d/2) times e^(i * position * frequency); values are left alone."""
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0)
    ops.allocate_kv(1, 8, 4, 1, 8)
    batch = ops.batch(batch_of([(30, 5)], [[3, 1, 2, 5, 4, 8, 7, 6]], 4))
    frequencies = torch.tensor([1.0, 0.3, 0.01, 0.002])
    qkv = random(5, spec.qkv_size)
    q = ops.rotary_and_write_kv(qkv, ops.rotary_table(frequencies, batch), 0, spec, batch)

    heads = qkv.numpy().reshape(5, 4, 8).astype(np.float64)
    turn = np.exp(1j * np.arange(25, 30)[:, None] * frequencies.numpy().astype(np.float64))[:, None, :]
    turned = (heads[..., :4] + 1j * heads[..., 4:]) * turn
    expected = np.concatenate((turned.real, turned.imag), axis=-1)
    np.testing.assert_allclose(q.numpy().reshape(5, 2, 8), expected[:, :2], atol=1e-5)
    # Positions 25 .. 29 lie in blocks 7 (from offset 1) and 6; pools are [block, head, offset, d].
    written_keys = torch.cat((ops._keys[0][7, 0, 1:], ops._keys[0][6, 0, :2])).numpy()
    written_values = torch.cat((ops._values[0][7, 0, 1:], ops._values[0][6, 0, :2])).numpy()
    np.testing.assert_allclose(written_keys, expected[:, 2], atol=1e-5)
    np.testing.assert_array_equal(written_values, heads[:, 3].astype(np.float32))


@pytest.mark.parametrize("rotary_dim", [None, 4])
@pytest.mark.parametrize("has_table", [True, False])
def test_heads_are_normed_then_rotated_in_part_or_not_at_all(
    ops: TorchOps, rotary_dim: int | None, has_table: bool
) -> None:
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0, rotary_dim=rotary_dim)
    ops.allocate_kv(1, 8, 4, 1, 8)
    batch = ops.batch(batch_of([(30, 2)], [[3, 1, 2, 5, 4, 8, 7, 6]], 4))  # both in block 6
    qkv, q_norm, k_norm = random(2, spec.qkv_size), random(8, seed=1), random(8, seed=2)
    frequencies = torch.tensor([1.0, 0.3, 0.01, 0.002])[: spec.rotated // 2]
    table = ops.rotary_table(frequencies, batch, factor=1.5) if has_table else None
    q = ops.rotary_and_write_kv(qkv, table, 0, spec, batch, q_norm=q_norm, k_norm=k_norm, eps=0.1)

    expected = qkv.double().view(2, 4, 8).clone()
    expected[:, :3] /= (expected[:, :3].square().mean(-1, keepdim=True) + 0.1).sqrt()
    expected[:, :2] *= q_norm
    expected[:, 2] *= k_norm
    if has_table:
        half = spec.rotated // 2
        turn = torch.polar(torch.tensor(1.5).double(), torch.outer(torch.tensor([28.0, 29.0]), frequencies).double())
        turned = torch.complex(expected[:, :3, :half], expected[:, :3, half : 2 * half]) * turn[:, None]
        expected[:, :3, : 2 * half] = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(q.double().view(2, 2, 8), expected[:, :2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ops._keys[0][6, 0, :2].double(), expected[:, 2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ops._values[0][6, 0, :2].double(), expected[:, 3], rtol=0, atol=0)


def test_writing_touches_no_other_block_that_is_in_use(ops: TorchOps) -> None:
    spec = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2, scale=1.0)
    ops.allocate_kv(1, 3, 2, 1, 2)
    for pool in (ops._keys[0], ops._values[0]):
        pool[1:] = 5.0
    batch = ops.batch(batch_of([(3, 2)], [[1, 3]], 2))  # offset 1 of block 1, then the first slot of block 3
    ops.rotary_and_write_kv(torch.ones(2, 6), torch.tensor([[1.0, 0.0]]).expand(2, -1), 0, spec, batch)
    assert ops._values[0][:, 0, :, 0].tolist() == [[0, 0], [5, 1], [5, 5], [1, 0]]


def test_embedding(ops: TorchOps) -> None:
    ops.allocate_kv(1, 4, 4, 1, 2)
    weight = random(10, 6)
    batch = ops.batch(batch_of([(7, 7)], [[1, 2]], 4))  # token ids 0 .. 6
    torch.testing.assert_close(ops.embedding(weight, batch), weight[:7], rtol=0, atol=0)


@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(ops: TorchOps, with_bias: bool) -> None:
    x, weight, bias = random(5, 8), random(6, 8, seed=1), random(6, seed=2)
    got = ops.linear(x, Linear(weight, bias if with_bias else None))
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_rms_norm(ops: TorchOps) -> None:
    x, weight = random(5, 8) * 100, random(8, seed=1)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * weight.double()
    torch.testing.assert_close(ops.rms_norm(x, weight, 0.1).double(), expected, rtol=1e-5, atol=1e-6)


def test_elementwise(ops: TorchOps) -> None:
    x, y = random(3, 8), random(3, 8, seed=1)
    gate, up = x[:, :4].double(), x[:, 4:].double()
    torch.testing.assert_close(ops.silu_mul(x).double(), gate / (1 + (-gate).exp()) * up, rtol=1e-5, atol=1e-6)
    cubic = (2 / math.pi) ** 0.5 * (gate + 0.044715 * gate.pow(3))
    torch.testing.assert_close(ops.gelu_mul(x).double(), gate / 2 * (1 + cubic.tanh()) * up, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ops.add(x, y), x + y)
    torch.testing.assert_close(ops.scale(x, 0.25), x * 0.25)
    torch.testing.assert_close(ops.soft_cap(x * 3, 2.0), 2 * torch.tanh(x * 1.5))


def test_select_keeps_the_order_that_was_asked_for(ops: TorchOps) -> None:
    ops.allocate_kv(1, 4, 4, 1, 2)
    x = random(7, 3)
    batch = ops.batch(batch_of([(7, 7)], [[1, 2]], 4, wanted=[6, 0, 2]))
    torch.testing.assert_close(ops.select(x, batch), x[[6, 0, 2]])


@pytest.mark.parametrize("vocab_size", [7, 2048, 5000])
def test_logits_are_float32_products_of_bfloat16_weights(vocab_size: int) -> None:
    """Not rounded to bfloat16 on the way, in any slice of the head."""
    ops = TorchOps(torch.bfloat16, torch.device("cpu"))
    x, weight = random(3, 64), random(vocab_size, 64, seed=1).bfloat16()
    got = ops.logits(x, weight)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 5}, "5 heads cannot share 2"),
        ({"window": 0}, "a window of 0 keys"),
        ({"soft_cap": 0.0}, "must be positive, not 0.0"),
        ({"rotary_dim": 3}, "3 dimensions of 8 cannot be rotated"),
        ({"rotary_dim": 10}, "10 dimensions of 8 cannot be rotated"),
    ],
)
def test_a_spec_that_makes_no_attention_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**({"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "scale": 1.0} | fields))
