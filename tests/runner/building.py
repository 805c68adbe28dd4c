"""Short ways to build plan entries and row parameters in tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from noria.core.plan import Admitted
from noria.runner.executor import Float32Array, Sampled, Sampler, SamplingBatch, StepConstraints
from noria.runner.row_params import ROW_PARAMS, RowParams, row_params
from noria.runner.sampler import NumpySampler
from noria.sampling import SamplingParams


def admitted(
    request_id: str = "r",
    tokens: Sequence[int] = (1,),
    *,
    blocks: Sequence[int] = (1,),
    prompt: int | None = None,
    computed: int = 0,
    seed: int = 0,
    index: int = 0,
    num_scored: int | None = None,
    stop_ids: Sequence[int] = (),
    **sampling: Any,
) -> Admitted:
    return Admitted(
        request_id=request_id,
        token_ids=tuple(tokens),
        num_prompt_tokens=len(tokens) if prompt is None else prompt,
        num_computed_tokens=computed,
        block_ids=tuple(blocks),
        sampling=SamplingParams(**sampling),
        seed=seed,
        index=index,
        num_scored=num_scored,
        stop_ids=tuple(stop_ids),
    )


def params_of(*rows: Admitted) -> RowParams:
    return np.array([row_params(row) for row in rows], dtype=ROW_PARAMS)


def sampling_batch(params: RowParams, tokens: Sequence[tuple[Sequence[int], Sequence[int]]]) -> SamplingBatch:
    """Rows that have these (prompt, output) tokens so far."""
    known = [[*prompt, *output] for prompt, output in tokens]
    table = np.zeros((len(known), max(1, *map(len, known))), dtype=np.int32)
    for row, ids in enumerate(known):
        table[row, : len(ids)] = ids
    return SamplingBatch(
        params=params,
        token_ids=table,
        rows=np.arange(len(known)),
        num_tokens=np.array([len(ids) for ids in known], dtype=np.int32),
        num_prompt_tokens=np.array([len(prompt) for prompt, _ in tokens], dtype=np.int32),
    )


def rows_of(batch: SamplingBatch, rows: Sequence[int]) -> SamplingBatch:
    """These rows of the batch, in this order; the table of tokens stays as it is."""
    picked = list(rows)
    return SamplingBatch(
        params=batch.params[picked],
        token_ids=batch.token_ids,
        rows=batch.rows[picked],
        num_tokens=batch.num_tokens[picked],
        num_prompt_tokens=batch.num_prompt_tokens[picked],
    )


def sample(
    logits: Float32Array,
    rows: Sequence[Admitted],
    tokens: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None,
    sampler: Sampler | None = None,
    constraints: StepConstraints | None = None,
) -> Sampled:
    """What the sampler (None: the reference) chooses for requests that have (prompt, output) tokens so far."""
    batch = sampling_batch(params_of(*rows), tokens if tokens is not None else [((0,), ())] * len(rows))
    return (sampler or NumpySampler()).sample(logits, dataclasses.replace(batch, constraints=constraints))


def no_biases(masks: npt.NDArray[np.uint32], mask_of_row: Sequence[int]) -> StepConstraints:
    """Masks alone."""
    return StepConstraints(
        masks=masks,
        mask_of_row=np.array(mask_of_row, dtype=np.int32),
        bias_start=np.zeros(len(mask_of_row) + 1, dtype=np.int32),
        bias_ids=np.zeros(0, dtype=np.int32),
        biases=np.zeros(0, dtype=np.float32),
    )
