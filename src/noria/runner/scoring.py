"""Log-probabilities of prompt tokens: which positions' logits a step needs for them, and in what portions.

Used by `ModelRunner` in steps that have such a request; the others never come here. The token at position p + 1 is
judged by the logits of position p. Logits of a whole chunk of a prompt would be hundreds of megabytes, so its tokens
are run in portions, each a forward pass of its own: an executor's results do not depend on how a prompt is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from noria.core.plan import TokenLogprobs
from noria.runner.batch import PersistentBatch
from noria.runner.executor import Float32Array, Int32Array, Sampler

LOGITS_BYTES = 2**25
"""Of the logits that are wanted for prompt tokens in one forward pass (but one row of each prompt there always is)."""

_USUAL_VOCABULARY = 2**17
"""Where nobody has said how large it is."""

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Scored:
    """The positions of one forward pass whose logits judge prompt tokens: `length[i]` of row `rows[i]` of the batch,
    from position `first[i]` on, which is `offset[i]` tokens behind the first that the pass runs of it."""

    rows: Rows
    first: Int32Array
    offset: Int32Array
    length: Int32Array

    @property
    def total(self) -> int:
        return int(self.length.sum())

    def tokens(self, query_start: Int32Array) -> Int32Array:
        """Their places among the flattened tokens of the pass, whose rows begin at `query_start`."""
        return self._spread(query_start[:-1] + self.offset)

    def positions(self) -> Int32Array:
        return self._spread(self.first)

    def row_of_each(self) -> Rows:
        return np.repeat(self.rows, self.length)

    def _spread(self, begin: Int32Array) -> Int32Array:
        """begin[i], begin[i] + 1, ... for each i, `length[i]` of them."""
        before = np.cumsum(self.length) - self.length
        places: Int32Array = (np.arange(self.total) + np.repeat(begin - before, self.length)).astype(np.int32)
        return places


class PromptScores:
    """One step's log-probabilities of prompt tokens, portion by portion."""

    def __init__(self, batch: PersistentBatch, sampler: Sampler, request_ids: Sequence[str], rows: Rows) -> None:
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.unusable: list[str] = []
        """Requests for which the model returned logits that say nothing."""
        self._batch = batch
        self._sampler = sampler
        self._request_of_row = dict(zip(rows.tolist(), request_ids, strict=True))
        # Nobody's position is max_model_len: from there on nothing is scored.
        self._from = np.array([batch.scoring.get(r, batch.max_model_len) for r in request_ids], dtype=np.int32)
        self._rows = rows
        self._most = max(1, LOGITS_BYTES // (4 * (batch.vocab_size or _USUAL_VOCABULARY)))

    def scored(self, counts: Int32Array, only: int | None = None) -> Scored:
        """What a pass scores that runs the next `counts` tokens of each row; `only` one of them, by its place."""
        pick = slice(None) if only is None else slice(only, only + 1)
        rows = self._rows[pick]
        num_computed, last = self._batch.num_computed_tokens[rows], self._batch.num_prompt_tokens[rows] - 1
        first = np.maximum(num_computed, self._from[pick])
        length = np.maximum(np.minimum(num_computed + counts[pick], last) - first, 0)
        return Scored(rows, first, first - num_computed, length)

    def portions(self, counts: Int32Array) -> tuple[list[tuple[int, int]], Int32Array]:
        """Cuts a step: (place of the row, number of tokens) of each pass to be run before, in order; and the counts
        that are left, at least one for each row, to be run together."""
        scored, left = self.scored(counts), counts.copy()
        num_wanted = scored.total
        ahead: list[tuple[int, int]] = []
        for place in np.flatnonzero(scored.length).tolist():
            num_before, own = int(scored.offset[place]), int(scored.length[place])
            while num_wanted > self._most and own and left[place] > 1:
                num_tokens = min(num_before + self._most, int(left[place]) - 1)
                ahead.append((place, num_tokens))
                left[place] -= num_tokens
                num_told = min(max(num_tokens - num_before, 0), own)
                num_before = max(0, num_before - num_tokens)
                own -= num_told
                num_wanted -= num_told
        return ahead, left

    def take(self, logits: Float32Array, scored: Scored) -> None:
        """Notes what the logits [scored.total, vocab_size] say of the tokens behind the scored positions."""
        if not len(logits):
            return
        batch, rows = self._batch, scored.row_of_each()
        token_ids = batch.token_ids[rows, scored.positions() + 1]
        owners = [self._request_of_row[row] for row in rows.tolist()]
        num_top = np.array([batch.num_top_of[request_id] for request_id in owners], dtype=np.int32)
        for request_id, found in zip(owners, self._sampler.score(logits, token_ids, num_top), strict=True):
            if found is not None:
                self.logprobs.setdefault(request_id, []).append(found)
            elif request_id not in self.unusable:
                self.unusable.append(request_id)

    def results(self) -> dict[str, tuple[TokenLogprobs, ...]]:
        """By request; what is said of those that have failed is of no use to anybody, and does no harm."""
        return {request_id: tuple(found) for request_id, found in self.logprobs.items()}
