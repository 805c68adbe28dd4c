"""Every kernel of the native executor against the torch reference, over drawn shapes, batches and placements.

Operations run in small programs of their own, so that a fault shows where it is. An embedding brings random numbers, an
operation changes them, and where its result is in the layout of a product's input, the unit matrix brings it out. Then
whole models, in steps of mixed chunks and decodes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.support import PagedDriver, agreement, pack, random_prompts, tiny_model
from noria.files.sources import open_model
from noria.ops.base import AttentionSpec, Linear
from noria.ops.native import NativeExecutor, why_unavailable
from noria.ops.reference import TorchExecutor
from ops.native_cases import VOCAB, Case, batches_of, by_native, check, numbers, one_step, rounded, unit

if reason := why_unavailable():
    pytest.skip(reason, allow_module_level=True)

from noria.ops import _native

DRAWN = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

widths = st.integers(4, 150)
dtypes = st.sampled_from(["float32", "bfloat16", *(["bfloat16 on AMX"] if _native.has_amx_bf16() else [])])
specs = st.builds(
    lambda kv_heads, shared, sixteenths: AttentionSpec(
        num_heads=kv_heads * shared, num_kv_heads=kv_heads, head_dim=16 * sixteenths, scale=(16 * sixteenths) ** -0.5
    ),
    st.integers(1, 3),
    st.integers(1, 7),
    st.integers(1, 8),
)
windows = st.sampled_from([None, 1, 7, 16, 33, 64, 100])
further_specs = st.builds(
    lambda spec, large, window, soft_cap, pairs: replace(
        spec,
        head_dim=256 if large else spec.head_dim,
        window=window,
        soft_cap=soft_cap,
        rotary_dim=None if pairs is None else 2 * min(pairs, spec.head_dim // 2),
    ),
    specs,
    st.booleans(),
    windows,
    st.sampled_from([None, 0.7, 20.0]),
    st.sampled_from([None, 1, 8, 13, 24]),
)
"""With all that an attention may have; heads of 256 are the largest."""
row_shapes = st.lists(st.tuples(st.integers(0, 150), st.integers(1, 70)), min_size=1, max_size=9)
"""Of each row: tokens computed before, tokens to run."""


@DRAWN
@given(widths, row_shapes, dtypes, st.sampled_from(["all", "last"]), st.integers(1, 3), st.integers(0, 99))
def test_embedding_select_and_norm(
    width: int, rows: list[tuple[int, int]], dtype: str, wanted: str, threads: int, seed: int
) -> None:
    weights = {"e": rounded(numbers(seed, VOCAB, width), dtype), "n": numbers(seed + 1, width), "u": unit(width)}

    def forward(ops: Any, w: dict[str, Any], batch: Any) -> Any:
        x = ops.embedding(w["e"], batch)
        return ops.logits(ops.rms_norm(ops.select(x, batch), w["n"], 1e-5), w["u"])

    check(one_step(Case(forward, weights), rows, seed, wanted), dtype, threads)


@DRAWN
@given(widths, widths, row_shapes, dtypes, st.booleans(), st.integers(1, 3), st.integers(0, 99))
def test_products_and_their_last_steps(
    width: int, middle: int, rows: list[tuple[int, int]], dtype: str, has_bias: bool, threads: int, seed: int
) -> None:
    """A product that stores, one that multiplies gate by up, one that adds to the stream; with biases and without."""
    weights = {
        "e": rounded(numbers(seed, VOCAB, width), dtype),
        "store": rounded(numbers(seed + 1, middle, width, scale=width**-0.5), dtype),
        "gate_up": rounded(numbers(seed + 2, 2 * middle, width, scale=width**-0.5), dtype),
        "add": rounded(numbers(seed + 3, width, middle, scale=middle**-0.5), dtype),
        "head": rounded(numbers(seed + 4, VOCAB, width, scale=width**-0.5), dtype),
    }
    biases = {"b1": numbers(seed + 5, middle), "b2": numbers(seed + 6, 2 * middle), "b3": numbers(seed + 7, width)}
    one = {"n": np.ones(width, dtype=np.float32)}

    def bias(w: dict[str, Any], name: str) -> Any:
        return w[name] if has_bias else None

    def stores(ops: Any, w: dict[str, Any], batch: Any) -> Any:
        x = ops.rms_norm(ops.embedding(w["e"], batch), w["n"], 1e-5)
        return ops.linear(x, Linear(w["store"], bias(w, "b1")))

    def adds(ops: Any, w: dict[str, Any], batch: Any) -> Any:
        x = ops.embedding(w["e"], batch)
        gated = ops.silu_mul(ops.linear(ops.rms_norm(x, w["n"], 1e-5), Linear(w["gate_up"], bias(w, "b2"))))
        return ops.add(x, ops.linear(gated, Linear(w["add"], bias(w, "b3"))))

    def scores(ops: Any, w: dict[str, Any], batch: Any) -> Any:
        return ops.logits(ops.rms_norm(ops.embedding(w["e"], batch), w["n"], 1e-5), w["head"])

    for forward in (stores, adds, scores):
        check(one_step(Case(forward, weights | biases | one), rows, seed, "all"), dtype, threads)


@DRAWN
@given(widths, row_shapes, dtypes, st.booleans(), st.booleans(), st.integers(1, 3), st.integers(0, 99))
def test_scaled_products_post_norms_and_soft_caps(
    width: int,
    rows: list[tuple[int, int]],
    dtype: str,
    has_bias: bool,
    is_capped: bool,
    threads: int,
    seed: int,
) -> None:
    """A scaled embedding, scaled products that are stored and added, an added norm, scaled and capped scores."""
    weights = {
        "e": rounded(numbers(seed, VOCAB, width), dtype),
        "n": numbers(seed + 1, width),
        "gate_up": rounded(numbers(seed + 2, 2 * width, width, scale=width**-0.5), dtype),
        "w": rounded(numbers(seed + 3, width, width, scale=width**-0.5), dtype),
        "b": numbers(seed + 4, width),
        "head": rounded(numbers(seed + 5, VOCAB, width, scale=width**-0.5), dtype),
    }

    def linear(w: dict[str, Any]) -> Any:
        return Linear(w["w"], w["b"] if has_bias else None)

    def stores(ops: Any, w: dict[str, Any], batch: Any) -> Any:
        x = ops.rms_norm(
            ops.scale(ops.embedding(w["e"], batch), 3.5), w["n"], 1.0
        )  # an eps that a scale is seen beside
        return ops.scale(ops.linear(x, linear(w)), 0.3)

    def adds(ops: Any, w: dict[str, Any], batch: Any) -> Any:
        x = ops.scale(ops.embedding(w["e"], batch), 3.5)
        gated = ops.gelu_mul(ops.linear(ops.rms_norm(x, w["n"], 1e-5), Linear(w["gate_up"], None)))
        return ops.add(x, ops.scale(ops.linear(gated, linear(w)), 0.3))

    def adds_a_norm(ops: Any, w: dict[str, Any], batch: Any) -> Any:
        x = ops.embedding(w["e"], batch)
        branch = ops.linear(ops.rms_norm(x, w["n"], 1e-5), linear(w))
        return ops.add(x, ops.rms_norm(branch, w["n"], 0.1))

    def scores(ops: Any, w: dict[str, Any], batch: Any) -> Any:
        x = ops.rms_norm(ops.embedding(w["e"], batch), w["n"], 1e-5)
        logits = ops.scale(ops.logits(x, w["head"]), 2.5)
        return ops.soft_cap(logits, 3.0) if is_capped else logits

    for forward in (stores, adds, adds_a_norm, scores):
        check(one_step(Case(forward, weights), rows, seed, "all"), dtype, threads)


@DRAWN
@given(specs, row_shapes, dtypes, st.sampled_from([16, 32, 48, 64]), st.integers(1, 3), st.integers(0, 99))
def test_rotation_and_attention(
    spec: AttentionSpec, rows: list[tuple[int, int]], dtype: str, block_size: int, threads: int, seed: int
) -> None:
    """Over keys that this step wrote and those of the step before, in blocks that lie anywhere.

    Together, because rotated queries stand in a layout that only attention reads, and attention's result in one that
    only products read: here with a unit matrix.
    """
    weights = {
        "e": rounded(numbers(seed, VOCAB, spec.qkv_size), dtype),
        "u": unit(spec.num_heads * spec.head_dim),
        "f": (10_000.0 ** -np.linspace(0, 1, spec.head_dim // 2, endpoint=False)).astype(np.float32),
    }

    def forward(ops: Any, w: dict[str, Any], batch: Any) -> Any:
        qkv, table = ops.embedding(w["e"], batch), ops.rotary_table(w["f"], batch)
        q = ops.rotary_and_write_kv(qkv, table, 0, spec, batch)
        return ops.linear(ops.paged_attention(q, 0, spec, batch), Linear(w["u"], None))

    batches, num_blocks = batches_of(rows, block_size, seed, "all")
    check(Case(forward, weights, spec, batches, num_blocks, block_size), dtype, threads)


@DRAWN
@given(
    further_specs, row_shapes, dtypes, st.sampled_from([16, 32, 48]), st.booleans(), st.booleans(), st.integers(1, 3),
    st.integers(0, 99),
)  # fmt: skip
def test_normed_heads_partial_rotation_windows_and_soft_caps(
    spec: AttentionSpec,
    rows: list[tuple[int, int]],
    dtype: str,
    block_size: int,
    is_normed: bool,
    is_rotated: bool,
    threads: int,
    seed: int,
) -> None:
    weights = {
        "e": rounded(numbers(seed, VOCAB, spec.qkv_size), dtype),
        "u": unit(spec.q_size),
        "f": (10_000.0 ** -np.linspace(0, 1, spec.rotated // 2, endpoint=False)).astype(np.float32),
        "q_norm": numbers(seed + 1, spec.head_dim),
        "k_norm": numbers(seed + 2, spec.head_dim),
    }

    def forward(ops: Any, w: dict[str, Any], batch: Any) -> Any:
        table = ops.rotary_table(w["f"], batch, factor=1.2) if is_rotated else None
        norms = {"q_norm": w["q_norm"], "k_norm": w["k_norm"], "eps": 0.1} if is_normed else {}
        q = ops.rotary_and_write_kv(ops.embedding(w["e"], batch), table, 0, spec, batch, **norms)
        return ops.linear(ops.paged_attention(q, 0, spec, batch), Linear(w["u"], None))

    batches, num_blocks = batches_of(rows, block_size, seed, "all")
    check(Case(forward, weights, spec, batches, num_blocks, block_size), dtype, threads)


@settings(DRAWN, max_examples=20)
@given(specs, windows, windows, row_shapes, dtypes, st.integers(1, 3), st.integers(0, 99))
def test_layers_that_differ_in_window_and_rotation(
    spec: AttentionSpec,
    first: int | None,
    second: int | None,
    rows: list[tuple[int, int]],
    dtype: str,
    threads: int,
    seed: int,
) -> None:
    weights = {
        "e": rounded(numbers(seed, VOCAB, spec.qkv_size), dtype),
        "u": rounded(numbers(seed + 1, spec.qkv_size, spec.q_size, scale=spec.q_size**-0.5), dtype),
        "f": (100.0 ** -np.linspace(0, 1, spec.head_dim // 2, endpoint=False)).astype(np.float32),
        "g": (10_000.0 ** -np.linspace(0, 1, spec.head_dim // 2, endpoint=False)).astype(np.float32),
    }

    def forward(ops: Any, w: dict[str, Any], batch: Any) -> Any:
        tables = [ops.rotary_table(w["f"], batch), ops.rotary_table(w["g"], batch)]
        x = ops.embedding(w["e"], batch)
        for layer, window in enumerate((first, second)):
            own = replace(spec, window=window)
            q = ops.rotary_and_write_kv(x, tables[layer], layer, own, batch)
            x = ops.linear(ops.paged_attention(q, layer, own, batch), Linear(w["u"], None))
        return x

    batches, num_blocks = batches_of(rows, 16, seed, "all")
    check(Case(forward, weights, spec, batches, num_blocks, num_layers=2), dtype, threads)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_not_a_number_stays_so(dtype: str) -> None:
    """A poisoned key, value or gate must reach the logits, where it is noticed, and not become something plausible."""
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=32, scale=0.2)
    width = spec.qkv_size
    weights = {
        "e": rounded(numbers(0, VOCAB, width), dtype),
        "f": np.ones(16, dtype=np.float32),
        "u": unit(64),
        "one": np.ones(64, dtype=np.float32),
        "gate_up": rounded(numbers(1, 64, 64), dtype),
        "head": rounded(numbers(2, 40, 32), dtype),
    }
    weights["e"][5] = np.nan

    def forward(ops: Any, w: dict[str, Any], batch: Any) -> Any:
        qkv, table = ops.embedding(w["e"], batch), ops.rotary_table(w["f"], batch)
        q = ops.rotary_and_write_kv(qkv, table, 0, spec, batch)
        x = ops.linear(ops.paged_attention(q, 0, spec, batch), Linear(w["u"], None))
        gated = ops.silu_mul(ops.linear(ops.rms_norm(x, w["one"], 1e-5), Linear(w["gate_up"], None)))
        return ops.logits(gated, w["head"])

    poisoned, clean = [5] + [6, 7, 8] * 24, [6, 7, 8] * 25
    batch = pack([(poisoned, 0, [1, 2, 3, 4, 5]), (clean, 0, [6, 7, 8, 9, 10])], 16, wanted="all")
    found = by_native(Case(forward, weights, spec, [batch], num_blocks=10), dtype, threads=1)
    assert np.isnan(found[:73]).all()
    assert np.isfinite(found[73:]).all()


@settings(DRAWN, max_examples=20)
@given(
    st.sampled_from(["llama", "qwen2"]),
    st.integers(2, 20),
    st.integers(4, 200),
    specs,
    st.lists(st.tuples(st.integers(1, 150), st.sampled_from([1, 1, 5, 16, 37, 200])), min_size=1, max_size=8),
    st.integers(0, 99),
)
def test_whole_models(
    architecture: str,
    hidden_per_head: int,
    intermediate: int,
    spec: AttentionSpec,
    rows: list[tuple[int, int]],
    seed: int,
) -> None:
    """Prompts in chunks of their own sizes, side by side: those of one token are decodes."""
    model = tiny_model(
        architecture, hidden_size=hidden_per_head * spec.num_heads, intermediate_size=intermediate,
        num_hidden_layers=2, head_dim=spec.head_dim,
        num_attention_heads=spec.num_heads, num_key_value_heads=spec.num_kv_heads, initializer_range=0.05,
    )  # fmt: skip
    prompts, chunks = random_prompts([length for length, _ in rows], seed=seed), [chunk for _, chunk in rows]
    with TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        files = open_model(Path(directory))
        executors = {
            "reference": TorchExecutor(files, dtype="float32"),
            "float32": NativeExecutor(files, dtype="float32", threads=2),
            "bfloat16": NativeExecutor(files, dtype="bfloat16", threads=2, use_amx=False),
        }
        logits = {
            name: np.concatenate(PagedDriver(executor, 96, 16, seed).logits(prompts, chunks))
            for name, executor in executors.items()
        }
    np.testing.assert_allclose(logits["float32"], logits["reference"], atol=1e-4, rtol=1e-4)
    assert agreement(logits["reference"], logits["bfloat16"]).mean_kl < 2e-4
