"""What a runner needs from the things that compute: `Executor` and `Sampler`, and the arrays that they are given.

Implemented by `noria.ops.reference.TorchExecutor` and `noria.ops.native.NativeExecutor`, `noria.runner.sampler` and
`noria.ops.native_sampler`. No torch here: an executor takes and returns numpy arrays, and keeps weights and the KV pool
to itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from noria.core.plan import TokenLogprobs
from noria.runner.row_params import RowParams

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Where one group of layers has its KV in a step; see `noria.kv_layout` for groups."""

    slots: Int32Array  # [num_tokens]
    block_table: Int32Array  # [num_rows, max_blocks]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's input: the scheduled tokens of all rows, flattened, row after row.

    Row r owns tokens `query_start[r] : query_start[r + 1]`; they are the last ones of its `context_len[r]`
    tokens, so the token at offset i has position `context_len[r] - (query_len - i)`.

    `slots` and `block_table` are those of the first group of layers; models of one kind of layers have no other.
    """

    token_ids: Int32Array  # [num_tokens]
    positions: Int32Array  # [num_tokens]
    slots: Int32Array  # [num_tokens]; block id * block_size + offset: where each token's KV is written
    query_start: Int32Array  # [num_rows + 1]
    context_len: Int32Array  # [num_rows]; tokens of KV that exist once this step's are written
    block_table: Int32Array  # [num_rows, max_blocks]; entries past a row's context, and before its window, are 0
    logit_tokens: Int32Array  # [num_logits]; indices into the flattened tokens whose logits are wanted
    other_groups: tuple[GroupBlocks, ...] = ()  # of the second group, the third, ...

    @property
    def groups(self) -> tuple[GroupBlocks, ...]:
        return (GroupBlocks(self.slots, self.block_table), *self.other_groups)

    def spread(self, num_groups: int, block_size: int) -> ForwardBatch:
        """The same batch for a model of several groups, by whoever deals out blocks for one: block b becomes blocks
        (b - 1) * num_groups + 1 .. b * num_groups of a pool so many times as large, one for each group."""
        block, offset = np.divmod(self.slots, block_size)

        def dealt(blocks: Int32Array, group: int) -> Int32Array:
            return np.where(blocks > 0, (blocks - 1) * num_groups + 1 + group, 0).astype(np.int32)

        first, *others = [
            GroupBlocks(dealt(block, group) * block_size + offset, dealt(self.block_table, group))
            for group in range(num_groups)
        ]
        return replace(self, slots=first.slots, block_table=first.block_table, other_groups=tuple(others))


@dataclass(frozen=True, slots=True)
class StepConstraints:
    """Masks and biases of the rows that sample; see `noria.runner.constraints`."""

    masks: npt.NDArray[np.uint32]  # [num_masks, ceil(vocab_size / 32)]; bit i % 32 of word i // 32: token i is allowed
    mask_of_row: Int32Array  # [num_logits]; -1: all is allowed
    bias_start: Int32Array  # [num_logits + 1]; row r has biases bias_start[r] : bias_start[r + 1]
    bias_ids: Int32Array  # [num_biases]; a row names a token once
    biases: Float32Array  # [num_biases]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows of a step that sample, in the order of their logits. Arrays are [num_logits] but for `token_ids`."""

    params: RowParams
    token_ids: Int32Array  # [max_rows, max_model_len]; the known tokens of all rows, prompt first
    rows: npt.NDArray[np.intp]  # which of them are whose
    num_tokens: Int32Array
    num_prompt_tokens: Int32Array
    constraints: StepConstraints | None = None  # None where no row has any


UNUSABLE = -1
"""In place of a token: the row's logits have NaN, +inf or nothing but -inf."""


NOTHING_ALLOWED = -2
"""In place of a token: the row's mask leaves nothing that could be drawn."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for each row of logits, or `UNUSABLE` or `NOTHING_ALLOWED`; log-probabilities, by row, for those that
    want them."""

    token_ids: Int32Array  # [num_logits]
    logprobs: dict[int, TokenLogprobs]


class Sampler(Protocol):
    """Chooses tokens. A row's token and log-probabilities depend on that row alone; see `noria.runner.sampler`."""

    def sample(self, logits: Float32Array, batch: SamplingBatch) -> Sampled:
        """`logits` are [num_logits, vocab_size], as `Executor.forward` returned them; they are not changed."""

    def score(self, logits: Float32Array, token_ids: Int32Array, num_top: Int32Array) -> list[TokenLogprobs | None]:
        """What each row of `logits` [rows, vocab_size] says about a given token, with `num_top` alternatives; None
        where the row is unusable. All other arrays are [rows]."""


class Executor(Protocol):
    """Runs the model. Block ids are 1 .. num_blocks; block 0 is the null block, allocated too and never read."""

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each group of layers, None for full attention: see `noria.kv_layout`."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Of one token's keys and values in one block: of the layers of one group."""

    @property
    def free_device_bytes(self) -> int | None:
        """What is free where the KV pool will be, after the weights; None if that is the host's memory."""

    @property
    def sampler(self) -> Sampler | None:
        """What samples best from its logits; None if that is `noria.runner.sampler.NumpySampler`."""

    def set_max_model_len(self, max_model_len: int) -> None:
        """Makes the choices that depend on the longest sequence, in tokens, that will be run. Called before a pool is
        allocated: they hold for all KV in it. Without a call they are those of the model's own context."""

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Allocates (lazily committed) room for `num_blocks` blocks and the null block."""

    def forward(self, batch: ForwardBatch) -> Float32Array:
        """Writes the KV of all tokens, attends, and returns logits [num_logits, vocab_size] in float32."""
