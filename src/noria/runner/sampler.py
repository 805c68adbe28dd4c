"""Chooses one token per row from the logits of a step: the reference, in numpy.

Called by `ModelRunner` with the rows that reached their end, unless the executor has a sampler of its own
(csrc/sampling.cpp), whose results are these, bit for bit. Per row, in this order: penalties, temperature, min-p,
top-k, top-p, then one uniform number (`noria.runner.philox`) picks the smallest id whose running sum of weights
exceeds it. Greedy rows take the highest score after penalties, lowest id on ties. A row's token is a function of
that row alone. Nothing is kept between calls, and the logits are not modified.

A batch of greedy rows costs one argmax. Rows that draw are processed one after another: a row of the vocabulary
fits into the CPU's cache, the matrix of all rows does not.

Not here: stop conditions (the scheduler's).
"""

from __future__ import annotations

import numpy as np

from noria.runner.executor import UNUSABLE, Float32Array, Sampled, SamplingBatch
from noria.runner.filters import draw
from noria.runner.logprobs import token_logprobs
from noria.runner.penalties import has_penalties, penalised
from noria.runner.philox import uniforms
from noria.sampling import GREEDY_BELOW


class NumpySampler:
    """Implements `noria.runner.executor.Sampler`."""

    def sample(self, logits: Float32Array, batch: SamplingBatch) -> Sampled:
        params = batch.params
        token_ids = logits.argmax(axis=1).astype(np.int32)
        best = np.take_along_axis(logits, token_ids[:, None], axis=1)[:, 0]
        # argmax puts NaN above everything, so the chosen values tell of any in their rows.
        usable = np.isfinite(best)

        changed: dict[int, Float32Array] = {}
        for row in np.flatnonzero(usable & has_penalties(params)).tolist():
            tokens = batch.token_ids[batch.rows[row], : batch.num_tokens[row]]
            scores = penalised(logits[row], tokens, int(batch.num_prompt_tokens[row]), params[row])
            changed[row] = scores
            token_ids[row] = scores.argmax()
            best[row] = scores[token_ids[row]]

        drawing = np.flatnonzero(usable & (params["temperature"] >= GREEDY_BELOW))
        chosen = params[drawing]
        u = uniforms(chosen["seed"], (batch.num_tokens - batch.num_prompt_tokens)[drawing], chosen["index"])
        for row, u_row, row_params in zip(drawing.tolist(), u.tolist(), chosen, strict=True):
            token_ids[row] = draw(changed.get(row, logits[row]), float(best[row]), u_row, row_params)

        token_ids[~usable] = UNUSABLE
        logprobs = {
            row: token_logprobs(logits[row], int(token_ids[row]), int(params["num_top_logprobs"][row]))
            for row in np.flatnonzero(usable & params["wants_logprobs"]).tolist()
        }
        return Sampled(token_ids, logprobs)
