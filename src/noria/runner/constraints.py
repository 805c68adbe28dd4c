"""Biases and masks: what a request adds to the scores of some tokens, and which tokens it may not have next.

A row has `Constraints` only if its request asks for some (logit_bias, allowed_token_ids, bad_words, min_tokens); the
persistent batch keeps them. For each step, `step_constraints` makes arrays of them that the samplers read, this one
(`noria.runner.sampler`) and csrc/sampling.cpp. A row without constraints has no part in any of this.

A mask depends on the request and its output alone, and nothing of it is kept from step to step: a request that is
preempted and resumed has the same ones again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from noria.core.plan import Admitted
from noria.errors import EngineError
from noria.runner.executor import Float32Array, Int32Array, StepConstraints

Mask = npt.NDArray[np.uint32]
"""[ceil(vocab_size / 32)]; bit i % 32 of word i // 32 is set where token i is allowed."""


class Constraints:
    """Those of one request. Made by `constraints_of`."""

    def __init__(self, admitted: Admitted) -> None:
        sampling = admitted.sampling
        self.bias_ids: Int32Array = np.array(list(sampling.logit_bias), dtype=np.int32)
        self.biases: Float32Array = np.array(list(sampling.logit_bias.values()), dtype=np.float32)
        self._allowed = sampling.allowed_token_ids
        self._min_tokens = sampling.min_tokens
        self._stop_ids = admitted.stop_ids
        self._always_bad = [word[0] for word in sampling.bad_words if len(word) == 1]
        self._bad_behind: dict[int, dict[tuple[int, ...], list[int]]] = {}
        """By length, then by the tokens themselves: what may not follow them."""
        for word in sampling.bad_words:
            if len(word) > 1:
                self._bad_behind.setdefault(len(word) - 1, {}).setdefault(word[:-1], []).append(word[-1])
        self._lasting: Mask | None = None  # of what is forbidden at every position; made when first needed

    def mask(self, output: Int32Array, vocab_size: int) -> Mask | None:
        """What may follow `output`, the tokens generated so far; None if everything may."""
        passing = self._forbidden_now(output)
        if self._allowed is None and not self._always_bad and not passing:
            return None
        if self._lasting is None:
            self._lasting = self._lasting_mask(vocab_size)
        if not passing:
            return self._lasting
        mask = self._lasting.copy()
        _forbid(mask, passing)
        return mask

    def _forbidden_now(self, output: Int32Array) -> list[int]:
        forbidden = list(self._stop_ids) if len(output) < self._min_tokens else []
        for length, bad_behind in self._bad_behind.items():
            if length <= len(output):
                forbidden += bad_behind.get(tuple(output[len(output) - length :].tolist()), ())
        return forbidden

    def _lasting_mask(self, vocab_size: int) -> Mask:
        num_words = -(-vocab_size // 32)
        if self._allowed is None:
            mask = np.full(num_words, 2**32 - 1, dtype=np.uint32)
        else:
            mask = np.zeros(num_words, dtype=np.uint32)
            ids = np.array(self._allowed, dtype=np.int64)
            np.bitwise_or.at(mask, ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))
        _forbid(mask, self._always_bad)
        return mask


def constraints_of(admitted: Admitted, vocab_size: int | None) -> Constraints | None:
    """Those of a request; None if it has none. Raises `EngineError` for a token id outside the vocabulary."""
    sampling = admitted.sampling
    is_free = sampling.allowed_token_ids is None and not (
        sampling.logit_bias or sampling.bad_words or admitted.stop_ids
    )
    if is_free:
        return None
    named = [*(token_id for _, ids in sampling.all_token_ids() for token_id in ids), *admitted.stop_ids]
    if vocab_size is not None and max(named) >= vocab_size:
        raise EngineError(f"request {admitted.request_id} names token id {max(named)}, outside 0 .. {vocab_size - 1}")
    return Constraints(admitted)


def step_constraints(
    of_row: Sequence[Constraints | None], outputs: Sequence[Int32Array], vocab_size: int
) -> StepConstraints:
    """The arrays of one step: the constraints of each row that samples, and what it has generated so far."""
    masks: list[Mask] = []
    mask_of_row = np.full(len(of_row), -1, dtype=np.int32)
    bias_start = np.zeros(len(of_row) + 1, dtype=np.int32)
    for row, (constraints, output) in enumerate(zip(of_row, outputs, strict=True)):
        bias_start[row + 1] = bias_start[row]
        if constraints is None:
            continue
        bias_start[row + 1] += len(constraints.bias_ids)
        mask = constraints.mask(output, vocab_size)
        if mask is not None:
            mask_of_row[row] = len(masks)
            masks.append(mask)
    constrained = [constraints for constraints in of_row if constraints is not None]
    return StepConstraints(
        masks=np.stack(masks) if masks else np.zeros((0, -(-vocab_size // 32)), dtype=np.uint32),
        mask_of_row=mask_of_row,
        bias_start=bias_start,
        bias_ids=np.concatenate([c.bias_ids for c in constrained] or [np.zeros(0, dtype=np.int32)]),
        biases=np.concatenate([c.biases for c in constrained] or [np.zeros(0, dtype=np.float32)]),
    )


def biased(scores: Float32Array, row: int, constraints: StepConstraints) -> Float32Array:
    """A copy of a row's scores [vocab_size] with its biases added, in float32."""
    result = scores.copy()
    begin, end = constraints.bias_start[row : row + 2]
    result[constraints.bias_ids[begin:end]] += constraints.biases[begin:end]  # a token has one bias at most
    return result


def masked(scores: Float32Array, row: int, constraints: StepConstraints) -> Float32Array:
    """A row's scores [vocab_size], -inf where its mask forbids; a copy, unless it has no mask."""
    if (number := constraints.mask_of_row[row]) < 0:
        return scores
    bits = np.unpackbits(constraints.masks[number].view(np.uint8), count=len(scores), bitorder="little")
    return np.where(bits != 0, scores, np.float32(-np.inf))


def _forbid(mask: Mask, token_ids: Sequence[int]) -> None:
    ids = np.array(token_ids, dtype=np.int64)
    np.bitwise_and.at(mask, ids // 32, ~np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))
