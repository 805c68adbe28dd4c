"""`ModelConfig` from a Hugging Face `config.json` (`config_from_json`) or from GGUF metadata (`config_from_gguf`).

Called by `noria.files.huggingface` and `noria.files.gguf`. Whatever the model code would silently get wrong (sliding
windows, other activations, partial rotary embedding, experts, unknown rope scaling) is refused here, with a list of
what is supported. Not here: whether the tensors fit the configuration (`noria.weights`), and which ids end a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from noria.errors import ModelFileError, UnsupportedError
from noria.files.fields import Fields
from noria.files.model import ModelConfig, RopeConfig

_ARCHITECTURES: Final = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
"""Hugging Face class names to ours; ours are also Hugging Face's `model_type` and GGUF's `general.architecture`."""

_SUPPORTED_NAMES: Final = "llama (LlamaForCausalLM), qwen2 (Qwen2ForCausalLM)"
_SUPPORTED_ROPE: Final = "none (default), linear, llama3"
_DEFAULT_THETA: Final = 10_000.0


def config_from_json(values: Mapping[str, Any], source: str) -> ModelConfig:
    """The configuration in a parsed `config.json`; `source` names the file in errors.

    Reads what transformers 4 and 5 write. Raises ModelFileError (a field is missing or wrong) and UnsupportedError.
    """
    fields = Fields(values, source)
    architecture = _json_architecture(fields)
    _refuse_unsupported_json(fields, architecture)
    hidden_size = fields.positive_int("hidden_size")
    num_heads = fields.positive_int("num_attention_heads")
    head_dim = (
        fields.positive_int("head_dim")
        if fields.get("head_dim") is not None
        else _derived_head_dim(fields, hidden_size, num_heads, "hidden_size", "num_attention_heads")
    )
    max_positions = fields.positive_int("max_position_embeddings")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size"),
        num_layers=fields.positive_int("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.positive_int("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.positive_float("rms_norm_eps"),
        max_position_embeddings=max_positions,
        rope=_json_rope(fields, max_positions),
        tie_word_embeddings=fields.optional_flag("tie_word_embeddings"),
    )
    return _checked(config, source)


def config_from_gguf(
    metadata: Mapping[str, Any],
    source: str,
    *,
    num_embedding_rows: int | None,
    frequency_factors: tuple[float, ...] | None = None,
) -> ModelConfig:
    """The configuration in GGUF metadata.

    `num_embedding_rows` is the first size of `token_embd.weight` (None: no such tensor); `frequency_factors` the values
    of `rope_freqs.weight` if there is one (llama3 rope scaling, worked out by the converter). Raises ModelFileError and
    UnsupportedError.
    """
    fields = Fields(metadata, source)
    architecture = fields.text("general.architecture")
    if architecture not in _ARCHITECTURES.values():
        raise UnsupportedError(
            f"{source}: architecture {architecture!r} is not supported; supported are {_SUPPORTED_NAMES}"
        )
    if num_embedding_rows is None:
        raise ModelFileError(f"{source}: tensor 'token_embd.weight' is missing")
    prefix = architecture + "."
    _refuse_unsupported_gguf(fields, prefix)
    hidden_size = fields.positive_int(prefix + "embedding_length")
    num_heads = fields.positive_int(prefix + "attention.head_count")
    max_positions = fields.positive_int(prefix + "context_length")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive_int(prefix + "vocab_size", num_embedding_rows),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int(prefix + "feed_forward_length"),
        num_layers=fields.positive_int(prefix + "block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.positive_int(prefix + "attention.head_count_kv", num_heads),
        head_dim=_gguf_head_dim(fields, prefix, hidden_size, num_heads),
        rms_norm_eps=fields.positive_float(prefix + "attention.layer_norm_rms_epsilon"),
        max_position_embeddings=max_positions,
        rope=_gguf_rope(fields, prefix, frequency_factors),
    )
    if config.vocab_size != num_embedding_rows:
        raise ModelFileError(
            f"{source}: tensor 'token_embd.weight' has {num_embedding_rows} rows, but field '{prefix}vocab_size' says "
            f"{config.vocab_size}"
        )
    return _checked(config, source)


def _checked(config: ModelConfig, source: str) -> ModelConfig:
    """What must hold in any format: heads share KV heads evenly, and rotary embedding pairs up a head's values."""
    if config.num_heads % config.num_kv_heads:
        raise ModelFileError(
            f"{source}: {config.num_heads} attention heads cannot be shared evenly by {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 2:
        raise ModelFileError(f"{source}: a head of {config.head_dim} values is odd; rotary embedding needs pairs")
    factors = config.rope.frequency_factors
    if config.rope.scaling == "factors" and len(factors) != config.head_dim // 2:
        raise ModelFileError(
            f"{source}: tensor 'rope_freqs.weight' has {len(factors)} values; a head of {config.head_dim} needs "
            f"{config.head_dim // 2}"
        )
    return config


def _derived_head_dim(fields: Fields, hidden_size: int, num_heads: int, size_name: str, heads_name: str) -> int:
    if hidden_size % num_heads:
        raise ModelFileError(
            f"{fields.source}: {size_name} {hidden_size} is not a multiple of {heads_name} {num_heads}, "
            "and no head size is given"
        )
    return hidden_size // num_heads


# Hugging Face


def _json_architecture(fields: Fields) -> str:
    """By class name if the file gives one, else by `model_type`; they must agree when both are there."""
    classes = fields.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise fields.wrong("architectures", "a list of class names")
    model_type = fields.optional_text("model_type")
    if not classes and model_type is None:
        raise ModelFileError(f"{fields.source}: field 'architectures' is missing, and so is 'model_type'")
    named = _ARCHITECTURES.get(classes[0]) if classes else model_type
    if named not in _ARCHITECTURES.values() or model_type not in (None, named):
        found = classes[0] if classes else model_type
        also = f" (model_type {model_type!r})" if classes and model_type else ""
        raise UnsupportedError(
            f"{fields.source}: architecture {found!r}{also} is not supported; supported are {_SUPPORTED_NAMES}"
        )
    assert named is not None
    return named


def _refuse_unsupported_json(fields: Fields, architecture: str) -> None:
    if fields.get("quantization_config") is not None:
        section = fields.section("quantization_config")
        method = section.get("quant_method") if section else None
        raise UnsupportedError(
            f"{fields.source}: the weights are quantised ('quantization_config', method {method!r}); supported are "
            "F32, F16 and BF16 weights in safetensors files, and GGUF files"
        )
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise _unsupported(fields, "hidden_act", "silu")
    for name in ("use_sliding_window", "mlp_bias"):
        if fields.flag(name, False):
            raise _unsupported(fields, name, "false")
    # Qwen2 has biases on q, k and v by definition and no such field; in Llama the flag adds one to the output too.
    if architecture == "llama" and fields.flag("attention_bias", False):
        raise _unsupported(fields, "attention_bias", "false")
    layer_types = fields.get("layer_types")
    if layer_types is not None and (
        not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)
    ):
        raise _unsupported(fields, "layer_types", "full_attention in every layer")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if fields.get(name):
            raise _unsupported(fields, name, "models without experts")


def _json_rope(fields: Fields, max_positions: int) -> RopeConfig:
    """Rope in either spelling, with the precedence of transformers: a non-empty `rope_scaling` replaces
    `rope_parameters`, and a theta inside wins over the one beside it."""
    rope = next((s for name in ("rope_scaling", "rope_parameters") if (s := fields.section(name)) and s.values), None)
    theta = fields.positive_float("rope_theta", _DEFAULT_THETA)
    for place in (fields, rope):
        if place is not None and place.positive_float("partial_rotary_factor", 1.0) != 1.0:
            raise _unsupported(place, "partial_rotary_factor", "1")
    if rope is None:
        return RopeConfig(theta=theta)
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise UnsupportedError(f"{rope.source}: different rotary embeddings per layer are not supported")
    theta = rope.positive_float("rope_theta", theta)
    kind_name = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = rope.text(kind_name, "default")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, scaling="linear", parameters={"factor": rope.positive_float("factor")})
    if kind != "llama3":
        raise _unsupported(rope, kind_name, _SUPPORTED_ROPE)
    parameters = {name: rope.positive_float(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    if parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        raise rope.wrong("low_freq_factor", f"below high_freq_factor ({parameters['high_freq_factor']})")
    original = "original_max_position_embeddings"
    parameters[original] = float(
        fields.positive_int(original)
        if fields.get(original) is not None
        else rope.positive_int(original, max_positions)
    )
    return RopeConfig(theta=theta, scaling="llama3", parameters=parameters)


def _unsupported(fields: Fields, name: str, supported: str) -> UnsupportedError:
    return UnsupportedError(f"{fields.source}: {name} {fields.get(name)!r} is not supported; supported: {supported}")


# GGUF


def _refuse_unsupported_gguf(fields: Fields, prefix: str) -> None:
    kind = fields.text("general.type", "model")
    if kind != "model":
        raise _unsupported(fields, "general.type", "model")
    for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(fields.get(prefix + name), list):
            raise UnsupportedError(f"{fields.source}: {prefix}{name} differs per layer, which is not supported")
    for name, what in (("attention.sliding_window", "full attention"), ("expert_count", "models without experts")):
        if fields.get(prefix + name):
            raise _unsupported(fields, prefix + name, what)
    for name in ("rope.scaling.attn_factor", "attention.scale", "logit_scale", "embedding_scale", "residual_scale"):
        if fields.get(prefix + name) not in (None, 0, 1):
            raise _unsupported(fields, prefix + name, "1")


def _gguf_head_dim(fields: Fields, prefix: str, hidden_size: int, num_heads: int) -> int:
    size_names = (prefix + "attention.key_length", prefix + "attention.value_length", prefix + "rope.dimension_count")
    if fields.get(size_names[0]) is not None:
        head_dim = fields.positive_int(size_names[0])
    else:
        head_dim = _derived_head_dim(
            fields, hidden_size, num_heads, prefix + "embedding_length", prefix + "attention.head_count"
        )
    for name in size_names:
        if fields.positive_int(name, head_dim) != head_dim:
            raise _unsupported(fields, name, f"the size of a head, {head_dim}")
    return head_dim


def _gguf_rope(fields: Fields, prefix: str, frequency_factors: tuple[float, ...] | None) -> RopeConfig:
    """Rope as llama.cpp reads it: a factor without a type is linear; `rope.scale_linear` is the factor's older name."""
    theta = fields.positive_float(prefix + "rope.freq_base", _DEFAULT_THETA)
    kind_name, factor_name = prefix + "rope.scaling.type", prefix + "rope.scaling.factor"
    kind = fields.text(kind_name, "linear")
    if kind not in ("none", "linear"):
        raise _unsupported(fields, kind_name, "none, linear, llama3 (as 'rope_freqs.weight')")
    if fields.get(factor_name) is None:
        factor_name = prefix + "rope.scale_linear"
    factor = 1.0 if kind == "none" or fields.get(factor_name) == 0 else fields.positive_float(factor_name, 1.0)
    if frequency_factors is None:
        if factor == 1.0:
            return RopeConfig(theta=theta)
        return RopeConfig(theta=theta, scaling="linear", parameters={"factor": factor})
    if factor != 1.0:
        raise UnsupportedError(
            f"{fields.source}: {factor_name} and tensor 'rope_freqs.weight' together are not supported"
        )
    return RopeConfig(theta=theta, scaling="factors", frequency_factors=frequency_factors)
