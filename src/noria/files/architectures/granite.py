"""Granite 3 and the dense models of 4: Llama with multipliers on the embedding, scores, branches and logits."""

from __future__ import annotations

from noria.files.architectures.common import (
    ArchitectureFiles,
    GgufFields,
    decoder_from_gguf,
    decoder_from_json,
    gguf_llama3_rope,
    refuse_windows,
)
from noria.files.fields import Fields
from noria.files.model import ModelConfig


def _from_json(fields: Fields) -> ModelConfig:
    """The attention multiplier takes the place of head_dim ** -0.5; logits are divided by their scaling."""
    refuse_windows(fields)
    return decoder_from_json(
        "granite",
        fields,
        embedding_scale=fields.positive_float("embedding_multiplier", 1.0),
        attention_scale=fields.positive_float("attention_multiplier", 1.0),
        residual_scale=fields.positive_float("residual_multiplier", 1.0),
        logits_scale=1 / fields.positive_float("logits_scaling", 1.0),
    )


def _from_gguf(gguf: GgufFields) -> ModelConfig:
    """A scale that is absent or 0 is 1, but that of attention, which is then head_dim ** -0.5."""
    if not gguf.fields.flag("granite.rope.scaling.finetuned", True):
        raise gguf.fields.unsupported("granite.rope.scaling.finetuned", "true")
    return decoder_from_gguf(
        "granite",
        gguf,
        rope=gguf_llama3_rope(gguf),
        embedding_scale=gguf.optional_number("embedding_scale") or 1.0,
        attention_scale=gguf.optional_number("attention.scale"),
        residual_scale=gguf.optional_number("residual_scale") or 1.0,
        logits_scale=1 / gguf.number("logit_scale"),
    )


GRANITE = ArchitectureFiles(
    name="granite", hf_class="GraniteForCausalLM", model_type="granite", from_json=_from_json, from_gguf=_from_gguf
)
