"""`ModelConfig` from a Hugging Face `config.json` (`config_from_json`) or from GGUF metadata (`config_from_gguf`).

Called by `noria.files.huggingface` and `noria.files.gguf`. Finds the architecture, whose module in
`noria.files.architectures` reads the rest, and checks what must hold for every one. Not here: whether the tensors fit
the configuration (`noria.weights`), and which ids end a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from noria.errors import ModelFileError, UnsupportedError
from noria.files.architectures import ARCHITECTURES
from noria.files.architectures.common import ArchitectureFiles, GgufFields
from noria.files.fields import Fields, short
from noria.files.model import ModelConfig, RopeConfig

MAX_LAYERS: Final = 10_000
"""The deepest models have some hundred. Lists are made with an entry for each, before a tensor is looked at."""


def config_from_json(values: Mapping[str, Any], source: str) -> ModelConfig:
    """The configuration in a parsed `config.json`; `source` names the file in errors.

    Reads what transformers 4 and 5 write. Raises ModelFileError (a field is missing or wrong) and UnsupportedError.
    """
    fields = Fields(values, source)
    architecture = _json_architecture(fields)
    fields.positive_int("num_hidden_layers", most=MAX_LAYERS)
    return _checked(architecture.from_json(fields), source)


def config_from_gguf(
    metadata: Mapping[str, Any],
    source: str,
    *,
    num_embedding_rows: int | None,
    rope_factors: Mapping[str, tuple[float, ...]] | None = None,
) -> ModelConfig:
    """The configuration in GGUF metadata.

    `num_embedding_rows` is the first size of `token_embd.weight` (None: no such tensor); `rope_factors` the values of
    those of `noria.files.rope_config.FACTOR_TENSORS` that the file has. Raises ModelFileError and UnsupportedError.
    """
    fields = Fields(metadata, source)
    name = fields.text("general.architecture")
    architecture = next((a for a in ARCHITECTURES if a.name == name), None)
    if architecture is None or architecture.from_gguf is None:
        supported = ", ".join(a.name for a in ARCHITECTURES if a.from_gguf is not None)
        raise UnsupportedError(f"{source}: architecture {short(name)} is not supported; supported are {supported}")
    if num_embedding_rows is None:
        raise ModelFileError(f"{source}: tensor 'token_embd.weight' is missing")
    gguf = GgufFields(fields, name + ".", num_embedding_rows, rope_factors or {})
    fields.positive_int(name + ".block_count", most=MAX_LAYERS)
    return _checked(architecture.from_gguf(gguf), source)


def _json_architecture(fields: Fields) -> ArchitectureFiles:
    """By class name if the file gives one, else by `model_type`; they must agree when both are there."""
    classes = fields.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise fields.wrong("architectures", "a list of class names")
    model_type = fields.optional_text("model_type")
    if not classes and model_type is None:
        raise ModelFileError(f"{fields.source}: field 'architectures' is missing, and so is 'model_type'")
    for architecture in ARCHITECTURES:
        named = architecture.hf_class == classes[0] if classes else architecture.model_type == model_type
        if named and model_type in (None, architecture.model_type):
            return architecture
    found = classes[0] if classes else model_type
    also = f" (model_type {short(model_type)})" if classes and model_type else ""
    supported = ", ".join(f"{a.name} ({a.hf_class})" for a in ARCHITECTURES)
    raise UnsupportedError(
        f"{fields.source}: architecture {short(found)}{also} is not supported; supported are {supported}"
    )


def _checked(config: ModelConfig, source: str) -> ModelConfig:
    """What must hold in any format: heads share KV heads evenly, and rotary embedding pairs up a head's values."""
    if config.num_heads % config.num_kv_heads:
        raise ModelFileError(
            f"{source}: {config.num_heads} attention heads cannot be shared evenly by {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 2:
        raise ModelFileError(f"{source}: a head of {config.head_dim} values is odd; rotary embedding needs pairs")
    rotated = config.rotary_dim or config.head_dim
    if rotated % 2 or rotated > config.head_dim:
        raise ModelFileError(f"{source}: {rotated} of {config.head_dim} values of a head cannot be rotated in pairs")
    for rope in (config.rope, config.local_rope or config.rope):
        if rope.theta <= 1:
            raise ModelFileError(f"{source}: a rope theta of {rope.theta:g} cannot be: it has to be above 1")
        _check_factors(rope, rotated, source)
    return config


def _check_factors(rope: RopeConfig, rotated: int, source: str) -> None:
    lists = {
        "tensor 'rope_freqs.weight'": rope.frequency_factors if rope.scaling == "factors" else None,
        "rope scaling longrope's list of short factors": rope.short_factors if rope.scaling == "longrope" else None,
        "rope scaling longrope's list of long factors": rope.long_factors if rope.scaling == "longrope" else None,
    }
    for name, factors in lists.items():
        if factors is not None and len(factors) != rotated // 2:
            raise ModelFileError(
                f"{source}: {name} has {len(factors)} values; a head of {rotated} needs {rotated // 2}"
            )
