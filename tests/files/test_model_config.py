"""ModelConfig from both kinds of description: all spellings, and refusal of what would go wrong silently."""

from __future__ import annotations

import math
from typing import Any

import pytest

from files.checkpoints import TINY_LLAMA_GGUF, TINY_LLAMA_JSON
from noria.errors import ModelError, ModelFileError, UnsupportedError
from noria.files.model import ModelConfig, RopeConfig
from noria.files.model_config import config_from_gguf, config_from_json

YARN = {
    "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 32.0, "truncate": 1.0,
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ABSENT = object()


def from_json(**changes: Any) -> ModelConfig:
    values = {name: value for name, value in (TINY_LLAMA_JSON | changes).items() if value is not ABSENT}
    return config_from_json(values, "config.json")


def from_gguf(
    changes: dict[str, Any] | None = None, *, architecture: str = "llama", rows: int | None = 32, **more: Any
) -> ModelConfig:
    values = {"general.architecture": architecture} | TINY_LLAMA_GGUF | (changes or {})
    values = {name.replace("llama.", architecture + ".", 1): v for name, v in values.items() if v is not ABSENT}
    return config_from_gguf(values, "m.gguf", num_embedding_rows=rows, **more)


def test_json_fields() -> None:
    assert from_json(tie_word_embeddings=True) == ModelConfig(
        architecture="llama", vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=4, rms_norm_eps=1e-5, max_position_embeddings=128, rope=RopeConfig(theta=50_000.0),
        tie_word_embeddings=True,
    )  # fmt: skip
    assert from_json(head_dim=32).head_dim == 32
    assert from_json(head_dim=None).head_dim == 4
    assert from_json(num_key_value_heads=ABSENT).num_kv_heads == 4
    assert from_json(tie_word_embeddings=ABSENT).tie_word_embeddings is None
    assert from_json(hidden_act="silu", attention_bias=False, sliding_window=4096, use_sliding_window=False)


def test_gguf_fields() -> None:
    assert from_gguf() == ModelConfig(
        architecture="llama", vocab_size=32, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5, max_position_embeddings=128, rope=RopeConfig(),
    )  # fmt: skip
    assert from_gguf(architecture="qwen2").architecture == "qwen2"
    assert from_gguf({"llama.rope.freq_base": 1e6}).rope.theta == 1e6
    assert from_gguf({"llama.attention.head_count_kv": ABSENT}).num_kv_heads == 4
    lengths = {
        f"llama.{name}": 32 for name in ("attention.key_length", "attention.value_length", "rope.dimension_count")
    }
    assert from_gguf(lengths).head_dim == 32


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": ABSENT}, "llama"),
        ({"architectures": None, "model_type": "llama"}, "llama"),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "qwen2"),
    ],
)
def test_architecture(names: dict[str, Any], expected: str) -> None:
    assert from_json(**names).architecture == expected


@pytest.mark.parametrize(
    "names",
    [
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": ["LlamaForCausalLM"], "model_type": "qwen2"},
        {"architectures": [], "model_type": "gpt2"},
    ],
)
def test_other_architectures_are_unsupported(names: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"supported are llama \(LlamaForCausalLM\), qwen2"):
        from_json(**names)


def test_other_gguf_architectures_are_unsupported() -> None:
    """Mistral is among them: its GGUF files say llama."""
    for architecture in ("gemma", "mistral", "qwen3moe"):
        with pytest.raises(UnsupportedError, match=rf"'{architecture}' is not supported; supported are llama, qwen2"):
            from_gguf(architecture=architecture)


ROPE = [
    ({}, RopeConfig(theta=50_000.0)),
    ({"rope_theta": ABSENT}, RopeConfig(theta=10_000.0)),
    ({"rope_scaling": None}, RopeConfig(theta=50_000.0)),
    (
        {"rope_scaling": {"type": "linear", "factor": 2}},
        RopeConfig(theta=50_000.0, scaling="linear", parameters={"factor": 2.0}),
    ),
    (
        {"rope_scaling": {"rope_type": "llama3"} | LLAMA3},
        RopeConfig(theta=50_000.0, scaling="llama3", parameters=LLAMA3),
    ),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": ABSENT}, RopeConfig(theta=7.0)),
    ({"rope_parameters": {"rope_theta": 7.0}}, RopeConfig(theta=7.0)),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 7.0}, "rope_theta": ABSENT},
        RopeConfig(theta=7.0, scaling="linear", parameters={"factor": 4.0}),
    ),
    (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0} | LLAMA3},
        RopeConfig(theta=7.0, scaling="llama3", parameters=LLAMA3),
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        RopeConfig(theta=50_000.0, scaling="yarn", parameters=YARN, attention_factor=0.1 * math.log(4) + 1),
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                          "beta_fast": 8, "beta_slow": 2, "truncate": False, "attention_factor": 0.5}},
        RopeConfig(theta=50_000.0, scaling="yarn", attention_factor=0.5,
                   parameters=YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": 0.0}),
    ),
    (  # DeepSeek's: of two magnitudes the quotient
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                          "mscale": 2.0, "mscale_all_dim": 1.0}},
        RopeConfig(theta=50_000.0, scaling="yarn", parameters=YARN,
                   attention_factor=(0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
    ),
    (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 2], "long_factor": [3, 4],
                          "original_max_position_embeddings": 32}},
        RopeConfig(theta=50_000.0, scaling="longrope", parameters={"original_max_position_embeddings": 32.0},
                   short_factors=(1.0, 2.0), long_factors=(3.0, 4.0),
                   attention_factor=math.sqrt(1 + math.log(4) / math.log(32))),
    ),
    (  # transformers' fallback for the original length is the model's own
        {"rope_scaling": {"rope_type": "llama3"} | LLAMA3 | {"original_max_position_embeddings": None}},
        RopeConfig(theta=50_000.0, scaling="llama3", parameters=LLAMA3 | {"original_max_position_embeddings": 128.0}),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), ROPE)
def test_rope_spellings(changes: dict[str, Any], expected: RopeConfig) -> None:
    assert from_json(**changes).rope == expected


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (
            {"rope_scaling": {"type": "proportional", "factor": 2.0}},
            "type 'proportional' is not supported; supported: none (default), linear",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type 'dynamic' is not supported: its frequencies follow the length of the text, but keys in the",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu, swish, gelu_pytorch_tanh"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_local_experts": 8}, "num_local_experts"),
    ],
)
def test_json_that_would_go_wrong_is_unsupported(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        from_json(**changes)
    assert field in str(caught.value)
    assert "config.json" in str(caught.value)


REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps",
    "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("value", [ABSENT, None, 0, -1, "12", [3], True, float("nan"), float("inf")])
def test_json_field_missing_or_wrong(name: str, value: Any) -> None:
    with pytest.raises(ModelFileError, match=rf"config\.json: field '{name}'"):
        from_json(**{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 2**70}, "field 'vocab_size' should be a positive integer"),
        ({"hidden_size": 18}, "hidden_size 18 is not a multiple of num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot be shared evenly by 3 KV heads"),
        ({"head_dim": 5}, "a head of 5 values is odd"),
        ({"architectures": "LlamaForCausalLM"}, "field 'architectures' should be a list"),
        ({"architectures": ABSENT, "model_type": ABSENT}, "field 'architectures' is missing"),
        ({"rope_scaling": "linear"}, "field 'rope_scaling' should be an object"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: field 'factor' is missing"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "rope_scaling: field 'low_freq_factor' is missing"),
        ({"rope_scaling": {"type": "llama3"} | LLAMA3 | {"low_freq_factor": 4.0}}, "below high_freq_factor"),
        ({"rope_scaling": {"type": 3}}, "field 'type' should be a string"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 2.0]}},
            "list of short factors has 1 values; a head of 4 needs 2",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0, 0.0]}},
            "field 'short_factor' should be a list of",
        ),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0, 2.0]}}, "field 'long_factor' is missing"),
        ({"tie_word_embeddings": "yes"}, "field 'tie_word_embeddings' should be true or false"),
    ],
)
def test_json_that_contradicts_itself(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        from_json(**changes)
    assert message in str(caught.value)


def test_gguf_rope() -> None:
    linear = RopeConfig(scaling="linear", parameters={"factor": 4.0})
    assert from_gguf({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}).rope == linear
    assert from_gguf({"llama.rope.scaling.factor": 4.0}).rope == linear
    assert from_gguf({"llama.rope.scale_linear": 4.0}).rope == linear
    assert from_gguf({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}).rope == RopeConfig()
    assert from_gguf({"llama.rope.scaling.factor": 0.0}).rope == RopeConfig()
    factors = tuple(float(i + 1) for i in range(8))
    llama3 = RopeConfig(scaling="factors", frequency_factors=factors)
    assert from_gguf(rope_factors={"rope_freqs.weight": factors}).rope == llama3
    with pytest.raises(ModelFileError, match=r"'rope_freqs\.weight' has 7 values; a head of 16 needs 8"):
        from_gguf(rope_factors={"rope_freqs.weight": factors[:7]})
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    assert from_gguf({f"llama.rope.scaling.{name}": value for name, value in yarn.items()}).rope == RopeConfig(
        scaling="yarn", parameters=YARN, attention_factor=0.1 * math.log(4) + 1
    )


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"llama.rope.scaling.type": "ntk"}, UnsupportedError, "llama.rope.scaling.type 'ntk' is not supported"),
        (
            {"llama.rope.scaling.type": "longrope"},
            UnsupportedError,
            "longrope without tensor 'rope_factors_long.weight'",
        ),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 0.1},
            UnsupportedError,
            "yarn_log_multiplier",
        ),
        ({"llama.rope.scaling.attn_factor": 1.2}, UnsupportedError, "attn_factor"),
        ({"llama.attention.sliding_window": -1}, ModelFileError, "llama.attention.sliding_window"),
        ({"llama.expert_count": 8}, UnsupportedError, "llama.expert_count"),
        ({"llama.attention.head_count_kv": [2, 1]}, UnsupportedError, "differs per layer"),
        ({"llama.rope.dimension_count": 8}, UnsupportedError, "the size of a head, 16"),
        ({"llama.attention.value_length": 8}, UnsupportedError, "llama.attention.value_length"),
        ({"general.type": "adapter"}, UnsupportedError, "general.type 'adapter'"),
        ({"llama.block_count": ABSENT}, ModelFileError, "m.gguf: field 'llama.block_count' is missing"),
        (
            {"llama.embedding_length": "64"},
            ModelFileError,
            "field 'llama.embedding_length' should be a positive integer",
        ),
        (
            {"llama.vocab_size": 31},
            ModelFileError,
            "'token_embd.weight' has 32 rows, but field 'llama.vocab_size' says 31",
        ),
        ({"general.architecture": 3}, ModelFileError, "field 'general.architecture' should be a string"),
    ],
)
def test_gguf_refusals(changes: dict[str, Any], kind: type[ModelError], message: str) -> None:
    with pytest.raises(kind) as caught:
        from_gguf(changes)
    assert message in str(caught.value)


def test_gguf_without_an_embedding() -> None:
    with pytest.raises(ModelFileError, match=r"tensor 'token_embd\.weight' is missing"):
        from_gguf(rows=None)
