"""Repetition, presence and frequency penalties: what a row has seen, and what that does to its scores.

Called by the sampler for rows that have a penalty. What was seen is counted from the row's tokens in every step:
nothing has to be kept, moved with the row or rebuilt.

Definitions, as in Hugging Face transformers and vLLM: repetition first (over prompt and output: a positive score
is divided, a negative one multiplied), then frequency (per occurrence in the output) and presence (once, if in
the output) are subtracted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from noria.runner.executor import Float32Array, Int32Array
from noria.runner.row_params import RowParams

_FLOAT32_MAX = float(np.finfo(np.float32).max)


def has_penalties(params: RowParams) -> npt.NDArray[np.bool_]:
    """Which rows of `params` have a penalty: [rows]."""
    result: npt.NDArray[np.bool_] = (
        (params["repetition_penalty"] != 1) | (params["presence_penalty"] != 0) | (params["frequency_penalty"] != 0)
    )
    return result


def penalised(scores: Float32Array, token_ids: Int32Array, num_prompt_tokens: int, params: Any) -> Float32Array:
    """A copy of one row's scores [vocab_size] with the penalties of `params` (a `ROW_PARAMS` record) applied.

    `token_ids` are the row's known tokens, of which the first `num_prompt_tokens` are the prompt's.
    """
    result = scores.copy()
    seen, places = np.unique(token_ids, return_inverse=True)
    output_counts = np.bincount(places[num_prompt_tokens:], minlength=len(seen))
    values = scores[seen].astype(np.float64)
    repetition = float(params["repetition_penalty"])
    with np.errstate(over="ignore"):  # clipped below
        values = np.where(values > 0, values / repetition, values * repetition)
    values -= float(params["frequency_penalty"]) * output_counts
    values -= float(params["presence_penalty"]) * (output_counts > 0)
    # A penalty near 0 can push a score past float32; it must stay comparable, not become infinite.
    result[seen] = np.where(np.isneginf(values), values, np.clip(values, -_FLOAT32_MAX, _FLOAT32_MAX))
    return result
