"""The reference executor: the op set in plain torch, one op at a time, on CPU or CUDA, in float32 or bfloat16.

`TorchExecutor` implements `noria.runner.executor.Executor`; make one through `noria.ops.executors`. It is what other
executors are tested against, and the only serving code that imports torch. It is written to be obviously right and
not wasteful; it is not the fast path, it does not fuse, and its products may differ in the last bits with the number
of rows, because torch's do.

Numerics. float32: every op in float32, in transformers' order where the order shows. bfloat16: weights, KV and products
are bfloat16; the residual stream, norms, rotation and the output head compute in float32. Measured on 674 positions of
text, SmolLM2-135M, mean KL to float32 and share of equal top tokens: transformers' bfloat16 0.00124, 0.975; with
our float32 residual stream 0.00066, 0.982; with float32 scores as well 0.00029, 0.993.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from noria.config import DTYPES
from noria.errors import EngineError, OptionError
from noria.files.model import HostTensor, ModelConfig, ModelFiles
from noria.kv_layout import LayerGroups, group_layers
from noria.models import registry
from noria.ops.base import AttentionSpec, Linear
from noria.ops.tiles import TileGroup, plan_tiles
from noria.runner.executor import Float32Array, ForwardBatch, Sampler
from noria.weights.plan import Parameter, WeightPlan
from noria.weights.read import read_sources

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_GROUP_KEYS = {"cpu": 4_096, "cuda": 131_072}
"""Keys gathered at a time: what stays in a core's cache; what keeps a GPU busy."""

_HEAD_ROWS = 2_048
"""Rows of the output head that are multiplied at a time."""


@dataclass(frozen=True, slots=True)
class TorchTileGroup:
    """Attention tiles of one padded shape (`noria.ops.tiles.TileGroup`) on the device."""

    tokens: torch.Tensor  # [tiles * queries]
    head_blocks: torch.Tensor  # [tiles * kv_heads * blocks]; index into a pool's (block, head) pairs
    mask: torch.Tensor  # [tiles, 1, queries, keys]; 0 where a query sees a key, else -inf; each query sees one at least


@dataclass(frozen=True, slots=True)
class TorchTiles:
    """A step's attention, cut for one window."""

    groups: tuple[TorchTileGroup, ...]
    restore: torch.Tensor | None  # [tokens], or None when the groups' queries are in order already


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """One step's batch on the device: what `B` is for `TorchOps`."""

    token_ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens], float32
    head_slots: tuple[torch.Tensor, ...]  # of each group [tokens * kv_heads]; index into (block, head, offset) triples
    begun_blocks: tuple[torch.Tensor, ...]  # of each group [n]; blocks whose first slot is written in this step
    logit_tokens: torch.Tensor  # [logits]
    source: ForwardBatch
    tiles: dict[tuple[int, int | None], TorchTiles]  # by group and window; made when the first such layer needs it


class TorchOps:
    """`Ops[torch.Tensor, TorchBatch]` over a paged KV pool.

    `dtype` is that of linear weights, KV and products; residual stream, norms, rotation and scores are float32.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        # For each layer of a group: [num_blocks + 1, kv_heads, block_size, head_dim]. Heads before offsets: gathering
        # (block, head) pairs gives each head's keys as one dense matrix.
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._num_kv_heads = 0
        self._block_size = 0
        self._places = group_layers([None])

    def allocate_kv(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        groups: LayerGroups | None = None,
    ) -> None:
        """Allocates the pool without touching it. Only the null block is cleared: see `rotary_and_write_kv`.

        `groups`: how the layers share it; None for one group of all.
        """
        self._places = group_layers([None] * num_layers) if groups is None else groups
        shape = (num_blocks + 1, num_kv_heads, block_size, head_dim)
        self._keys, self._values = [], []  # an earlier pool goes first
        for _ in range(self._places.layers_per_group):
            for pools in (self._keys, self._values):
                pools.append(torch.empty(shape, dtype=self._dtype, device=self._device))
                pools[-1][0] = 0
        self._num_kv_heads, self._block_size = num_kv_heads, block_size

    def batch(self, batch: ForwardBatch) -> TorchBatch:
        """Moves a batch to the device, once for all layers."""
        if len(batch.groups) != len(self._places.windows):
            raise EngineError(f"the batch has {len(batch.groups)} block tables for {len(self._places.windows)} groups")
        heads = np.arange(self._num_kv_heads)
        head_slots, begun_blocks = [], []
        for group in batch.groups:
            block, offset = np.divmod(group.slots.astype(np.int64), self._block_size)
            of_heads = (block[:, None] * self._num_kv_heads + heads) * self._block_size + offset[:, None]
            head_slots.append(self._tensor(of_heads.ravel()))
            begun_blocks.append(self._tensor(block[offset == 0]))
        return TorchBatch(
            token_ids=self._tensor(batch.token_ids),
            positions=self._tensor(batch.positions.astype(np.float32)),
            head_slots=tuple(head_slots),
            begun_blocks=tuple(begun_blocks),
            logit_tokens=self._tensor(batch.logit_tokens.astype(np.int64)),
            source=batch,
            tiles={},
        )

    def _tiles(self, batch: TorchBatch, group: int, window: int | None) -> TorchTiles:
        """A group's attention in tiles, cut once for all of its layers of that window."""
        if (group, window) not in batch.tiles:
            table = batch.source.groups[group].block_table
            source = replace(batch.source, block_table=table, other_groups=())
            plan = plan_tiles(source, self._block_size, _GROUP_KEYS[self._device.type], window)
            in_order = np.array_equal(plan.restore, np.arange(sum(group.tokens.size for group in plan.groups)))
            batch.tiles[group, window] = TorchTiles(
                groups=tuple(self._group(tiles, window) for tiles in plan.groups),
                restore=None if in_order else self._tensor(plan.restore),
            )
        return batch.tiles[group, window]

    def _group(self, group: TileGroup, window: int | None) -> TorchTileGroup:
        heads = np.arange(self._num_kv_heads)[:, None]
        keys = group.first_key[:, None] + np.arange(group.blocks.shape[1] * self._block_size)
        behind = group.positions[:, None, :, None] - keys[:, None, None, :]  # how far: the query's own key 0
        hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
        return TorchTileGroup(
            tokens=self._tensor(group.tokens.ravel()),
            head_blocks=self._tensor((group.blocks[:, None, :] * self._num_kv_heads + heads).ravel()),
            mask=self._tensor(np.where(hidden, np.float32(-np.inf), np.float32(0))).to(self._dtype),
        )

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.require(array, requirements=["C", "W"])).to(self._device)

    # The op set, in the order of `noria.ops.base.Ops`, which says what each does.

    def embedding(self, weight: torch.Tensor, batch: TorchBatch) -> torch.Tensor:
        return F.embedding(batch.token_ids, weight).float()

    def linear(self, x: torch.Tensor, linear: Linear[torch.Tensor]) -> torch.Tensor:
        return F.linear(x.to(self._dtype), linear.weight, linear.bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def rotary_table(
        self, inverse_frequencies: torch.Tensor, batch: TorchBatch, *, factor: float = 1.0
    ) -> torch.Tensor:
        angles = torch.outer(batch.positions, inverse_frequencies)
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * factor

    def rotary_and_write_kv(
        self,
        qkv: torch.Tensor,
        table: torch.Tensor | None,
        layer: int,
        spec: AttentionSpec,
        batch: TorchBatch,
        *,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        rotated_heads = spec.num_heads + spec.num_kv_heads
        heads = qkv.view(qkv.shape[0], -1, spec.head_dim)  # [tokens, heads + 2 kv_heads, head_dim]
        q, k = heads[:, : spec.num_heads].float(), heads[:, spec.num_heads : rotated_heads].float()
        q = q if q_norm is None else self.rms_norm(q, q_norm, eps)
        k = k if k_norm is None else self.rms_norm(k, k_norm, eps)
        rotated = _rotated(torch.cat((q, k), dim=1), table).to(self._dtype)
        # A padded key has no weight in attention, but 0 * NaN is NaN: what an unwritten slot holds must be finite. So
        # a block is cleared when its first slot is written, and all that anybody reads is the row's own or zero.
        keys, values = rotated[:, spec.num_heads :], heads[:, rotated_heads:]
        group, array = self._places.group_of[layer], self._places.array_of[layer]
        for pool, new in ((self._keys[array], keys), (self._values[array], values)):
            pool.index_fill_(0, batch.begun_blocks[group], 0)
            pool.flatten(0, 2).index_copy_(0, batch.head_slots[group], new.flatten(0, 1))
        return rotated[:, : spec.num_heads].flatten(1)

    def paged_attention(self, q: torch.Tensor, layer: int, spec: AttentionSpec, batch: TorchBatch) -> torch.Tensor:
        tiles = self._tiles(batch, self._places.group_of[layer], spec.window)
        results = [self._attend(q, group, layer, spec) for group in tiles.groups]
        result = results[0] if len(results) == 1 else torch.cat(results)
        return result if tiles.restore is None else result.index_select(0, tiles.restore)

    def _attend(self, q: torch.Tensor, group: TorchTileGroup, layer: int, spec: AttentionSpec) -> torch.Tensor:
        """Attention of one group: [tiles * queries, heads * head_dim]."""
        tiles, _, queries, keys = group.mask.shape
        kv_heads, shared = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
        # Query heads that share a key/value head become further queries of it: [tiles, kv_heads, shared * queries, d].
        folded = q.index_select(0, group.tokens).view(tiles, queries, kv_heads, shared, spec.head_dim)
        folded = folded.permute(0, 2, 3, 1, 4).reshape(tiles, kv_heads, shared * queries, spec.head_dim)
        k, v = (
            pool[self._places.array_of[layer]]
            .flatten(0, 1)
            .index_select(0, group.head_blocks)
            .view(tiles, kv_heads, keys, spec.head_dim)
            for pool in (self._keys, self._values)
        )
        mask = group.mask  # of a decode it serves all heads as it is
        if queries > 1:
            mask = mask.expand(tiles, shared, queries, keys).reshape(tiles, 1, shared * queries, keys)
        if spec.soft_cap is None:
            attended = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=spec.scale)
        else:
            scores = self.soft_cap((folded @ k.transpose(-1, -2)).float() * spec.scale, spec.soft_cap)
            attended = torch.softmax(scores + mask, dim=-1).to(self._dtype) @ v
        unfolded = attended.view(tiles, kv_heads, shared, queries, spec.head_dim).permute(0, 3, 1, 2, 4)
        return unfolded.reshape(tiles * queries, spec.q_size)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return torch.tanh(x / cap) * cap

    def select(self, x: torch.Tensor, batch: TorchBatch) -> torch.Tensor:
        return x.index_select(0, batch.logit_tokens)

    def logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # A bfloat16 product would round the scores to 8 bits: ties at the top, and most of the distance from the
        # float32 model. So slices of the head that fit a cache are widened on the way.
        x = x.float()
        result = x.new_empty((x.shape[0], weight.shape[0]))
        for start in range(0, weight.shape[0], _HEAD_ROWS):
            rows = slice(start, start + _HEAD_ROWS)
            torch.mm(x, weight[rows].float().T, out=result[:, rows])
        return result


class TorchExecutor:
    """Loads a model and runs it op by op. Implements `Executor`.

    `dtype` is "float32" or "bfloat16"; `device` as torch names it. `threads` sets torch's intra-op threads for the
    whole process (None: the cores this process may use). `report(done, total)` is called while loading, in bytes of
    weights. Raises `OptionError` for a dtype or device that cannot be had, and `ModelError` for the model's faults.
    """

    sampler: Sampler | None = None

    def __init__(
        self,
        model: ModelFiles,
        *,
        dtype: str,
        device: str = "cpu",
        threads: int | None = None,
        report: Callable[[int, int], None] | None = None,
    ) -> None:
        self._dtype = _dtype(dtype)
        self._device = _device(device)
        torch.set_num_threads(threads or _num_cores())
        architecture = registry.find(model.config.architecture)
        plan = architecture.plan(model)
        self._config = model.config
        self._constants = architecture.constants
        self._parameters = self._load(model, plan, self._constants(self._config.at_length(None)), report)
        self._forward = architecture.forward
        self._model = architecture.bind(self._config, self._parameters)
        self._ops = TorchOps(self._dtype, self._device)
        self._groups = group_layers([model.config.window(layer) for layer in range(model.config.num_layers)])

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of weights on the device."""
        return sum(parameter.nbytes for parameter in self._parameters.values())

    @property
    def kv_bytes_per_token(self) -> int:
        config = self._config
        return 2 * self._groups.layers_per_group * config.num_kv_heads * config.head_dim * self._dtype.itemsize

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        return self._groups.windows

    @property
    def free_device_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else None

    def set_max_model_len(self, max_model_len: int) -> None:
        for name, value in self._constants(self._config.at_length(max_model_len)).items():
            self._parameters[name].copy_(torch.from_numpy(value))

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Raises `OptionError` when the device does not have the memory."""
        config = self._config
        try:
            self._ops.allocate_kv(
                config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim, self._groups
            )
        except RuntimeError as error:  # torch has no narrower type for it on the CPU
            gib = num_blocks * block_size * self.kv_bytes_per_token / 2**30
            raise OptionError(
                f"a KV pool of {num_blocks} blocks ({gib:.1f} GiB) does not fit on device {self._device}; "
                "lower num_kv_blocks or kv_cache_memory_bytes"
            ) from error

    def forward(self, batch: ForwardBatch) -> Float32Array:
        with torch.inference_mode():
            outputs = self._forward(self._ops, self._model, self._ops.batch(batch))
            logits: Float32Array = outputs.logits.cpu().numpy()
        return logits

    def _load(
        self,
        model: ModelFiles,
        plan: WeightPlan,
        constants: dict[str, Float32Array],
        report: Callable[[int, int], None] | None,
    ) -> dict[str, torch.Tensor]:
        loaded = {name: torch.from_numpy(value).to(self._device) for name, value in constants.items()}
        total = sum(parameter.num_elements * self._parameter_dtype(parameter).itemsize for parameter in plan.parameters)
        done = 0
        for parameter in plan.parameters:
            tensor = _read(model, parameter, self._parameter_dtype(parameter)).to(self._device)
            loaded[parameter.name] = tensor
            done += tensor.nbytes
            if report is not None:
                report(done, total)
        return loaded

    def _parameter_dtype(self, parameter: Parameter) -> torch.dtype:
        """Norms keep the precision of the float32 stream they act on; what goes into products has theirs."""
        return torch.float32 if parameter.name.endswith("norm.weight") else self._dtype


def _rotated(heads: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    """Heads [tokens, heads, head_dim], of each the first dimensions rotated, as many as the table is wide."""
    if table is None:
        return heads
    cos, sin = table.unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, rotary_dim / 2]
    turned, kept = heads[..., : table.shape[1]], heads[..., table.shape[1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, kept), dim=-1)


def _read(model: ModelFiles, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
    """One parameter on the host, filled source by source: at most one source is held beside it."""
    result = torch.empty(parameter.shape, dtype=dtype)
    row = 0
    for source in read_sources(model, parameter):
        rows = source.data.shape[0]
        result[row : row + rows] = _host_tensor(source)
        row += rows
    return result


def _host_tensor(source: HostTensor) -> torch.Tensor:
    data = np.require(source.data, requirements=["C", "W"])  # a mapped file is read-only, which torch warns about
    if source.dtype == "bfloat16":
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(data)


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise OptionError(f"dtype {name!r} is not supported; use one of {', '.join(DTYPES)}")
    return _DTYPES[name]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"device {name!r} is not one torch knows; use cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"device {name!r} is not supported; use cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise OptionError(f"device {name!r}: this torch sees no CUDA device; use cpu, or install torch with CUDA")
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise OptionError(f"device {name!r}: torch sees {torch.cuda.device_count()} CUDA devices, counted from 0")
    return device


def _num_cores() -> int:
    """Cores this process may use; not every system can say which those are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
