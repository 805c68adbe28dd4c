"""What the configurations of the architectures mean: older spellings, absent fields, and what GGUF files leave out."""

from __future__ import annotations

import math
from typing import Any

import pytest

from files.checkpoints import TINY_LLAMA_GGUF, TINY_LLAMA_JSON
from noria.errors import ModelError, ModelFileError, UnsupportedError
from noria.files.architectures import ARCHITECTURES
from noria.files.model import ModelConfig, RopeConfig
from noria.files.model_config import config_from_gguf, config_from_json

OF_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
FULL, SLIDING = "full_attention", "sliding_attention"


def from_json(name: str, without: tuple[str, ...] = (), **changes: Any) -> ModelConfig:
    named = {"architectures": [OF_NAME[name].hf_class], "model_type": OF_NAME[name].model_type}
    values = {key: value for key, value in (TINY_LLAMA_JSON | named).items() if key not in without}
    return config_from_json(values | changes, "config.json")


def from_gguf(name: str, fields: dict[str, Any] | None = None) -> ModelConfig:
    values = {key.replace("llama.", name + ".", 1): value for key, value in TINY_LLAMA_GGUF.items()}
    further = {f"{name}.{key}": value for key, value in (fields or {}).items()}
    return config_from_gguf({"general.architecture": name} | values | further, "m.gguf", num_embedding_rows=32)


def test_names_are_unique() -> None:
    for names in ([getattr(a, field) for a in ARCHITECTURES] for field in ("name", "hf_class", "model_type")):
        assert len(set(names)) == len(names)


def test_mistral_has_a_window_unless_the_file_says_null() -> None:
    assert from_json("mistral", sliding_window=8).layer_windows == (8, 8)
    assert from_json("mistral", sliding_window=None).layer_windows is None
    assert from_json("mistral").layer_windows == (4096, 4096)
    assert from_gguf("llama", fields={"attention.sliding_window": 8}).layer_windows == (8, 8)
    assert from_gguf("llama").layer_windows is None


def test_qwen_windows_are_off_unless_turned_on() -> None:
    for name in ("qwen2", "qwen3"):
        assert from_json(name, sliding_window=8, use_sliding_window=False).layer_windows is None
        turned_on = from_json(name, sliding_window=8, use_sliding_window=True, max_window_layers=1)
        assert turned_on.layer_windows == (None, 8)
    with pytest.raises(UnsupportedError, match=r"qwen3\.attention\.sliding_window 8 is not supported"):
        from_gguf("qwen3", fields={"attention.sliding_window": 8})
    assert from_json("qwen3").head_dim == 128  # transformers' default, whatever the hidden size


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layer_types": [SLIDING, FULL], "sliding_window": 8}, (8, None)),
        ({"sliding_window_pattern": 2, "sliding_window": 8}, (8, None)),
        ({"sliding_window": 8}, (8, 8)),  # every sixth layer has full attention, and there are two
        ({"layer_types": [FULL, FULL]}, None),
    ],
)
def test_gemma3_layers(changes: dict[str, Any], expected: tuple[int | None, ...] | None) -> None:
    assert from_json("gemma3", **changes).layer_windows == expected


def test_gemma3_ropes_in_old_and_new_spelling() -> None:
    local, scaled = RopeConfig(theta=7.0), RopeConfig(theta=9.0, scaling="linear", parameters={"factor": 8.0})
    old = {"rope_theta": 9.0, "rope_local_base_freq": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 9.0},
        SLIDING: {"rope_type": "default", "rope_theta": 7.0},
    }
    for config in (from_json("gemma3", **old), from_json("gemma3", rope_parameters=new)):
        assert (config.rope, config.local_rope) == (scaled, local)
    absent = from_json("gemma3", without=("rope_theta",))
    assert (absent.rope.theta, absent.local_rope) == (1e6, RopeConfig(theta=1e4))


def test_gemma_constants() -> None:
    config = from_json("gemma2", query_pre_attn_scalar=64)
    assert (config.attention_soft_cap, config.logits_soft_cap) == (50.0, 30.0)
    assert (config.attention_scale, config.embedding_scale) == (1 / 8, math.sqrt(16))
    assert (config.activation, config.head_dim) == ("gelu_tanh", 256)
    uncapped = from_json("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (uncapped.attention_soft_cap, uncapped.logits_soft_cap) == (None, None)
    with pytest.raises(UnsupportedError, match="hidden_activation 'gelu' is not supported"):
        from_json("gemma3", hidden_activation="gelu")
    with pytest.raises(UnsupportedError, match="use_bidirectional_attention"):
        from_json("gemma3", use_bidirectional_attention=True)


def test_gemma_in_gguf() -> None:
    window = {"attention.sliding_window": 8}
    layers = {"block_count": 7, **window}
    config = from_gguf("gemma3", fields=layers)
    assert config.layer_windows == (8, 8, 8, 8, 8, None, 8)
    assert (config.rope.theta, config.local_rope) == (1e6, RopeConfig(theta=1e4))
    scaled = from_gguf("gemma3", fields={"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, **layers})
    assert scaled.rope == RopeConfig(theta=1e6, scaling="linear", parameters={"factor": 8.0})
    assert scaled.local_rope == RopeConfig(theta=1e4)
    patterned = from_gguf("gemma3", fields={"attention.sliding_window_pattern": [False, True], **window})
    assert patterned.layer_windows == (None, 8)
    assert from_gguf("gemma2").layer_windows == (4096, None)
    # The largest models of each generation scale by hidden size / heads, the others by the size of a head.
    of_size = {"attention.key_length": 32, "attention.value_length": 32}
    for name, num_layers in (("gemma2", 46), ("gemma3", 62)):
        assert from_gguf(name, fields=of_size).attention_scale == 1 / math.sqrt(32)
        assert from_gguf(name, fields={"block_count": num_layers, **of_size}).attention_scale == 1 / math.sqrt(16)


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_phi3_longrope_has_had_other_names(kind: str) -> None:
    section = {"type": kind, "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    rope = from_json("phi3", rope_scaling=section, original_max_position_embeddings=32).rope
    assert (rope.scaling, rope.short_factors, rope.long_factors) == ("longrope", (1.0, 2.0), (3.0, 4.0))
    assert rope.parameters == {"original_max_position_embeddings": 32.0}
    assert rope.attention_factor == math.sqrt(1 + math.log(128 / 32) / math.log(32))


def test_phi3_rotates_a_part_of_a_head() -> None:
    assert from_json("phi3", partial_rotary_factor=0.5).rotary_dim == 2
    assert from_json("phi3").rotary_dim is None
    assert from_gguf("phi3", fields={"rope.dimension_count": 12}).rotary_dim == 12
    for wrong in (0.25, 0.75):
        with pytest.raises(ModelFileError, match="values of a head cannot be rotated in pairs"):
            from_json("phi3", partial_rotary_factor=wrong)


def test_smollm3_layers_without_rope() -> None:
    layers = {"num_hidden_layers": 5}
    assert from_json("smollm3", **layers).unrotated_layers == (3,)
    assert from_json("smollm3", no_rope_layer_interval=2, **layers).unrotated_layers == (1, 3)
    assert from_json("smollm3", no_rope_layers=[0, 1, 1, 1, 0], **layers).unrotated_layers == (0, 4)
    assert from_gguf("smollm3", fields={"block_count": 5}).unrotated_layers == (3,)
    with pytest.raises(ModelFileError, match="'no_rope_layers' should be a list of 5 zeros and ones"):
        from_json("smollm3", no_rope_layers=[1, 0], **layers)


def test_granite_multipliers() -> None:
    multipliers = {
        "embedding_multiplier": 12.0, "attention_multiplier": 0.5, "residual_multiplier": 0.25, "logits_scaling": 8.0,
    }  # fmt: skip
    scales = {"embedding_scale": 12.0, "attention.scale": 0.5, "residual_scale": 0.25, "logit_scale": 8.0}
    for config in (from_json("granite", **multipliers), from_gguf("granite", fields=scales)):
        found = (config.embedding_scale, config.attention_scale, config.residual_scale, config.logits_scale)
        assert found == (12.0, 0.5, 0.25, 0.125)
    assert from_json("granite").attention_scale == 1.0
    assert from_gguf("granite", fields={"logit_scale": 8.0}).attention_scale is None


@pytest.mark.parametrize(
    ("name", "changes", "kind", "message"),
    [
        ("gemma3", {"layer_types": [SLIDING]}, ModelFileError, "'layer_types' should be a list of 2 names"),
        (
            "gemma3",
            {"layer_types": [SLIDING, "chunked_attention"]},
            UnsupportedError,
            "full_attention, sliding_attention",
        ),
        ("qwen3", {"layer_types": [FULL, SLIDING]}, ModelFileError, "'sliding_window' should be a positive integer"),
        ("llama", {"layer_types": [FULL, SLIDING]}, UnsupportedError, "full_attention in every layer"),
        ("granite", {"num_local_experts": 4}, UnsupportedError, "models without experts"),
        ("qwen3", {"attention_bias": True}, UnsupportedError, "attention_bias"),
        ("phi3", {"partial_rotary_factor": 1.5}, ModelFileError, "'partial_rotary_factor' should be at most 1"),
    ],
)
def test_refusals(name: str, changes: dict[str, Any], kind: type[ModelError], message: str) -> None:
    with pytest.raises(kind) as caught:
        from_json(name, **changes)
    assert message in str(caught.value)
