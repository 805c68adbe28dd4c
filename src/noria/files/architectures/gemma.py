"""Gemma 2 and the text models of Gemma 3: most layers slide, scores or logits are capped, the embedding is scaled."""

from __future__ import annotations

import math

from noria.files.architectures.common import (
    Activation,
    ArchitectureFiles,
    GgufFields,
    decoder_from_gguf,
    decoder_from_json,
    gguf_head_dim,
    gguf_windows,
    json_activation,
    json_head_dim,
    json_windows,
)
from noria.files.fields import Fields
from noria.files.model import ModelConfig, RopeConfig
from noria.files.rope_config import json_rope_section, rope_from_gguf, rope_from_section

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
"""Of Gemma 3: layers with full attention, layers with a window."""


def _gemma2_from_json(fields: Fields) -> ModelConfig:
    return decoder_from_json(
        "gemma2",
        fields,
        head_dim=json_head_dim(fields, 256),
        layer_windows=json_windows(fields, lambda layer: layer % 2 == 0, absent=4096),
        activation=_activation(fields),
        attention_scale=_query_scale(fields),
        attention_soft_cap=fields.nullable_float("attn_logit_softcapping", 50.0),
        logits_soft_cap=fields.nullable_float("final_logit_softcapping", 30.0),
        embedding_scale=_embedding_scale(fields.positive_int("hidden_size")),
    )


def _gemma3_from_json(fields: Fields) -> ModelConfig:
    period = fields.positive_int("sliding_window_pattern", fields.positive_int("_sliding_window_pattern", 6))
    rope, local_rope = _json_ropes(fields)
    return decoder_from_json(
        "gemma3",
        fields,
        head_dim=json_head_dim(fields, 256),
        rope=rope,
        local_rope=local_rope,
        layer_windows=json_windows(fields, lambda layer: (layer + 1) % period != 0, absent=4096),
        activation=_activation(fields),
        attention_scale=_query_scale(fields),
        attention_soft_cap=fields.nullable_float("attn_logit_softcapping", None),
        logits_soft_cap=fields.nullable_float("final_logit_softcapping", None),
        embedding_scale=_embedding_scale(fields.positive_int("hidden_size")),
    )


def _gemma2_from_gguf(gguf: GgufFields) -> ModelConfig:
    return decoder_from_gguf(
        "gemma2",
        gguf,
        layer_windows=gguf_windows(gguf, 2, absent=4096),
        activation="gelu_tanh",
        attention_scale=_gguf_query_scale(gguf, layers_of_27b=46),
        attention_soft_cap=gguf.number("attn_logit_softcapping", 50.0),
        logits_soft_cap=gguf.number("final_logit_softcapping", 30.0),
        embedding_scale=_embedding_scale(gguf.integer("embedding_length")),
    )


def _gemma3_from_gguf(gguf: GgufFields) -> ModelConfig:
    """A scaling is of the layers with full attention only."""
    layer_windows = gguf_windows(gguf, 6)
    local_theta = gguf.number("rope.freq_base_swa", LOCAL_THETA)
    return decoder_from_gguf(
        "gemma3",
        gguf,
        rope=rope_from_gguf(gguf.fields, gguf.prefix, {}, default_theta=GLOBAL_THETA),
        local_rope=None if layer_windows is None else RopeConfig(theta=local_theta),
        layer_windows=layer_windows,
        activation="gelu_tanh",
        attention_scale=_gguf_query_scale(gguf, layers_of_27b=62),
        logits_soft_cap=gguf.optional_number("final_logit_softcapping"),
        embedding_scale=_embedding_scale(gguf.integer("embedding_length")),
    )


def _json_ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Of the layers with full attention and with a window: one object for each kind, or, in older files, fields beside
    each other and a scaling of the former only."""
    section = json_rope_section(fields)
    kinds = {name: section.section(name) for name in ("full_attention", "sliding_attention")} if section else {}
    nested = any(kinds.values())
    theta = fields.positive_float("rope_theta", GLOBAL_THETA)
    local_theta = fields.positive_float("rope_local_base_freq", LOCAL_THETA)
    return (
        rope_from_section(kinds["full_attention"] if nested else section, fields, theta=theta),
        rope_from_section(kinds["sliding_attention"] if nested else None, fields, theta=local_theta),
    )


def _activation(fields: Fields) -> Activation:
    """The older `hidden_act` beside it says the wrong thing in some files; transformers does not read it either."""
    return json_activation(fields, "hidden_activation", "gelu_pytorch_tanh")


def _query_scale(fields: Fields) -> float:
    return 1 / math.sqrt(fields.positive_float("query_pre_attn_scalar", 256.0))


def _embedding_scale(hidden_size: int) -> float:
    """Not rounded to the precision of the weights, as transformers rounds it: the float32 model is what we aim at."""
    return math.sqrt(hidden_size)


def _gguf_query_scale(gguf: GgufFields, *, layers_of_27b: int) -> float:
    """The files do not say; the largest model of each generation, known by its layers, scales by its hidden size."""
    if gguf.integer("block_count") == layers_of_27b:
        return 1 / math.sqrt(gguf.integer("embedding_length") // gguf.integer("attention.head_count"))
    return 1 / math.sqrt(gguf_head_dim(gguf))


GEMMA2 = ArchitectureFiles(
    name="gemma2",
    hf_class="Gemma2ForCausalLM",
    model_type="gemma2",
    from_json=_gemma2_from_json,
    from_gguf=_gemma2_from_gguf,
)
GEMMA3 = ArchitectureFiles(
    name="gemma3",
    hf_class="Gemma3ForCausalLM",
    model_type="gemma3_text",
    from_json=_gemma3_from_json,
    from_gguf=_gemma3_from_gguf,
)
