"""Chooses one token per row from the logits of a step.

Called by `ModelRunner` with the rows that reached their end. Per row, in this order: penalties, temperature, min-p,
top-k, top-p, then one uniform number (`noria.runner.philox`) picks the smallest id whose running sum of weights
exceeds it. Greedy rows take the highest score after penalties, lowest id on ties. A row's token is a function of
that row alone. Nothing is kept between calls, and the logits are not modified.

A batch of greedy rows costs one argmax. Rows that draw are processed one after another: a row of the vocabulary
fits into the CPU's cache, the matrix of all rows does not.

Not here: log-probabilities (`noria.runner.logprobs`), stop conditions (the scheduler's).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from noria.errors import EngineError
from noria.runner.executor import Float32Array
from noria.runner.filters import draw
from noria.runner.penalties import TokenCounts, penalised
from noria.runner.philox import uniforms
from noria.runner.row_params import RowParams
from noria.sampling import GREEDY_BELOW


def sample(
    logits: Float32Array,
    params: RowParams,
    output_positions: npt.NDArray[np.integer],
    token_counts: Sequence[TokenCounts | None],
    request_ids: Sequence[str],
) -> list[int]:
    """One token id per row of `logits` [rows, vocab_size].

    `output_positions` [rows] count the tokens each row has generated so far; `token_counts` is set for rows with
    penalties; `request_ids` only serve messages. Raises `EngineError` naming the requests when a row holds NaN or
    +inf or nothing but -inf: then the forward pass is broken, and no token of this step can be trusted.
    """
    best_ids = logits.argmax(axis=1)
    best = np.take_along_axis(logits, best_ids[:, None], axis=1)[:, 0]
    # argmax puts NaN above everything, so the chosen values tell of any in their rows.
    if not np.isfinite(best).all():
        bad = ", ".join(request_ids[row] for row in np.flatnonzero(~np.isfinite(best)).tolist())
        raise EngineError(f"the model returned unusable logits (NaN or infinite) for request {bad}")

    changed: dict[int, Float32Array] = {}
    for row, counts in enumerate(token_counts):
        if counts is not None:
            scores = changed[row] = penalised(logits[row], counts, params[row])
            best_ids[row] = scores.argmax()
            best[row] = scores[best_ids[row]]

    drawing = np.flatnonzero(params["temperature"] >= GREEDY_BELOW)
    if len(drawing):
        chosen = params[drawing]
        u = uniforms(chosen["seed"], output_positions[drawing], chosen["index"])
        with np.errstate(over="ignore"):  # scores far below the best become -inf: their weight is 0 either way
            for row, u_row, row_params in zip(drawing.tolist(), u.tolist(), chosen, strict=True):
                best_ids[row] = draw(changed.get(row, logits[row]), float(best[row]), u_row, row_params)
    return [int(token_id) for token_id in best_ids]
