"""Chooses one token per row from the logits of a step: the reference, in numpy.

Called by `ModelRunner` with the rows that reached their end, unless the executor has a sampler of its own
(csrc/sampling.cpp), whose results are these, bit for bit. Per row, in this order: biases, penalties, mask
(`noria.runner.constraints`), temperature, min-p, top-k, top-p, then one uniform number (`noria.runner.philox`) picks
the smallest id whose running sum of weights exceeds it. Greedy rows take the highest score after the mask, lowest id
on ties. A row's token is a function of that row alone. Nothing is kept between calls, and the logits are not modified.

A batch of greedy rows costs one argmax. Rows that draw are processed one after another: a row of the vocabulary
fits into the CPU's cache, the matrix of all rows does not.

Not here: stop conditions (the scheduler's).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from noria.core.plan import TokenLogprobs
from noria.runner.constraints import biased, masked
from noria.runner.executor import NOTHING_ALLOWED, UNUSABLE, Float32Array, Int32Array, Sampled, SamplingBatch
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

        changed = self._changed(logits, batch, usable)
        for row, scores in changed.items():
            token_ids[row] = scores.argmax()
            best[row] = scores[token_ids[row]]
        allowed = usable & np.isfinite(best) if batch.constraints is not None else usable

        drawing = np.flatnonzero(allowed & (params["temperature"] >= GREEDY_BELOW))
        chosen = params[drawing]
        u = uniforms(chosen["seed"], (batch.num_tokens - batch.num_prompt_tokens)[drawing], chosen["index"])
        for row, u_row, row_params in zip(drawing.tolist(), u.tolist(), chosen, strict=True):
            token_ids[row] = draw(changed.get(row, logits[row]), float(best[row]), u_row, row_params)

        token_ids[~allowed] = NOTHING_ALLOWED
        token_ids[~usable] = UNUSABLE
        logprobs = {
            row: token_logprobs(logits[row], int(token_ids[row]), int(params["num_top_logprobs"][row]))
            for row in np.flatnonzero(allowed & params["wants_logprobs"]).tolist()
        }
        return Sampled(token_ids, logprobs)

    @staticmethod
    def _changed(logits: Float32Array, batch: SamplingBatch, usable: npt.NDArray[np.bool_]) -> dict[int, Float32Array]:
        """The scores of rows that have biases, penalties or masks: copies, by row."""
        is_penalised, constraints = has_penalties(batch.params), batch.constraints
        touched = is_penalised
        if constraints is not None:
            touched = touched | (constraints.mask_of_row >= 0) | (np.diff(constraints.bias_start) > 0)
        changed: dict[int, Float32Array] = {}
        for row in np.flatnonzero(usable & touched).tolist():
            scores = logits[row] if constraints is None else biased(logits[row], row, constraints)
            if is_penalised[row]:
                tokens = batch.token_ids[batch.rows[row], : batch.num_tokens[row]]
                scores = penalised(scores, tokens, int(batch.num_prompt_tokens[row]), batch.params[row])
            changed[row] = scores if constraints is None else masked(scores, row, constraints)
        return changed

    def score(self, logits: Float32Array, token_ids: Int32Array, num_top: Int32Array) -> list[TokenLogprobs | None]:
        best = logits.max(axis=1)  # NaN where there is one
        return [
            token_logprobs(scores, token_id, count) if np.isfinite(value) else None
            for scores, token_id, count, value in zip(logits, token_ids.tolist(), num_top.tolist(), best, strict=True)
        ]
