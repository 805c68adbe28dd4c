"""A naive sampler to compare with: pure Python, float64, one row, written from the definitions alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from noria.sampling import SamplingParams


@dataclass
class Choice:
    """What may be drawn. `margin` is the distance of the nearest border, relative to the total weight."""

    weights: list[float]  # by token id; 0 outside
    margin: float

    @property
    def probabilities(self) -> list[float]:
        total = math.fsum(self.weights)
        return [w / total for w in self.weights]

    def pick(self, u: float) -> tuple[int, float]:
        """The token that `u` picks, and how far (relative to the total) u is from picking another one."""
        total = math.fsum(self.weights)
        running = 0.0
        for token_id, weight in enumerate(self.weights):
            if running + weight > u * total:
                return token_id, min(u * total - running, running + weight - u * total) / total
            running += weight
        raise AssertionError("u must be below 1")


def penalise(logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], p: SamplingParams) -> list[float]:
    scores = list(map(float, logits))
    for token_id in range(len(scores)):
        if token_id in prompt or token_id in output:
            if scores[token_id] > 0:
                scores[token_id] /= p.repetition_penalty
            else:
                scores[token_id] *= p.repetition_penalty
        occurrences = list(output).count(token_id)
        scores[token_id] -= p.frequency_penalty * occurrences
        if occurrences > 0:
            scores[token_id] -= p.presence_penalty
    return scores


def choose(scores: Sequence[float], p: SamplingParams) -> Choice:
    """Temperature, min-p, top-k, top-p, in this order, on scores after penalties."""
    best = max(scores)
    margin = 1.0
    falling = sorted(range(len(scores)), key=lambda token_id: (-scores[token_id], token_id))
    weight = {token_id: math.exp((scores[token_id] - best) / p.temperature) for token_id in falling}
    for w in weight.values():
        margin = min(margin, abs(w - p.min_p) if p.min_p > 0 else 1.0)
    kept = [token_id for token_id in falling if weight[token_id] >= p.min_p]
    if p.top_k > 0:
        kept = kept[: p.top_k]
    if p.top_p < 1:
        total = math.fsum(weight[token_id] for token_id in kept)
        before, inside = 0.0, []
        for token_id in kept:
            margin = min(margin, abs(before - p.top_p * total) / total)
            if before < p.top_p * total:
                inside.append(token_id)
            before += weight[token_id]
        kept = inside
    weights = [0.0] * len(scores)
    for token_id in kept:
        weights[token_id] = weight[token_id]
    return Choice(weights, margin)


def philox4x32_10(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """The published algorithm on Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def uniform(seed: int, position: int, index: int) -> float:
    words = philox4x32_10((position, index, 0, 0), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return float((words[0] << 32 | words[1]) >> 11) * 2.0**-53
