"""An executor that is watched: `StepLog` notes the shape and the time of every step that runs on it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from noria.bench.floor import COSTED, KINDS, StepCosts, StepShape, kind_of
from noria.bench.machine import MachineWatch
from noria.bench.timeline import significant
from noria.ops.native import NativeExecutor
from noria.runner.executor import Executor, Float32Array, ForwardBatch, Sampler


class ExecutorWrapper:
    """An `Executor` that passes everything on to another; subclasses look at what goes by."""

    def __init__(self, executor: Executor) -> None:
        self.inner = executor

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        return self.inner.kv_windows

    @property
    def kv_bytes_per_token(self) -> int:
        return self.inner.kv_bytes_per_token

    @property
    def free_device_bytes(self) -> int | None:
        return self.inner.free_device_bytes

    @property
    def sampler(self) -> Sampler | None:
        return self.inner.sampler

    def set_max_model_len(self, max_model_len: int) -> None:
        self.inner.set_max_model_len(max_model_len)

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self.inner.allocate_kv(num_blocks, block_size)

    def forward(self, batch: ForwardBatch) -> Float32Array:
        return self.inner.forward(batch)


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step on the executor. `by_kind`: seconds by kind of operation, empty if these were not timed."""

    shape: StepShape
    seconds: float
    by_kind: dict[str, float]


class StepLog:
    """The steps of a run on the native executor, and how fast they could have been.

    `wrap` goes around the executor when the engine is built. `times_operations`: note the time of each kind of
    operation as well. Of another executor nothing is logged, since its program is not known.
    """

    def __init__(self, *, times_operations: bool = False) -> None:
        self.steps: list[LoggedStep] = []
        self.times_operations = times_operations
        self._costs: StepCosts | None = None
        self._dtype = ""

    def wrap(self, executor: Executor) -> Executor:
        if not isinstance(executor, NativeExecutor):
            return executor
        self._costs = StepCosts(executor.program, executor.itemsize)
        self._dtype = "float32" if executor.itemsize == 4 else "bfloat16"
        return _LoggedExecutor(executor, self)

    def floors(self, machine: MachineWatch, peak_tflops: float | None = None) -> list[dict[str, float]]:
        """Each step's floor in seconds by kind; none where the machine could not be measured. `peak_tflops` None: the
        best that was measured."""
        peak, bandwidth = peak_tflops or machine.peak_tflops(self._dtype), machine.read_gb_s
        if self._costs is None or peak is None or bandwidth is None:
            return []
        return [self._costs.floor_s([step.shape], peak * 1e12, bandwidth * 1e9) for step in self.steps]

    def summary(self, wall_s: float, machine: MachineWatch, peak_tflops: float | None = None) -> dict[str, Any]:
        """For a benchmark's JSON line; seconds. Null where there is nothing to say."""
        floors = self.floors(machine, peak_tflops)
        if not floors:
            return {"floor_s": None, "floor_ratio": None}
        floor_by_kind = {kind: sum(floor[kind] for floor in floors) for kind in COSTED}
        floor_s = sum(floor_by_kind.values())
        result: dict[str, Any] = {
            "floor_s": significant(floor_s),
            "floor_ratio": round(wall_s / floor_s, 3),
            "floor_by_kind_s": {kind: significant(seconds) for kind, seconds in floor_by_kind.items()},
            "executor_s": significant(sum(step.seconds for step in self.steps)),
        }
        if self.times_operations:
            spent = {kind: sum(step.by_kind.get(kind, 0.0) for step in self.steps) for kind in KINDS}
            result["by_kind_s"] = {kind: significant(seconds) for kind, seconds in spent.items()}
        return result


class _LoggedExecutor(ExecutorWrapper):
    def __init__(self, executor: NativeExecutor, log: StepLog) -> None:
        super().__init__(executor)
        self._native = executor
        self._log = log
        self._block_size = 0

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        super().allocate_kv(num_blocks, block_size)

    def forward(self, batch: ForwardBatch) -> Float32Array:
        by_kind: dict[str, float] = {}
        began_s = time.perf_counter()
        if self._log.times_operations:
            logits, times = self._native.forward_timed(batch)
            for op, seconds in times:
                by_kind[kind_of(op)] = by_kind.get(kind_of(op), 0.0) + seconds
        else:
            logits = self._native.forward(batch)
        took_s = time.perf_counter() - began_s
        self._log.steps.append(LoggedStep(StepShape.of(batch, self._block_size), took_s, by_kind))
        return logits
