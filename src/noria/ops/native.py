"""The native CPU executor: the recorded program of a model, compiled once and run in one native call per step.

`NativeExecutor` implements `noria.runner.executor.Executor`; make one through `noria.ops.executors`. No torch.

Numerics. bfloat16: weights, KV and the inputs of products are bfloat16, everything else, sums included, is float32.
float32: all of it. Either way a row's result does not depend on its neighbours, on how its tokens are cut into steps,
or on where its blocks are: every sum has one order (csrc/gemm.h, csrc/attention.h).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from noria.errors import OptionError
from noria.files.model import ModelConfig, ModelFiles, RawTensor
from noria.kv_layout import group_layers
from noria.models import registry
from noria.ops.base import AttentionSpec
from noria.ops.lowering import GATES, Buffer, Lowered, Operation, lower
from noria.ops.native_sampler import NativeSampler
from noria.ops.record import record
from noria.runner.executor import Float32Array, ForwardBatch
from noria.weights.plan import Parameter, Source
from noria.weights.read import split_halves

if TYPE_CHECKING:
    from noria.ops._native import ExecutorBF16, ExecutorF32

INTERFACE = 1
"""What `_native.interface` must be: both count up when one wants something new of the other."""
KV_GROUP = 16
"""Block sizes are multiples of this many tokens."""
HEAD_STEP, MOST_HEAD_DIM = 16, 256
"""Heads have a multiple of the one many values, at most the other."""

_REPORTED_ELEMENTS = 2**22
"""Progress is told after so many weights: some milliseconds of work, which all threads share."""


class NativeExecutor:
    """Loads a model and runs it. Implements `Executor`.

    `dtype` is "float32" or "bfloat16". `threads`: of the executor's own pool (None: the cores this process may use).
    `use_amx`: bfloat16 products on AMX tiles (None: where the machine has them).
    `prefault_kv`: take the KV pool's memory from the system when it is allocated, not as it is used.
    `report(done, total)` is called while loading, in numbers of the matrices. Raises `OptionError` when this machine or
    build cannot do it, and `ModelError` for the model's faults.
    """

    free_device_bytes: int | None = None

    def __init__(
        self,
        model: ModelFiles,
        *,
        dtype: str,
        threads: int | None = None,
        use_amx: bool | None = None,
        prefault_kv: bool = False,
        report: Callable[[int, int], None] | None = None,
    ) -> None:
        if (why_not := why_unavailable(head_dim=model.config.head_dim)) is not None:
            raise OptionError(why_not)
        from noria.ops import _native as native

        architecture = registry.find(model.config.architecture)
        plan = architecture.plan(model)
        config = model.config
        constants = architecture.constants(config.at_length(None))
        shapes = plan.shapes | {name: value.shape for name, value in constants.items()}
        self.config: ModelConfig = config
        self._constants = architecture.constants
        self._prefault_kv = prefault_kv
        self.program = lower(record(architecture.forward, partial(architecture.bind, config), shapes, _NO_BATCH))
        self.itemsize = 4 if dtype == "float32" else 2
        """Bytes of one number of the weights, of KV, and of what products read."""
        make = native.ExecutorF32 if dtype == "float32" else native.ExecutorBF16
        self._native: ExecutorBF16 | ExecutorF32 = make(
            threads or num_cores(), native.has_amx_bf16() if use_amx is None else use_amx
        )
        parameters = {parameter.name: parameter for parameter in plan.parameters}
        builder = _Builder(self._native, model, parameters, constants, report)
        builder.build(self.program)
        self._vectors = builder.vectors
        specs = [op.attention for op in self.program.operations if op.attention is not None]
        self._groups = group_layers([model.config.window(layer) for layer in range(model.config.num_layers)])
        windows = [window or 0 for window in self._groups.windows]
        self._native.place_layers(list(self._groups.group_of), list(self._groups.array_of), windows)
        self._spec = specs[0]
        self.sampler = NativeSampler(self._native)

    @property
    def num_weight_bytes(self) -> int:
        return self._native.weight_bytes

    @property
    def kernel(self) -> str:
        """Which kernel multiplies matrices here: results are equal bit for bit where it is the same."""
        return self._native.kernel

    @property
    def num_threads(self) -> int:
        return self._native.threads

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self._groups.layers_per_group * self._spec.kv_size * self.itemsize

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        return self._groups.windows

    def set_max_model_len(self, max_model_len: int) -> None:
        for name, value in self._constants(self.config.at_length(max_model_len)).items():
            self._native.set_vector(self._vectors[name], value.tolist())

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        if (why_not := why_unavailable(block_size)) is not None:
            raise OptionError(why_not)
        try:
            self._native.allocate_kv(self._groups.layers_per_group, num_blocks, block_size, 0)
            if self._prefault_kv:
                self._native.touch_kv()
        except MemoryError as error:
            gib = num_blocks * block_size * self.kv_bytes_per_token / 2**30
            raise OptionError(
                f"a KV pool of {num_blocks} blocks ({gib:.1f} GiB) does not fit; lower num_kv_blocks or "
                "kv_cache_memory_bytes"
            ) from error

    def forward(self, batch: ForwardBatch) -> Float32Array:
        """The result is the executor's own memory, good until the next call."""
        slots, block_table = batch.slots, batch.block_table
        if batch.other_groups:
            slots = np.concatenate([group.slots for group in batch.groups])
            block_table = np.concatenate([group.block_table for group in batch.groups])
        arrays = (
            batch.token_ids, batch.positions, slots, batch.query_start, batch.context_len, block_table,
            batch.logit_tokens,
        )  # fmt: skip
        logits: Float32Array = self._native.forward(*(np.ascontiguousarray(a, dtype=np.int32) for a in arrays))
        return logits

    def forward_timed(self, batch: ForwardBatch) -> tuple[Float32Array, list[tuple[Operation, float]]]:
        """What `forward` returns, and how many seconds each operation took."""
        self._native.timed = True
        try:
            logits = self.forward(batch)
        finally:
            self._native.timed = False
        return logits, list(zip(self.program.operations, self._native.seconds, strict=True))

    def time_operations(self, batch: ForwardBatch) -> list[tuple[Operation, float]]:
        """Runs a batch and says how many seconds each operation took."""
        return self.forward_timed(batch)[1]


class _Builder:
    """Puts weights and operations into a native executor."""

    def __init__(
        self,
        native: ExecutorBF16 | ExecutorF32,
        model: ModelFiles,
        parameters: dict[str, Parameter],
        constants: dict[str, Float32Array],
        report: Callable[[int, int], None] | None,
    ) -> None:
        self._native = native
        self._model = model
        self._parameters = parameters
        self._constants = constants
        self._report = report
        self._done = 0
        self._total = sum(parameter.num_elements for parameter in parameters.values() if len(parameter.shape) == 2)
        self._matrices: dict[tuple[str, bool], int] = {}
        self.vectors: dict[str, int] = {}
        """Numbers of those that were put in, by name."""
        self._attentions: dict[AttentionSpec, int] = {}

    def build(self, lowered: Lowered) -> None:
        for width in lowered.widths["rows"]:
            self._native.add_rows(width)
        for width in lowered.widths["slabs"]:
            self._native.add_slabs(width)
        for op in lowered.operations:
            self._native.add_operation(
                op.kind,
                input=_number(op.input),
                table=_number(op.table),
                output=_number(op.output),
                weight=self._weight(op),
                layer=-1 if op.layer is None else op.layer,
                attention=self._attention(op.attention),
                q_norm=self._vector(op.q_norm),
                k_norm=self._vector(op.k_norm),
                epsilon=op.epsilon,
                factor=op.factor,
                soft_cap=op.soft_cap,
                epilogue=op.epilogue,
                selects=op.selects,
                on_logit_rows=op.on_logit_rows,
                label=str(op),
            )

    def _weight(self, op: Operation) -> int:
        if op.weight is not None and op.kind in ("embedding", "product"):
            return self._matrix(op.weight, op.bias, interleave=op.epilogue in GATES)
        return self._vector(op.weight)

    def _vector(self, name: str | None) -> int:
        if name is None:
            return -1
        if name not in self.vectors:
            self.vectors[name] = self._native.add_vector(self._read_vector(name).tolist())
        return self.vectors[name]

    def _matrix(self, name: str, bias: str | None, *, interleave: bool) -> int:
        key = (name, interleave)  # an embedding that is the head as well is packed once
        if key not in self._matrices:
            parameter = self._parameters[name]
            outputs, inputs = parameter.shape
            matrix = self._native.begin_matrix(outputs, inputs, interleave)
            row = 0
            for source in parameter.sources:
                self._fill(matrix, row, source, inputs)
                row += source.shape[0]
            if bias is not None:
                self._native.set_bias(matrix, self._read_vector(bias).tolist())
            self._matrices[key] = matrix
        return self._matrices[key]

    def _fill(self, matrix: int, first_row: int, source: Source, inputs: int) -> None:
        """Decodes and packs one tensor's rows, straight from the file, some at a time so that progress is seen."""
        raw = self._raw(source)
        num_rows, heads = source.shape[0], source.interleaved_heads or 0
        step = max(1, _REPORTED_ELEMENTS // inputs)
        for begin in range(0, num_rows, step):
            end = min(begin + step, num_rows)
            self._native.fill_matrix(matrix, first_row, raw.rows, raw.encoding, heads, begin, end)
            self._done += (end - begin) * inputs
            if self._report is not None:
                self._report(self._done, self._total)

    def _raw(self, source: Source) -> RawTensor:
        """A tensor in an encoding that native code reads: what it does not know is first decoded whole."""
        from noria.ops._native import encodings

        raw = self._model.raw(source.tensor)
        if raw.encoding in encodings():
            return raw
        values = np.ascontiguousarray(self._model.read(source.tensor).data, dtype=np.float32)
        return RawTensor(values.reshape(raw.rows.shape[0], -1).view(np.uint8), "F32")

    def _read_vector(self, name: str) -> Float32Array:
        from noria.ops._native import decode

        if name in self._constants:
            return self._constants[name]
        parts = []
        for source in self._parameters[name].sources:
            raw = self._raw(source)
            values = decode(raw.rows, raw.encoding).reshape(-1)
            heads = source.interleaved_heads
            values = values if heads is None else split_halves(values, heads)
            parts.append(values + np.float32(source.added) if source.added else values)
        return np.concatenate(parts)

    def _attention(self, spec: AttentionSpec | None) -> int:
        if spec is None:
            return -1
        if spec not in self._attentions:
            self._attentions[spec] = self._native.add_attention(
                spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale,
                window=spec.window, soft_cap=spec.soft_cap, rotary_dim=spec.rotary_dim,
            )  # fmt: skip
        return self._attentions[spec]


def _number(buffer: Buffer | None) -> int:
    return -1 if buffer is None else buffer.number


def why_unavailable(block_size: int = KV_GROUP, head_dim: int = HEAD_STEP) -> str | None:
    """What keeps this executor from running here, with what to do about it; None if nothing does. `head_dim`: values of
    a head of the model."""
    try:
        from noria.ops import _native
    except ImportError:
        return (
            "the native executor was not built when Noria was installed: it needs a C++17 compiler (g++ 12 or later) "
            "on x86-64; with one in place, install again"
        )
    if getattr(_native, "interface", None) != INTERFACE:
        return (
            "the native executor was built from other sources than these; install again (in a checkout: make install)"
        )
    if not _native.has_avx512_bf16():
        return "the native executor needs a CPU that has AVX-512 with BF16"
    if block_size % KV_GROUP:
        return f"the native executor needs a block_size that is a multiple of {KV_GROUP}, not {block_size}"
    if head_dim % HEAD_STEP or head_dim > MOST_HEAD_DIM:
        return (
            f"the native executor needs a model whose heads have a multiple of {HEAD_STEP} values, at most "
            f"{MOST_HEAD_DIM}, not {head_dim}"
        )
    return None


def num_cores() -> int:
    """Cores this process may use; not every system can say which those are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_EMPTY = np.zeros(0, dtype=np.int32)
_NO_BATCH = ForwardBatch(_EMPTY, _EMPTY, _EMPTY, _EMPTY, _EMPTY, np.zeros((0, 0), dtype=np.int32), _EMPTY)
"""Models do not look at it, so recording needs none."""
