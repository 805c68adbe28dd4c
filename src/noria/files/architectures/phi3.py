"""Phi 3, 3.5 and 4 (mini): fused projections, longrope in the larger contexts, in Phi 4 mini partly rotated heads."""

from __future__ import annotations

from noria.files.architectures.common import (
    ArchitectureFiles,
    GgufFields,
    decoder_from_gguf,
    decoder_from_json,
    gguf_head_dim,
    gguf_windows,
    json_head_dim,
    json_windows,
)
from noria.files.fields import Fields
from noria.files.model import ModelConfig
from noria.files.rope_config import json_rotary_dim, rope_from_gguf, rope_from_json


def _from_json(fields: Fields) -> ModelConfig:
    """The first files called longrope "su" or, though it has little to do with it, "yarn"."""
    values = dict(fields.values)
    for name in ("rope_scaling", "rope_parameters"):
        section = values.get(name)
        if isinstance(section, dict):
            kinds = {key: "longrope" for key in ("type", "rope_type") if section.get(key) in ("su", "yarn")}
            values[name] = section | kinds
    fields = Fields(values, fields.source)
    return decoder_from_json(
        "phi3",
        fields,
        rope=rope_from_json(fields, partial=True),
        rotary_dim=json_rotary_dim(fields, json_head_dim(fields)),
        layer_windows=json_windows(fields, lambda layer: True),
    )


def _from_gguf(gguf: GgufFields) -> ModelConfig:
    head_dim = gguf_head_dim(gguf)
    rotary_dim = gguf.integer("rope.dimension_count", head_dim)
    return decoder_from_gguf(
        "phi3",
        gguf,
        rope=rope_from_gguf(gguf.fields, gguf.prefix, gguf.rope_factors),
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        layer_windows=gguf_windows(gguf, None),
    )


PHI3 = ArchitectureFiles(
    name="phi3", hf_class="Phi3ForCausalLM", model_type="phi3", from_json=_from_json, from_gguf=_from_gguf
)
