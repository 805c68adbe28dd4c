"""Weights of tokens from their scores: an exponential that comes out the same, bit for bit, wherever it is computed.

Called by the sampler and for log-probabilities; csrc/sampling.cpp does the same operations in the same order. Weights
are whole numbers in float32, scaled so that those of a whole vocabulary add up to less than 2**53: then every sum of
weights is exact in float64, in any order. What this rounds away is below half a unit per token: for 49,152 tokens
4e-12 of the heaviest token's weight, for 262,143 ones 1.5e-11.
"""

from __future__ import annotations

import numpy as np

from noria.runner.executor import Float32Array

_LOWEST = np.float32(-80)
_LOG2_E = np.float32(1.44269504088896341)
_LN_2 = (np.float32(0.693359375), np.float32(-2.12194440e-4))
"""ln 2 in two parts; the first has so few bits that its products with small whole numbers are exact."""
_POLYNOMIAL = tuple(
    map(
        np.float32,
        (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
    )
)
"""(exp(r) - 1 - r) / r**2 for r within half of ln 2 around 0, highest power first; the Cephes library's."""

_ONE = np.float32(1)
_CHUNK = 8192
"""Numbers that stay in the cache through all the passes over them."""


def weight_scale(vocab_size: int) -> float:
    """The weight of the best token: the power of two that keeps `vocab_size` of them below 2**53."""
    return 2.0 ** (53 - vocab_size.bit_length())


def token_weights(scores: Float32Array, best: float, temperature: float, min_p: float, scale: float) -> Float32Array:
    """exp((score - best) / temperature) x `scale`, rounded to whole numbers: [n] for `scores` [n], none above `best`.

    0 where the exponential is below `min_p` or below e**-80. It is exact for the best token, and within two units in
    the last place of float32 elsewhere.
    """
    weights = np.empty(len(scores), dtype=np.float32)
    with np.errstate(over="ignore"):  # scores far below the best become -inf: their weight is 0 either way
        for start in range(0, len(scores), _CHUNK):
            end = start + _CHUNK
            x = (scores[start:end] - np.float32(best)) / np.float32(temperature)
            _exponential(x, weights[start:end])
    weights[weights < np.float32(min_p)] = 0
    weights *= np.float32(scale)
    np.rint(weights, out=weights)
    return weights


def _exponential(x: Float32Array, result: Float32Array) -> None:
    """Writes e**x [n] for x <= 0; overwrites x."""
    is_tiny = x < _LOWEST
    np.maximum(x, _LOWEST, out=x)
    n = x * _LOG2_E
    np.rint(n, out=n)
    np.multiply(n, _LN_2[0], out=result)
    x -= result
    np.multiply(n, _LN_2[1], out=result)
    x -= result
    np.multiply(x, _POLYNOMIAL[0], out=result)
    result += _POLYNOMIAL[1]
    for coefficient in _POLYNOMIAL[2:]:
        result *= x
        result += coefficient
    result *= x
    result *= x
    x += _ONE
    result += x
    exponents = n.astype(np.int32)
    exponents <<= 23
    bits = result.view(np.int32)
    bits += exponents  # times 2**n
    result[is_tiny] = 0
