"""Attention with windows: the same bits however a row is cut and placed, whatever becomes of what it has left behind.

At the level of a program, so that window, soft cap and heads are drawn freely; `test_native_kernels.py` says that the
numbers are right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.support import pack
from noria.ops.base import AttentionSpec, Linear
from noria.ops.native import why_unavailable
from noria.runner.executor import Float32Array
from ops.native_cases import VOCAB, Case, built, numbers, rounded, step, unit

if reason := why_unavailable():
    pytest.skip(reason, allow_module_level=True)

from noria.ops import _native

BLOCK = 16
POISON = 5
"""A token whose queries, keys and values are not numbers."""
dtypes = st.sampled_from(["float32", "bfloat16", *(["bfloat16 on AMX"] if _native.has_amx_bf16() else [])])
specs = st.builds(
    lambda heads, head_dim, window, soft_cap: AttentionSpec(
        num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, scale=head_dim**-0.5, window=window,
        soft_cap=soft_cap,
    ),
    st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]),
    st.sampled_from([16, 32, 64, 80, 256]),
    st.sampled_from([1, 2, 15, 16, 17, 40, 64, 65, 120]),
    st.sampled_from([None, 2.0]),
)  # fmt: skip


def attention_case(spec: AttentionSpec, dtype: str, seed: int) -> Case:
    """Two layers: the second attends without a window over what the first has made of each token."""
    weights = {
        "e": rounded(numbers(seed, VOCAB, spec.qkv_size), dtype),
        "w": rounded(numbers(seed + 1, spec.qkv_size, spec.q_size, scale=spec.q_size**-0.5), dtype),
        "u": unit(spec.q_size),
        "f": (1_000.0 ** -np.linspace(0, 1, spec.head_dim // 2, endpoint=False)).astype(np.float32),
    }

    def forward(ops: Any, w: dict[str, Any], batch: Any) -> Any:
        table, x = ops.rotary_table(w["f"], batch), ops.embedding(w["e"], batch)
        for layer, (window, weight) in enumerate(((spec.window, "w"), (None, "u"))):
            own = replace(spec, window=window)
            q = ops.rotary_and_write_kv(x, table, layer, own, batch)
            x = ops.linear(ops.paged_attention(q, layer, own, batch), Linear(w[weight], None))
        return x

    return Case(forward, weights, spec, [pack([([1], 0, [1])], BLOCK, wanted="all")], num_blocks=80, num_layers=2)


def run_in_chunks(executor: Any, prompts: list[list[int]], chunks: list[int], seed: int) -> list[Float32Array]:
    """Each prompt in chunks of its own size, side by side, in blocks that are dealt anew: results of every token."""
    free = np.random.default_rng(seed).permutation(np.arange(1, 81)).tolist()
    tables = [[free.pop() for _ in range(-(-len(prompt) // BLOCK))] for prompt in prompts]
    done, results = [0] * len(prompts), [[] for _ in prompts]
    while any(d < len(prompt) for d, prompt in zip(done, prompts, strict=True)):
        active = [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]
        ends = {i: min(done[i] + chunks[i], len(prompts[i])) for i in active}
        batch = pack([(prompts[i][: ends[i]], done[i], tables[i]) for i in active], BLOCK, wanted="all")
        found = step(executor, batch)
        for row, i in enumerate(active):
            results[i].append(found[batch.query_start[row] : batch.query_start[row + 1]])
            done[i] = ends[i]
    return [np.concatenate(parts) for parts in results]


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(specs, dtypes, st.integers(0, 99))
def test_the_same_bits_alone_among_others_in_chunks_and_in_any_block(
    spec: AttentionSpec, dtype: str, seed: int
) -> None:
    executor = built(attention_case(spec, dtype, seed), dtype, threads=2)
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (1, 16, 30, 64, 65, 133, 200)]
    expected = [run_in_chunks(executor, [prompt], [len(prompt)], seed=0)[0] for prompt in prompts]
    assert all(np.isfinite(x).all() for x in expected)
    for chunks in ([200] * 7, [1] * 7, [37] * 7, [1, 2, 3, 16, 50, 7, 13]):
        found = run_in_chunks(executor, prompts, chunks, seed=chunks[-1])
        assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True)), chunks


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(specs, dtypes, st.integers(1, 40), st.integers(0, 99))
def test_what_lies_before_the_window_is_not_looked_at(spec: AttentionSpec, dtype: str, new: int, seed: int) -> None:
    """Its blocks are given to a row of poison, which is what may happen to blocks that are given back."""
    assert spec.window is not None
    case = attention_case(spec, dtype, seed)

    def only_the_window(ops: Any, w: dict[str, Any], batch: Any) -> Any:
        q = ops.rotary_and_write_kv(ops.embedding(w["e"], batch), None, 0, spec, batch)
        return ops.linear(ops.paged_attention(q, 0, spec, batch), Linear(w["u"], None))

    case.forward = only_the_window
    case.weights["e"][POISON] = np.nan
    rng = np.random.default_rng(seed)
    prompt = [int(token) for token in rng.integers(POISON + 1, VOCAB, 150 + new)]
    table = list(range(1, 13))
    left_behind = max(150 + 1 - spec.window, 0) // BLOCK
    results = []
    for is_poisoned in (False, True):
        executor = built(case, dtype, threads=1)
        step(executor, pack([(prompt[:150], 0, table)], BLOCK, wanted="none"))
        if is_poisoned and left_behind:
            poison = pack([([POISON] * (left_behind * BLOCK), 0, table[:left_behind])], BLOCK, wanted="last")
            assert np.isnan(step(executor, poison)).all()
        results.append(step(executor, pack([(prompt, 150, table)], BLOCK, wanted="all")))
    assert np.isfinite(results[0]).all()
    np.testing.assert_array_equal(*results)
