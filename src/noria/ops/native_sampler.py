"""The native executor's sampler (csrc/sampling.cpp): all rows of a step in one call, on the executor's threads.

Chooses what `noria.runner.sampler` would, bit for bit; that one says what the parameters mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from noria.core.plan import TokenLogprobs
from noria.runner.executor import Float32Array, Int32Array, Sampled, SamplingBatch
from noria.runner.row_params import ROW_PARAMS, RowParams

if TYPE_CHECKING:
    from noria.ops._native import ExecutorBF16, ExecutorF32


class NativeSampler:
    """Implements `noria.runner.executor.Sampler` on the threads of `native`.

    Raises `ValueError` for a token, row, mask or bias that is not there.
    """

    def __init__(self, native: ExecutorBF16 | ExecutorF32) -> None:
        self._native = native

    def sample(self, logits: Float32Array, batch: SamplingBatch) -> Sampled:
        num_rows, constraints = len(batch.params), batch.constraints
        token_ids = np.empty(num_rows, dtype=np.int32)
        room = _LogprobRoom(batch.params, logits.shape[1])
        limits = () if constraints is None else (
            constraints.masks, constraints.mask_of_row, constraints.bias_start, constraints.bias_ids, constraints.biases
        )  # fmt: skip
        self._native.sample(
            logits,
            batch.params.view(np.uint8).reshape(num_rows, -1),
            batch.token_ids,
            batch.rows,
            batch.num_tokens,
            batch.num_prompt_tokens,
            token_ids,
            *room.arrays,
            *limits,
        )
        wanted = np.flatnonzero(batch.params["wants_logprobs"]).tolist()
        return Sampled(token_ids, {row: room.of(row, int(token_ids[row])) for row in wanted if token_ids[row] >= 0})

    def score(self, logits: Float32Array, token_ids: Int32Array, num_top: Int32Array) -> list[TokenLogprobs | None]:
        num_rows = len(logits)
        params = np.zeros(num_rows, dtype=ROW_PARAMS)
        params["repetition_penalty"] = 1  # nothing of a row's earlier tokens is looked at
        params["top_p"] = 1  # nothing is drawn, but the rows must be such that something could be
        params["wants_logprobs"] = True
        params["num_top_logprobs"] = num_top
        room = _LogprobRoom(params, logits.shape[1])
        nothing, found = np.zeros(num_rows, dtype=np.int32), token_ids.astype(np.int32)
        self._native.sample(
            np.ascontiguousarray(logits),
            params.view(np.uint8).reshape(num_rows, -1),
            np.zeros((1, 1), dtype=np.int32),
            np.zeros(num_rows, dtype=np.int64),
            nothing,
            nothing,
            found,
            *room.arrays,
            chosen_is_given=True,
        )
        return [room.of(row, token_id) if token_id >= 0 else None for row, token_id in enumerate(found.tolist())]


class _LogprobRoom:
    """Memory for the log-probabilities of some rows, which native code fills, and what it then holds."""

    def __init__(self, params: RowParams, vocab_size: int) -> None:
        self._num_top = np.minimum(params["num_top_logprobs"], vocab_size)
        self._logprobs = np.empty(len(params), dtype=np.float64)
        self._ranks = np.empty(len(params), dtype=np.int32)
        self._top_ids = np.empty((len(params), int(self._num_top.max())), dtype=np.int32)
        self._top_logprobs = np.empty(self._top_ids.shape, dtype=np.float64)
        self.arrays = (self._logprobs, self._ranks, self._top_ids, self._top_logprobs)

    def of(self, row: int, token_id: int) -> TokenLogprobs:
        count = self._num_top[row]
        top = zip(self._top_ids[row, :count].tolist(), self._top_logprobs[row, :count].tolist(), strict=True)
        return TokenLogprobs(token_id, float(self._logprobs[row]), int(self._ranks[row]), tuple(top))
