"""What the architectures have in common when their configuration is read: `decoder_from_json`, `decoder_from_gguf`.

Each reads what every decoder's file says and refuses what would silently go wrong (experts, biases it does not expect,
other activations); what an architecture has beside that, its own module passes as keywords (`Different`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypedDict, Unpack

from noria.errors import ModelFileError, UnsupportedError
from noria.files.fields import Fields
from noria.files.model import ModelConfig, RopeConfig
from noria.files.rope_config import FREQUENCY_FACTORS, rope_from_gguf, rope_from_json

Windows = tuple[int | None, ...] | None
Activation = Literal["silu", "gelu_tanh"]

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class Different(TypedDict, total=False):
    """Fields of `ModelConfig` in which an architecture differs from a plain Llama."""

    head_dim: int
    rope: RopeConfig
    local_rope: RopeConfig | None
    layer_windows: Windows
    unrotated_layers: tuple[int, ...]
    rotary_dim: int | None
    activation: Activation
    attention_scale: float | None
    attention_soft_cap: float | None
    logits_soft_cap: float | None
    embedding_scale: float
    residual_scale: float
    logits_scale: float


@dataclass(frozen=True, slots=True)
class GgufFields:
    """GGUF metadata, `prefix` of the architecture's own fields, and what tensors say about the configuration."""

    fields: Fields
    prefix: str
    num_embedding_rows: int
    rope_factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Values of `noria.files.rope_config.FACTOR_TENSORS`, of those that the file has."""

    def integer(self, name: str, default: int | None = None) -> int:
        """The architecture's field of that name; required without a default."""
        name = self.prefix + name
        return self.fields.positive_int(name) if default is None else self.fields.positive_int(name, default)

    def number(self, name: str, default: float | None = None) -> float:
        name = self.prefix + name
        return self.fields.positive_float(name) if default is None else self.fields.positive_float(name, default)

    def optional_number(self, name: str) -> float | None:
        """None when the field is absent or 0."""
        return self.number(name) if self.fields.get(self.prefix + name) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureFiles:
    """How files of one architecture name it, and what their configuration means."""

    name: str
    """Ours; in GGUF files it is `general.architecture`."""
    hf_class: str
    """In `architectures` of a `config.json`."""
    model_type: str
    """Of a `config.json`."""
    from_json: Callable[[Fields], ModelConfig]
    from_gguf: Callable[[GgufFields], ModelConfig] | None = None
    """None: GGUF files store it under the name of another architecture."""


# Hugging Face


def decoder_from_json(
    name: str, fields: Fields, *, qkv_bias: bool = False, **different: Unpack[Different]
) -> ModelConfig:
    """The configuration of architecture `name`. `qkv_bias`: it has these by definition, and no field says so."""
    _refuse_unsupported_json(fields, qkv_bias=qkv_bias)
    hidden_size = fields.positive_int("hidden_size")
    num_heads = fields.positive_int("num_attention_heads")
    given: Different = {"head_dim": json_head_dim(fields)} if "head_dim" not in different else {}
    if "rope" not in different:
        given["rope"] = rope_from_json(fields)
    if "activation" not in different:
        given["activation"] = json_activation(fields, "hidden_act", "silu")
    return ModelConfig(
        architecture=name,
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size"),
        num_layers=fields.positive_int("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.positive_int("num_key_value_heads", num_heads),
        rms_norm_eps=fields.positive_float("rms_norm_eps"),
        max_position_embeddings=fields.positive_int("max_position_embeddings"),
        tie_word_embeddings=fields.optional_flag("tie_word_embeddings"),
        **(given | different),
    )


def json_head_dim(fields: Fields, default: int | None = None) -> int:
    """Values of a head; where the file does not say: `default`, else the hidden size shared by the heads."""
    if fields.get("head_dim") is not None:
        return fields.positive_int("head_dim")
    hidden_size, num_heads = fields.positive_int("hidden_size"), fields.positive_int("num_attention_heads")
    return default or _derived_head_dim(fields, hidden_size, num_heads, "hidden_size", "num_attention_heads")


def json_windows(fields: Fields, default_types: Callable[[int], bool], *, absent: int | None = None) -> Windows:
    """The window of each layer from `layer_types` and `sliding_window` (`absent` if the file has no such field).

    `default_types` says of each layer whether it is a sliding one, where the file has no `layer_types`.
    """
    num_layers = fields.positive_int("num_hidden_layers")
    types = fields.get("layer_types")
    if types is None:
        sliding = [default_types(layer) for layer in range(num_layers)]
    else:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != num_layers:
            raise fields.wrong("layer_types", f"a list of {num_layers} names")
        if any(kind not in known for kind in types):
            raise fields.unsupported("layer_types", ", ".join(known))
        sliding = [kind == "sliding_attention" for kind in types]
    window = fields.nullable_int("sliding_window", absent)
    if window is None and any(sliding) and types is not None:
        raise fields.wrong("sliding_window", "a positive integer, as there are layers of type sliding_attention")
    return windows(sliding, window)


def windows(sliding: list[bool], window: int | None) -> Windows:
    """`layer_windows` of a model whose sliding layers see `window` keys; None if there is no window anywhere."""
    return tuple(window if slides else None for slides in sliding) if window is not None and any(sliding) else None


def refuse_windows(fields: Fields) -> None:
    """For architectures that have full attention in every layer."""
    if fields.flag("use_sliding_window", False):
        raise fields.unsupported("use_sliding_window", "false")
    types = fields.get("layer_types")
    if types is not None and (not isinstance(types, list) or any(kind != "full_attention" for kind in types)):
        raise fields.unsupported("layer_types", "full_attention in every layer")


def json_activation(fields: Fields, name: str, default: str) -> Activation:
    activation = _ACTIVATIONS.get(fields.text(name, default))
    if activation is None:
        raise fields.unsupported(name, ", ".join(_ACTIVATIONS))
    return activation


def _refuse_unsupported_json(fields: Fields, *, qkv_bias: bool) -> None:
    # Where biases on q, k and v are not by definition, the flag would add one to the output too.
    for name in ("mlp_bias",) if qkv_bias else ("mlp_bias", "attention_bias"):
        if fields.flag(name, False):
            raise fields.unsupported(name, "false")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if fields.get(name):
            raise fields.unsupported(name, "models without experts")
    if fields.flag("use_bidirectional_attention", False):
        raise fields.unsupported("use_bidirectional_attention", "false")


def _derived_head_dim(fields: Fields, hidden_size: int, num_heads: int, size_name: str, heads_name: str) -> int:
    if hidden_size % num_heads:
        raise ModelFileError(
            f"{fields.source}: {size_name} {hidden_size} is not a multiple of {heads_name} {num_heads}, "
            "and no head size is given"
        )
    return hidden_size // num_heads


# GGUF


def decoder_from_gguf(name: str, gguf: GgufFields, **different: Unpack[Different]) -> ModelConfig:
    """The configuration of architecture `name`."""
    fields, prefix = gguf.fields, gguf.prefix
    _refuse_unsupported_gguf(fields, prefix, different)
    head_dim = gguf_head_dim(gguf)
    rotary_dim = gguf.integer("rope.dimension_count", head_dim)
    if rotary_dim != (different.get("rotary_dim") or head_dim):
        raise fields.unsupported(prefix + "rope.dimension_count", f"the size of a head, {head_dim}")
    given: Different = {"head_dim": head_dim}
    if "rope" not in different:
        given["rope"] = rope_from_gguf(fields, prefix, {})
    config = ModelConfig(
        architecture=name,
        vocab_size=gguf.integer("vocab_size", gguf.num_embedding_rows),
        hidden_size=gguf.integer("embedding_length"),
        intermediate_size=gguf.integer("feed_forward_length"),
        num_layers=gguf.integer("block_count"),
        num_heads=gguf.integer("attention.head_count"),
        num_kv_heads=gguf.integer("attention.head_count_kv", gguf.integer("attention.head_count")),
        rms_norm_eps=gguf.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=gguf.integer("context_length"),
        **(given | different),
    )
    if config.vocab_size != gguf.num_embedding_rows:
        raise ModelFileError(
            f"{fields.source}: tensor 'token_embd.weight' has {gguf.num_embedding_rows} rows, but field "
            f"'{prefix}vocab_size' says {config.vocab_size}"
        )
    return config


def gguf_llama3_rope(gguf: GgufFields) -> RopeConfig:
    """Rope of the architectures whose converter works llama3 scaling out, in `rope_freqs.weight`."""
    factors = {name: values for name, values in gguf.rope_factors.items() if name == FREQUENCY_FACTORS}
    return rope_from_gguf(gguf.fields, gguf.prefix, factors)


def gguf_head_dim(gguf: GgufFields) -> int:
    key, value = "attention.key_length", "attention.value_length"
    if gguf.fields.get(gguf.prefix + key) is not None:
        head_dim = gguf.integer(key)
    else:
        names = (gguf.prefix + "embedding_length", gguf.prefix + "attention.head_count")
        sizes = gguf.integer("embedding_length"), gguf.integer("attention.head_count")
        head_dim = _derived_head_dim(gguf.fields, *sizes, *names)
    if gguf.integer(value, head_dim) != head_dim:
        raise gguf.fields.unsupported(gguf.prefix + value, f"the size of a head, {head_dim}")
    return head_dim


def gguf_windows(gguf: GgufFields, period: int | None, *, absent: int | None = None) -> Windows:
    """Of each `period` layers all but the last slide (None: all slide), unless the file has a pattern of its own.

    `absent`: the window of a file that does not name one; 0 in the file is none.
    """
    name = "attention.sliding_window"
    num_layers = gguf.integer("block_count")
    given = gguf.fields.get(gguf.prefix + name)
    window = absent if given is None else gguf.integer(name) if given != 0 else None
    pattern = gguf.fields.get(gguf.prefix + name + "_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers or any(type(slides) is not bool for slides in pattern):
            raise gguf.fields.wrong(gguf.prefix + name + "_pattern", f"a list of {num_layers} flags")
        return windows(pattern, window)
    if pattern is not None:
        period = gguf.integer(name + "_pattern")
    return windows([period is None or (layer + 1) % period != 0 for layer in range(num_layers)], window)


def _refuse_unsupported_gguf(fields: Fields, prefix: str, different: Different) -> None:
    kind = fields.text("general.type", "model")
    if kind != "model":
        raise fields.unsupported("general.type", "model")
    for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(fields.get(prefix + name), list):
            raise UnsupportedError(f"{fields.source}: {prefix}{name} differs per layer, which is not supported")
    if fields.get(prefix + "expert_count"):
        raise fields.unsupported(prefix + "expert_count", "models without experts")
    if fields.get(prefix + "attention.sliding_window") and "layer_windows" not in different:
        raise fields.unsupported(prefix + "attention.sliding_window", "full attention")
    scales = {
        "attention.scale": "attention_scale",
        "logit_scale": "logits_scale",
        "embedding_scale": "embedding_scale",
        "residual_scale": "residual_scale",
        "attn_logit_softcapping": "attention_soft_cap",
        "final_logit_softcapping": "logits_soft_cap",
    }
    for name, ours in scales.items():
        if ours not in different and fields.get(prefix + name) not in (None, 0, 1):
            raise fields.unsupported(prefix + name, "1")
