"""Inverse frequencies of rotary position embeddings, for each supported scaling.

Called when weights are loaded; numpy only. It does not rotate anything: that is an op.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from noria.errors import ModelFileError, UnsupportedError
from noria.files.model import RopeConfig

Float32Array = npt.NDArray[np.float32]

SCALINGS = ("none", "linear", "llama3", "yarn", "longrope", "factors")


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> Float32Array:
    """Radians per position for each pair of dimensions: [rotary_dim / 2], float32.

    Raises `UnsupportedError` for an unknown scaling and `ModelFileError` for a missing or impossible parameter.
    """
    if rotary_dim % 2:
        raise UnsupportedError(f"rotary embedding needs an even number of dimensions, not {rotary_dim}")
    # float32 steps in this order, as transformers computes them: at position 8,000 the last bit is visible.
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    plain = np.float32(1.0) / np.power(np.float32(rope.theta), exponents)
    match rope.scaling:
        case None:
            scaled = plain
        case "linear":
            scaled = plain / np.float32(_parameter(rope, "factor"))
        case "llama3":
            scaled = _llama3(plain, rope)
        case "yarn":
            scaled = _yarn(plain, rope)
        case "factors":
            scaled = plain / _factors(rope, rotary_dim)
        case "longrope":
            raise ValueError("longrope's factors are chosen first: ModelConfig.at_length")
        case other:
            raise UnsupportedError(f"rope scaling {other!r} is not supported; supported: {', '.join(SCALINGS)}")
    return np.asarray(scaled, dtype=np.float32)


def _llama3(plain: Float32Array, rope: RopeConfig) -> Float32Array:
    """Long waves are stretched by `factor`, short ones kept; those between are blended by how often they fit."""
    factor = _parameter(rope, "factor")
    low = _parameter(rope, "low_freq_factor")
    high = _parameter(rope, "high_freq_factor")
    context = _parameter(rope, "original_max_position_embeddings")
    if high <= low:
        raise ModelFileError(f"rope scaling llama3: high_freq_factor {high} must be above low_freq_factor {low}")
    wavelengths = 2 * math.pi / plain
    blend = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)  # 0: long wave, 1: short wave
    return np.asarray((1 - blend) * plain / factor + blend * plain, dtype=np.float32)


def _yarn(plain: Float32Array, rope: RopeConfig) -> Float32Array:
    """Pairs that turn often enough within the original context are kept, those that hardly turn are stretched by
    `factor`; between the two the blend is linear in the number of the pair (Peng et al. 2023, section 3.2)."""
    factor = _parameter(rope, "factor")
    context = _parameter(rope, "original_max_position_embeddings")
    dimensions = 2 * len(plain)

    def pair_that_turns(times: float) -> float:
        return dimensions * math.log(context / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(_parameter(rope, "beta_fast")), pair_that_turns(_parameter(rope, "beta_slow"))
    if rope.parameters.get("truncate", 1.0):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dimensions - 1)
    pairs = np.arange(len(plain), dtype=np.float32)
    stretched = np.clip((pairs - np.float32(first)) / np.float32(max(last - first, 0.001)), 0.0, 1.0)
    return np.asarray(plain / np.float32(factor) * stretched + plain * (1 - stretched), dtype=np.float32)


def _factors(rope: RopeConfig, rotary_dim: int) -> Float32Array:
    factors = np.array(rope.frequency_factors, dtype=np.float32)
    if factors.shape != (rotary_dim // 2,) or not (factors > 0).all():
        raise ModelFileError(
            f"rope scaling factors: needs {rotary_dim // 2} positive numbers, found {factors.tolist()}"
        )
    return factors


def _parameter(rope: RopeConfig, name: str) -> float:
    value = rope.parameters.get(name)
    if value is None or not math.isfinite(value) or value <= 0:
        raise ModelFileError(f"rope scaling {rope.scaling} needs a positive {name!r}, found {value!r}")
    return float(value)
