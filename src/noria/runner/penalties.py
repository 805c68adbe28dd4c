"""Repetition, presence and frequency penalties: what a row has seen, and what that does to its scores.

`TokenCounts` is kept by the persistent batch for rows that have a penalty; the sampler applies it. It is a pure
function of the row's tokens: rebuilt when a row is admitted or resumed, updated by one entry per sampled token.
It holds the distinct tokens of one row, not a column per vocabulary entry: most of the vocabulary is never seen.

Definitions, as in Hugging Face transformers and vLLM: repetition first (over prompt and output: a positive score
is divided, a negative one multiplied), then frequency (per occurrence in the output) and presence (once, if in
the output) are subtracted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from noria.runner.executor import Float32Array, Int32Array
from noria.sampling import SamplingParams

_FLOAT32_MAX = float(np.finfo(np.float32).max)


def has_penalties(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


class TokenCounts:
    """The distinct tokens of one row in order of first appearance, and how often each is in the output."""

    def __init__(self, token_ids: Int32Array, num_prompt_tokens: int) -> None:
        self._place: dict[int, int] = {}
        self._token_ids = np.empty(64, dtype=np.int64)
        self._counts = np.empty(64, dtype=np.int64)
        for token_id in dict.fromkeys(token_ids[:num_prompt_tokens].tolist()):
            self._append(token_id)
        self.add_output(token_ids[num_prompt_tokens:].tolist())

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """[num_distinct]"""
        return self._token_ids[: len(self._place)]

    @property
    def output_counts(self) -> npt.NDArray[np.int64]:
        """[num_distinct]; 0 for tokens of the prompt alone."""
        return self._counts[: len(self._place)]

    def add_output(self, token_ids: Iterable[int]) -> None:
        """Counts tokens that were generated."""
        for token_id in token_ids:
            place = self._place.get(token_id)
            if place is None:
                place = self._append(token_id)
            self._counts[place] += 1

    def _append(self, token_id: int) -> int:
        place = len(self._place)
        if place == len(self._token_ids):
            self._token_ids = np.concatenate((self._token_ids, np.empty_like(self._token_ids)))
            self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
        self._place[token_id] = place
        self._token_ids[place] = token_id
        self._counts[place] = 0
        return place


def penalised(scores: Float32Array, counts: TokenCounts, params: Any) -> Float32Array:
    """A copy of one row's scores [vocab_size] with the penalties of `params` (a `ROW_PARAMS` record) applied."""
    result = scores.copy()
    seen = counts.token_ids
    values = scores[seen].astype(np.float64)
    repetition = float(params["repetition_penalty"])
    with np.errstate(over="ignore"):  # clipped below
        values = np.where(values > 0, values / repetition, values * repetition)
    values -= float(params["frequency_penalty"]) * counts.output_counts
    values -= float(params["presence_penalty"]) * (counts.output_counts > 0)
    # A penalty near 0 can push a score past float32; it must stay comparable, not become infinite.
    result[seen] = np.where(np.isneginf(values), values, np.clip(values, -_FLOAT32_MAX, _FLOAT32_MAX))
    return result
