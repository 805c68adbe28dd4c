"""`noria bench kernels`: where the time of a step goes on the native executor, by kind of operation.

Decode steps of several batch sizes, and a long prefill, each with its floor. Every row has KV of its own, written
before: memory that was never written, or that rows share, would be read from the caches.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from noria.bench.floor import COSTED, KINDS, StepCosts, StepShape, kind_of
from noria.bench.machine import MachineWatch
from noria.errors import OptionError
from noria.ops.native import NativeExecutor
from noria.runner.executor import ForwardBatch, Int32Array

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """One kind of step, repeated. Seconds; medians over the repetitions."""

    name: str
    num_rows: int
    shape: StepShape
    total_s: float
    by_kind_s: dict[str, float]


def time_kernels(
    executor: NativeExecutor, *, batches: Sequence[int], context_len: int, prefill_tokens: int, num_repetitions: int
) -> list[KernelTimes]:
    """Times a decode step for each size in `batches`, at `context_len` tokens a row, and a prefill of one row."""
    if min(*batches, context_len, prefill_tokens, num_repetitions) < 1:
        raise OptionError("--batch, --context, --prefill-tokens and --repetitions must all be at least 1")
    most_rows, row_blocks = max(batches), -(-max(context_len, prefill_tokens) // BLOCK_SIZE)
    num_groups = len(executor.kv_windows)
    executor.allocate_kv(most_rows * row_blocks * num_groups, BLOCK_SIZE)
    # Dealt in random order, as they are after a while of serving.
    blocks = 1 + np.random.default_rng(1).permutation(most_rows * row_blocks).astype(np.int32)
    steps = _Steps(blocks.reshape(most_rows, row_blocks), executor.config.vocab_size, num_groups)
    for row in range(most_rows):
        executor.forward(steps.batch([row], num_new=context_len, context_len=context_len))
    results = [
        _time(f"decode {size}", executor, steps.batch(range(size), 1, context_len), num_repetitions) for size in batches
    ]
    prefill = steps.batch([0], prefill_tokens, prefill_tokens)
    return [*results, _time(f"prefill {prefill_tokens}", executor, prefill, num_repetitions)]


def _time(name: str, executor: NativeExecutor, batch: ForwardBatch, num_repetitions: int) -> KernelTimes:
    executor.forward(batch)  # buffers grow, and memory is committed
    runs = []
    for _ in range(num_repetitions):
        by_kind = dict.fromkeys(KINDS, 0.0)
        for op, seconds in executor.time_operations(batch):
            by_kind[kind_of(op)] += seconds
        runs.append(by_kind)
    return KernelTimes(
        name,
        len(batch.context_len),
        StepShape.of(batch, BLOCK_SIZE),
        statistics.median(sum(run.values()) for run in runs),
        {kind: statistics.median(run[kind] for run in runs) for kind in KINDS},
    )


class _Steps:
    """Batches over rows whose blocks are `table` [rows, blocks]."""

    def __init__(self, table: Int32Array, vocab_size: int, num_groups: int) -> None:
        self._table = table
        self._num_groups = num_groups
        self._tokens = np.random.default_rng(2).integers(0, vocab_size, table.size * BLOCK_SIZE, dtype=np.int32)

    def batch(self, rows: Sequence[int], num_new: int, context_len: int) -> ForwardBatch:
        """The last `num_new` of `context_len` tokens of each row; logits of each row's last."""
        num_rows = len(rows)
        table = self._table[list(rows), : -(-context_len // BLOCK_SIZE)]
        positions = np.arange(context_len - num_new, context_len, dtype=np.int32)
        slots = table[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        ends = np.arange(num_rows + 1, dtype=np.int32) * num_new
        return ForwardBatch(
            token_ids=self._tokens[slots.ravel() - BLOCK_SIZE],
            positions=np.tile(positions, num_rows),
            slots=slots.ravel(),
            query_start=ends,
            context_len=np.full(num_rows, context_len, dtype=np.int32),
            block_table=table,
            logit_tokens=ends[1:] - 1,
        ).spread(self._num_groups, BLOCK_SIZE)


def summarise_kernels(
    times: Sequence[KernelTimes], costs: StepCosts, machine: MachineWatch, dtype: str, peak_tflops: float | None
) -> dict[str, Any]:
    """Milliseconds by step and kind, beside their floors where the machine could be measured."""
    peak, bandwidth = peak_tflops or machine.peak_tflops(dtype), machine.read_gb_s
    return {"steps": [_summary(step, costs, peak, bandwidth) for step in times]}


def _summary(step: KernelTimes, costs: StepCosts, peak: float | None, bandwidth: float | None) -> dict[str, Any]:
    floor = {} if peak is None or bandwidth is None else costs.floor_s([step.shape], peak * 1e12, bandwidth * 1e9)
    floor_s = sum(floor.values())
    return {
        "step": step.name,
        "rows": step.num_rows,
        "tokens": step.shape.num_tokens,
        "ms": _ms(step.total_s),
        "floor_ms": _ms(floor_s) if floor else None,
        "floor_ratio": round(step.total_s / floor_s, 3) if floor else None,
        "by_kind_ms": {kind: _ms(seconds) for kind, seconds in step.by_kind_s.items()},
        "floor_by_kind_ms": {kind: _ms(floor[kind]) for kind in COSTED} if floor else None,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
