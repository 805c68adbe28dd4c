"""Every kernel of the native executor against the torch reference, over drawn shapes, batches and placements.

Operations run in small programs of their own, so that a fault shows where it is. An embedding brings random numbers, an
operation changes them, and where its result is in the layout of a product's input, the unit matrix brings it out. Then
whole models, in steps of mixed chunks and decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.support import PagedDriver, agreement, pack, random_prompts, tiny_model
from noria.files.sources import open_model
from noria.models.decoder import Outputs
from noria.ops.base import AttentionSpec, Linear
from noria.ops.lowering import Lowered, lower
from noria.ops.native import NativeExecutor, why_unavailable
from noria.ops.record import Program, record, run
from noria.ops.reference import TorchExecutor, TorchOps
from noria.runner.executor import Float32Array, ForwardBatch

if reason := why_unavailable():
    pytest.skip(reason, allow_module_level=True)

from noria.ops import _native

VOCAB = 61
NO_ATTENTION = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=16, scale=1.0)
"""The KV memory of programs that use none: an executor always has some."""
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
row_shapes = st.lists(st.tuples(st.integers(0, 150), st.integers(1, 70)), min_size=1, max_size=9)
"""Of each row: tokens computed before, tokens to run."""


@dataclass
class Case:
    """A program of one operation: its forward function, its weights, and the steps that it runs."""

    forward: Callable[[Any, dict[str, Any], Any], Any]
    weights: dict[str, Float32Array]
    spec: AttentionSpec | None = None
    batches: list[ForwardBatch] = field(default_factory=list)
    num_blocks: int = 1
    block_size: int = 16

    def program(self) -> Program:
        shapes = {name: value.shape for name, value in self.weights.items()}
        return record(lambda *call: Outputs(logits=self.forward(*call)), dict, shapes, self.batches[0])


def rounded(x: Float32Array, dtype: str) -> Float32Array:
    """As the weights are kept, so that only the computation can differ."""
    return torch.from_numpy(x).bfloat16().float().numpy() if dtype != "float32" else x


def numbers(seed: int, *shape: int, scale: float = 1.0) -> Float32Array:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def batches_of(rows: list[tuple[int, int]], block_size: int, seed: int, wanted: str) -> tuple[list[ForwardBatch], int]:
    """A step that computes what rows have behind them, if they do, and the step in question; blocks lie anywhere."""
    rng = np.random.default_rng(seed)
    counts = [-(-(before + new) // block_size) for before, new in rows]
    free = rng.permutation(np.arange(1, sum(counts) + 4)).tolist()
    tables = [[free.pop() for _ in range(count)] for count in counts]
    tokens = [rng.integers(0, VOCAB, before + new).tolist() for before, new in rows]
    begun = [(t[:before], 0, table) for t, (before, _), table in zip(tokens, rows, tables, strict=True) if before]
    steps = [pack(begun, block_size, wanted="all")] if begun else []
    whole = [(t, before, table) for t, (before, _), table in zip(tokens, rows, tables, strict=True)]
    return [*steps, pack(whole, block_size, wanted=wanted)], sum(counts) + 3


def by_native(case: Case, dtype: str, threads: int) -> Float32Array:
    make = _native.ExecutorF32 if dtype == "float32" else _native.ExecutorBF16
    executor = make(threads, dtype == "bfloat16 on AMX")
    spec = case.spec or NO_ATTENTION
    executor.add_attention(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale)
    _build(executor, lower(case.program()), case.weights)
    executor.allocate_kv(1, case.num_blocks, case.block_size, 0)
    for batch in case.batches:
        result = executor.forward(
            batch.token_ids, batch.positions, batch.slots, batch.query_start, batch.context_len, batch.block_table,
            batch.logit_tokens,
        )  # fmt: skip
    return result.copy()


def _build(executor: Any, lowered: Lowered, weights: dict[str, Float32Array]) -> None:
    for width in lowered.widths["rows"]:
        executor.add_rows(width)
    for width in lowered.widths["slabs"]:
        executor.add_slabs(width)
    for op in lowered.operations:
        weight = -1
        if op.weight is not None and op.kind in ("embedding", "product"):
            weight = executor.begin_matrix(*weights[op.weight].shape, op.epilogue == "silu_mul")
            data = weights[op.weight]
            executor.fill_matrix(weight, 0, data.view(np.uint8), "F32", 0, 0, len(data))
            if op.bias is not None:
                executor.set_bias(weight, weights[op.bias].tolist())
        elif op.weight is not None:
            weight = executor.add_vector(weights[op.weight].tolist())
        executor.add_operation(
            op.kind,
            input=-1 if op.input is None else op.input.number,
            table=-1 if op.table is None else op.table.number,
            output=op.output.number,
            weight=weight,
            layer=-1 if op.layer is None else op.layer,
            attention=-1 if op.attention is None else 0,
            number=op.number,
            epilogue=op.epilogue,
            selects=op.selects,
            on_logit_rows=op.on_logit_rows,
        )


def by_reference(case: Case) -> Float32Array:
    ops = TorchOps(torch.float32, torch.device("cpu"))
    spec = case.spec or NO_ATTENTION
    ops.allocate_kv(1, case.num_blocks, case.block_size, spec.num_kv_heads, spec.head_dim)
    weights = {name: torch.from_numpy(value) for name, value in case.weights.items()}
    for batch in case.batches:
        with torch.inference_mode():
            result = run(case.program(), ops, weights, ops.batch(batch))["logits"]
    return result.numpy()


def check(case: Case, dtype: str, threads: int) -> None:
    """float32 may differ by the order of sums; bfloat16 rounds inputs of products, keys, values and weights of keys."""
    expected, found = by_reference(case), by_native(case, dtype, threads)
    assert found.shape == expected.shape
    if dtype == "float32":
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
    else:
        size = np.sqrt(np.square(expected).mean()) + 1e-6
        assert np.abs(found - expected).max() < 0.06 * max(size, np.abs(expected).max())
        assert np.sqrt(np.square(found - expected).mean()) < 0.008 * size


def one_step(case: Case, rows: list[tuple[int, int]], seed: int, wanted: str) -> Case:
    """For operations that look at one token at a time: only the step in question is run."""
    batches, case.num_blocks = batches_of(rows, case.block_size, seed, wanted)
    case.batches = batches[-1:]
    return case


def unit(width: int) -> Float32Array:
    return np.eye(width, dtype=np.float32)


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
