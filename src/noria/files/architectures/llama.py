"""Llama, and Mistral, which is Llama with a window; GGUF files store both as "llama"."""

from __future__ import annotations

from noria.files.architectures.common import (
    ArchitectureFiles,
    GgufFields,
    decoder_from_gguf,
    decoder_from_json,
    gguf_llama3_rope,
    gguf_windows,
    json_windows,
    refuse_windows,
)
from noria.files.fields import Fields
from noria.files.model import ModelConfig


def _llama_from_json(fields: Fields) -> ModelConfig:
    refuse_windows(fields)
    return decoder_from_json("llama", fields)


def _llama_from_gguf(gguf: GgufFields) -> ModelConfig:
    return decoder_from_gguf("llama", gguf, rope=gguf_llama3_rope(gguf), layer_windows=gguf_windows(gguf, None))


def _mistral_from_json(fields: Fields) -> ModelConfig:
    """Every layer slides if there is a window at all; transformers' default is one."""
    return decoder_from_json("mistral", fields, layer_windows=json_windows(fields, lambda layer: True, absent=4096))


LLAMA = ArchitectureFiles(
    name="llama",
    hf_class="LlamaForCausalLM",
    model_type="llama",
    from_json=_llama_from_json,
    from_gguf=_llama_from_gguf,
)
MISTRAL = ArchitectureFiles(
    name="mistral", hf_class="MistralForCausalLM", model_type="mistral", from_json=_mistral_from_json
)
