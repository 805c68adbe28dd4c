"""The native executor's sampler (csrc/sampling.cpp): all rows of a step in one call, on the executor's threads.

Chooses what `noria.runner.sampler` would, bit for bit; that one says what the parameters mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from noria.core.plan import TokenLogprobs
from noria.errors import EngineError
from noria.runner.executor import Float32Array, Int32Array, Sampled, SamplingBatch

if TYPE_CHECKING:
    from noria.ops._native import ExecutorBF16, ExecutorF32

NOTHING_ALLOWED = -2
"""In place of a token: the row's mask leaves nothing that could be drawn."""


class NativeSampler:
    """Implements `noria.runner.executor.Sampler` on the threads of `native`."""

    def __init__(self, native: ExecutorBF16 | ExecutorF32) -> None:
        self._native = native

    def sample(
        self,
        logits: Float32Array,
        batch: SamplingBatch,
        masks: npt.NDArray[np.uint32] | None = None,
        mask_of_row: Int32Array | None = None,
    ) -> Sampled:
        """See `Sampler.sample`.

        `masks` [num_masks, ceil(vocab_size / 32)] have bit i % 32 of word i // 32 set where token i is allowed;
        `mask_of_row` [num_logits] says which one a row has, -1 being none. Raises `EngineError` when a mask
        allows nothing, and `ValueError` for a token, row or mask that is not there.
        """
        params = batch.params
        num_rows = len(params)
        token_ids = np.empty(num_rows, dtype=np.int32)
        num_top = np.minimum(params["num_top_logprobs"], logits.shape[1])
        logprobs = np.empty(num_rows, dtype=np.float64)
        ranks = np.empty(num_rows, dtype=np.int32)
        top_ids = np.empty((num_rows, int(num_top.max())), dtype=np.int32)
        top_logprobs = np.empty(top_ids.shape, dtype=np.float64)
        self._native.sample(
            logits,
            params.view(np.uint8).reshape(num_rows, -1),
            batch.token_ids,
            batch.rows,
            batch.num_tokens,
            batch.num_prompt_tokens,
            token_ids,
            logprobs,
            ranks,
            top_ids,
            top_logprobs,
            masks,
            mask_of_row,
        )
        if masks is not None and (token_ids == NOTHING_ALLOWED).any():
            raise EngineError(f"masks allow nothing in rows {np.flatnonzero(token_ids == NOTHING_ALLOWED).tolist()}")
        return Sampled(
            token_ids,
            {
                row: TokenLogprobs(
                    token_id=int(token_ids[row]),
                    logprob=float(logprobs[row]),
                    rank=int(ranks[row]),
                    top=tuple(zip(top_ids[row, :count].tolist(), top_logprobs[row, :count].tolist(), strict=True)),
                )
                for row, count in ((row, num_top[row]) for row in np.flatnonzero(params["wants_logprobs"]).tolist())
                if token_ids[row] >= 0
            },
        )
