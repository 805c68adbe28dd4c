"""SmolLM 3: Llama, but some layers (by default every fourth) have no rotary embedding."""

from __future__ import annotations

from noria.files.architectures.common import (
    ArchitectureFiles,
    GgufFields,
    decoder_from_gguf,
    decoder_from_json,
    json_windows,
)
from noria.files.fields import Fields
from noria.files.model import ModelConfig
from noria.files.rope_config import rope_from_gguf, rope_from_json

INTERVAL = 4
"""Without rotary embedding is every layer of that number, counted from 1; GGUF files do not say it."""
DEFAULT_THETA = 2_000_000.0


def _from_json(fields: Fields) -> ModelConfig:
    """`no_rope_layers` has, despite its name, a 1 for each layer with rotary embedding."""
    num_layers = fields.positive_int("num_hidden_layers")
    rotated = fields.get("no_rope_layers")
    if rotated is None:
        unrotated = _unrotated(num_layers, fields.positive_int("no_rope_layer_interval", INTERVAL))
    elif isinstance(rotated, list) and len(rotated) >= num_layers and all(flag in (0, 1) for flag in rotated):
        unrotated = tuple(layer for layer in range(num_layers) if not rotated[layer])
    else:
        raise fields.wrong("no_rope_layers", f"a list of {num_layers} zeros and ones")
    use_window = fields.flag("use_sliding_window", False)
    return decoder_from_json(
        "smollm3",
        fields,
        rope=rope_from_json(fields, default_theta=DEFAULT_THETA),
        unrotated_layers=unrotated,
        layer_windows=json_windows(fields, lambda layer: layer in unrotated) if use_window else None,
    )


def _from_gguf(gguf: GgufFields) -> ModelConfig:
    return decoder_from_gguf(
        "smollm3",
        gguf,
        rope=rope_from_gguf(gguf.fields, gguf.prefix, {}, default_theta=DEFAULT_THETA),
        unrotated_layers=_unrotated(gguf.integer("block_count"), INTERVAL),
    )


def _unrotated(num_layers: int, interval: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(num_layers) if (layer + 1) % interval == 0)


SMOLLM3 = ArchitectureFiles(
    name="smollm3", hf_class="SmolLM3ForCausalLM", model_type="smollm3", from_json=_from_json, from_gguf=_from_gguf
)
