"""Inverse frequencies for each scaling, against transformers' own; errors name the field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from noria.errors import ModelFileError, UnsupportedError
from noria.files.model import RopeConfig
from noria.ops.rope import inverse_frequencies

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

YARN = {"factor": 4.0, "beta_fast": 24.0, "beta_slow": 2.0, "original_max_position_embeddings": 8192, "truncate": True}


def theirs(head_dim: int, **rope: Any) -> np.ndarray:
    config = LlamaConfig(hidden_size=2 * head_dim, num_attention_heads=2, rope_parameters=rope)
    return LlamaRotaryEmbedding(config).inv_freq.numpy()


@pytest.mark.parametrize("head_dim", [64, 128, 80])
@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        (None, {}),
        ("linear", {"factor": 4.0}),
        ("llama3", LLAMA3),
        ("yarn", YARN),
        ("yarn", {**YARN, "truncate": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_frequencies_equal_transformers(
    head_dim: int, scaling: str | None, parameters: dict[str, Any], theta: float
) -> None:
    ours = inverse_frequencies(RopeConfig(theta=theta, scaling=scaling, parameters=parameters), head_dim)
    expected = theirs(head_dim, rope_type=scaling or "default", rope_theta=theta, **parameters)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_longrope_is_decided_by_the_longest_sequence() -> None:
    rope = RopeConfig(
        scaling="longrope",
        parameters={"original_max_position_embeddings": 100.0},
        short_factors=(1.0, 2.0),
        long_factors=(3.0, 4.0),
        attention_factor=1.5,
    )
    for length, factors in ((100, (1.0, 2.0)), (101, (3.0, 4.0))):
        expected = RopeConfig(scaling="factors", frequency_factors=factors, attention_factor=1.5)
        assert rope.at_length(length) == expected
    with pytest.raises(ValueError, match="chosen first"):
        inverse_frequencies(rope, 4)


def test_factors_divide() -> None:
    plain = inverse_frequencies(RopeConfig(), 8)
    scaled = inverse_frequencies(RopeConfig(scaling="factors", frequency_factors=(1.0, 2.0, 4.0, 8.0)), 8)
    np.testing.assert_array_equal(scaled, plain / np.array([1, 2, 4, 8], dtype=np.float32))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (RopeConfig(scaling="linear"), "linear needs a positive 'factor', found None"),
        (RopeConfig(scaling="linear", parameters={"factor": 0.0}), "linear needs a positive 'factor', found 0.0"),
        (RopeConfig(scaling="llama3", parameters={"factor": 8.0}), "needs a positive 'low_freq_factor'"),
        (RopeConfig(scaling="llama3", parameters={**LLAMA3, "low_freq_factor": 5.0}), "must be above"),
        (RopeConfig(scaling="factors", frequency_factors=(1.0,)), "needs 4 positive numbers"),
    ],
)
def test_bad_parameters(rope: RopeConfig, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        inverse_frequencies(rope, 8)


def test_unknown_scaling_lists_what_there_is() -> None:
    with pytest.raises(
        UnsupportedError, match="'ntk' is not supported; supported: none, linear, llama3, yarn, longrope"
    ):
        inverse_frequencies(RopeConfig(scaling="ntk"), 8)
    with pytest.raises(UnsupportedError, match="even number of dimensions, not 7"):
        inverse_frequencies(RopeConfig(), 7)
