"""Qwen 2 (and 2.5), which has biases on q, k and v, and Qwen 3, which has norms on the heads of q and k instead."""

from __future__ import annotations

from noria.files.architectures.common import (
    ArchitectureFiles,
    GgufFields,
    Windows,
    decoder_from_gguf,
    decoder_from_json,
    json_head_dim,
    json_windows,
)
from noria.files.fields import Fields
from noria.files.model import ModelConfig


def _windows(fields: Fields) -> Windows:
    """Off unless `use_sliding_window`; then the layers from `max_window_layers` on slide."""
    if not fields.flag("use_sliding_window", False):
        return json_windows(fields, lambda layer: False)
    first = fields.optional_int("max_window_layers")
    return json_windows(fields, lambda layer: layer >= (28 if first is None else first), absent=4096)


def _qwen2_from_json(fields: Fields) -> ModelConfig:
    return decoder_from_json("qwen2", fields, qkv_bias=True, layer_windows=_windows(fields))


def _qwen3_from_json(fields: Fields) -> ModelConfig:
    return decoder_from_json("qwen3", fields, head_dim=json_head_dim(fields, 128), layer_windows=_windows(fields))


def _qwen2_from_gguf(gguf: GgufFields) -> ModelConfig:
    return decoder_from_gguf("qwen2", gguf)


def _qwen3_from_gguf(gguf: GgufFields) -> ModelConfig:
    return decoder_from_gguf("qwen3", gguf)


QWEN2 = ArchitectureFiles(
    name="qwen2",
    hf_class="Qwen2ForCausalLM",
    model_type="qwen2",
    from_json=_qwen2_from_json,
    from_gguf=_qwen2_from_gguf,
)
QWEN3 = ArchitectureFiles(
    name="qwen3",
    hf_class="Qwen3ForCausalLM",
    model_type="qwen3",
    from_json=_qwen3_from_json,
    from_gguf=_qwen3_from_gguf,
)
