"""Small programs for the native executor and for the reference, and how their results are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from models.support import pack
from noria.models.decoder import Outputs
from noria.ops.base import AttentionSpec
from noria.ops.lowering import GATES, Lowered, lower
from noria.ops.record import Program, record, run
from noria.ops.reference import TorchOps
from noria.runner.executor import Float32Array, ForwardBatch

VOCAB = 61
NO_ATTENTION = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=16, scale=1.0)
"""The KV memory of programs that use none: an executor always has some."""


@dataclass
class Case:
    """A program of one operation: its forward function, its weights, and the steps that it runs."""

    forward: Callable[[Any, dict[str, Any], Any], Any]
    weights: dict[str, Float32Array]
    spec: AttentionSpec | None = None
    """Of any layer: all have heads of one shape."""
    batches: list[ForwardBatch] = field(default_factory=list)
    num_blocks: int = 1
    block_size: int = 16
    num_layers: int = 1

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
    """The last step's result."""
    executor = built(case, dtype, threads)
    return [step(executor, batch) for batch in case.batches][-1]


def built(case: Case, dtype: str, threads: int) -> Any:
    """An executor of the case's program, with KV memory."""
    from noria.ops import _native

    make = _native.ExecutorF32 if dtype == "float32" else _native.ExecutorBF16
    executor = make(threads, dtype == "bfloat16 on AMX")
    _build(executor, lower(case.program()), case)
    executor.allocate_kv(case.num_layers, case.num_blocks, case.block_size, 0)
    return executor


def step(executor: Any, batch: ForwardBatch) -> Float32Array:
    result: Float32Array = executor.forward(
        batch.token_ids, batch.positions, batch.slots, batch.query_start, batch.context_len, batch.block_table,
        batch.logit_tokens,
    )  # fmt: skip
    return result.copy()


def _build(executor: Any, lowered: Lowered, case: Case) -> None:
    weights, vectors = case.weights, dict[str, int]()
    specs = list(dict.fromkeys(op.attention for op in lowered.operations if op.attention)) or [NO_ATTENTION]
    for spec in specs:
        executor.add_attention(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale, window=spec.window, soft_cap=spec.soft_cap,
            rotary_dim=spec.rotary_dim,
        )  # fmt: skip

    def vector(name: str | None) -> int:
        if name is None:
            return -1
        if name not in vectors:
            vectors[name] = executor.add_vector(weights[name].tolist())
        return vectors[name]

    for width in lowered.widths["rows"]:
        executor.add_rows(width)
    for width in lowered.widths["slabs"]:
        executor.add_slabs(width)
    for op in lowered.operations:
        weight = vector(op.weight) if op.kind not in ("embedding", "product") else -1
        if op.weight is not None and op.kind in ("embedding", "product"):
            weight = executor.begin_matrix(*weights[op.weight].shape, op.epilogue in GATES)
            data = weights[op.weight]
            executor.fill_matrix(weight, 0, data.view(np.uint8), "F32", 0, 0, len(data))
            if op.bias is not None:
                executor.set_bias(weight, weights[op.bias].tolist())
        executor.add_operation(
            op.kind,
            input=-1 if op.input is None else op.input.number,
            table=-1 if op.table is None else op.table.number,
            output=op.output.number,
            weight=weight,
            layer=-1 if op.layer is None else op.layer,
            attention=-1 if op.attention is None else specs.index(op.attention),
            q_norm=vector(op.q_norm),
            k_norm=vector(op.k_norm),
            epsilon=op.epsilon,
            factor=op.factor,
            soft_cap=op.soft_cap,
            epilogue=op.epilogue,
            selects=op.selects,
            on_logit_rows=op.on_logit_rows,
        )


def by_reference(case: Case) -> Float32Array:
    ops = TorchOps(torch.float32, torch.device("cpu"))
    spec = case.spec or NO_ATTENTION
    ops.allocate_kv(case.num_layers, case.num_blocks, case.block_size, spec.num_kv_heads, spec.head_dim)
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
