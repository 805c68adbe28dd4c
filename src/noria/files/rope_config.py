"""`RopeConfig` from a Hugging Face `config.json` and from GGUF metadata: every spelling of every supported scaling.

Called by `noria.files.architectures`. What the numbers mean is in `noria.ops.rope`. A scaling that is not supported is
refused by name: its silent absence would show only in long texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from noria.errors import UnsupportedError
from noria.files.fields import Fields
from noria.files.model import RopeConfig

DEFAULT_THETA: Final = 10_000.0

_SUPPORTED: Final = "none (default), linear, llama3, yarn, longrope"
_ORIGINAL: Final = "original_max_position_embeddings"
_PARTIAL: Final = "partial_rotary_factor"

FREQUENCY_FACTORS: Final = "rope_freqs.weight"
LONG_FACTORS: Final = "rope_factors_long.weight"
SHORT_FACTORS: Final = "rope_factors_short.weight"
FACTOR_TENSORS: Final = (FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Tensors of a GGUF file whose values are configuration."""


def json_rope_section(fields: Fields) -> Fields | None:
    """The object that describes rope, with the precedence of transformers: a `rope_scaling` that is not empty replaces
    `rope_parameters`."""
    return next((s for name in ("rope_scaling", "rope_parameters") if (s := fields.section(name)) and s.values), None)


def rope_from_json(fields: Fields, *, default_theta: float = DEFAULT_THETA, partial: bool = False) -> RopeConfig:
    """One rope for all layers, in either spelling; a theta inside the section wins over the one beside it.

    `partial`: whether the architecture knows rotary embedding of a part of each head (`json_rotary_dim`).
    """
    section = json_rope_section(fields)
    for place in (fields, section):
        if not partial and place is not None and place.positive_float(_PARTIAL, 1.0) != 1.0:
            raise place.unsupported(_PARTIAL, "1")
    if section is not None and any(isinstance(value, dict) for value in section.values.values()):
        raise UnsupportedError(f"{section.source}: different rotary embeddings per layer are not supported")
    return rope_from_section(section, fields, theta=fields.positive_float("rope_theta", default_theta))


def json_rotary_dim(fields: Fields, head_dim: int) -> int | None:
    """How many values of a head are rotated, None for all."""
    section = json_rope_section(fields)
    factor = fields.positive_float(_PARTIAL, 1.0)
    if section is not None:
        factor = section.positive_float(_PARTIAL, factor)
    if factor > 1.0:
        raise (section or fields).wrong(_PARTIAL, "at most 1")
    return None if factor == 1.0 else int(head_dim * factor)


def rope_from_section(section: Fields | None, fields: Fields, *, theta: float) -> RopeConfig:
    """Rope from its own object in a `config.json` (None: there is none) and from the fields beside it."""
    if section is None:
        return RopeConfig(theta=theta)
    theta = section.positive_float("rope_theta", theta)
    kind_name = "rope_type" if section.get("rope_type") is not None else "type"
    kind = section.text(kind_name, "default")
    match kind:
        case "default":
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig(theta=theta, scaling=kind, parameters={"factor": section.positive_float("factor")})
        case "llama3":
            return RopeConfig(theta=theta, scaling=kind, parameters=_llama3(section, fields))
        case "yarn":
            return _yarn(section, fields, theta)
        case "longrope" | "su":
            return _longrope(section, fields, theta)
        case "dynamic":
            raise UnsupportedError(
                f"{section.source}: {kind_name} 'dynamic' is not supported: its frequencies follow the length of the "
                f"text, but keys in the cache keep those they were written with; supported: {_SUPPORTED}"
            )
    raise section.unsupported(kind_name, _SUPPORTED)


def _original_length(section: Fields, fields: Fields) -> float:
    """The context before scaling; beside the section it has precedence. Without one: the model's own."""
    if fields.get(_ORIGINAL) is not None:
        return float(fields.positive_int(_ORIGINAL))
    return float(section.positive_int(_ORIGINAL, fields.positive_int("max_position_embeddings")))


def _llama3(section: Fields, fields: Fields) -> dict[str, float]:
    parameters = {name: section.positive_float(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    if parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        raise section.wrong("low_freq_factor", f"below high_freq_factor ({parameters['high_freq_factor']})")
    return parameters | {_ORIGINAL: _original_length(section, fields)}


def _yarn(section: Fields, fields: Fields, theta: float) -> RopeConfig:
    original = _original_length(section, fields)
    factor = section.positive_float("factor", fields.positive_int("max_position_embeddings") / original)
    scale, scale_all = section.get("mscale"), section.get("mscale_all_dim")
    if scale and scale_all:
        attention = _magnitude(factor, section.positive_float("mscale"))
        attention /= _magnitude(factor, section.positive_float("mscale_all_dim"))
    else:
        attention = _magnitude(factor)
    return RopeConfig(
        theta=theta,
        scaling="yarn",
        parameters={
            "factor": factor,
            "beta_fast": section.positive_float("beta_fast", 32.0),
            "beta_slow": section.positive_float("beta_slow", 1.0),
            _ORIGINAL: original,
            "truncate": float(section.flag("truncate", True)),
        },
        attention_factor=section.positive_float("attention_factor", attention),
    )


def _magnitude(factor: float, scale: float = 1.0) -> float:
    """yarn's: scores of a context stretched by `factor` are sharpened by this, squared (Peng et al. 2023, eq. 22)."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _longrope(section: Fields, fields: Fields, theta: float) -> RopeConfig:
    original = _original_length(section, fields)
    if original == 1:
        raise (section if fields.get(_ORIGINAL) is None else fields).wrong(_ORIGINAL, "above 1")
    factor = section.positive_float("factor", fields.positive_int("max_position_embeddings") / original)
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return RopeConfig(
        theta=theta,
        scaling="longrope",
        parameters={_ORIGINAL: original},
        short_factors=section.positive_floats("short_factor"),
        long_factors=section.positive_floats("long_factor"),
        attention_factor=section.positive_float("attention_factor", attention),
    )


def rope_from_gguf(
    fields: Fields, prefix: str, factors: Mapping[str, tuple[float, ...]], *, default_theta: float = DEFAULT_THETA
) -> RopeConfig:
    """Rope as llama.cpp reads it; `factors` are the values of those of `FACTOR_TENSORS` that the architecture uses.

    A factor without a type is linear; `rope.scale_linear` is the factor's older name; longrope is known by its tensors.
    """
    theta = fields.positive_float(prefix + "rope.freq_base", default_theta)
    scaling = prefix + "rope.scaling."
    kind = fields.text(scaling + "type", "longrope" if LONG_FACTORS in factors else "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise fields.unsupported(
            scaling + "type", "none, linear, yarn, longrope, and llama3 (as tensor 'rope_freqs.weight')"
        )
    attention_factor = fields.positive_float(scaling + "attn_factor", 1.0)
    if attention_factor != 1.0 and kind != "longrope":
        raise fields.unsupported(scaling + "attn_factor", "1")
    if kind == "longrope":
        return _gguf_longrope(fields, prefix, factors, theta, attention_factor)
    factor_name = scaling + "factor"
    if fields.get(factor_name) is None:
        factor_name = prefix + "rope.scale_linear"
    factor = 1.0 if kind == "none" or fields.get(factor_name) == 0 else fields.positive_float(factor_name, 1.0)
    if (divisors := factors.get(FREQUENCY_FACTORS)) is not None:
        if factor != 1.0:
            raise UnsupportedError(
                f"{fields.source}: {factor_name} and tensor '{FREQUENCY_FACTORS}' together are not supported"
            )
        return RopeConfig(theta=theta, scaling="factors", frequency_factors=divisors)
    if kind == "yarn":
        return _gguf_yarn(fields, prefix, theta, factor)
    if factor == 1.0:
        return RopeConfig(theta=theta)
    return RopeConfig(theta=theta, scaling="linear", parameters={"factor": factor})


def _gguf_yarn(fields: Fields, prefix: str, theta: float, factor: float) -> RopeConfig:
    scaling = prefix + "rope.scaling."
    for name in ("yarn_ext_factor", "yarn_attn_factor"):
        if fields.get(scaling + name) not in (None, -1, 1):
            raise fields.unsupported(scaling + name, "1")
    if fields.get(scaling + "yarn_log_multiplier") not in (None, 0):
        raise fields.unsupported(scaling + "yarn_log_multiplier", "0")
    return RopeConfig(
        theta=theta,
        scaling="yarn",
        parameters={
            "factor": factor,
            "beta_fast": fields.positive_float(scaling + "yarn_beta_fast", 32.0),
            "beta_slow": fields.positive_float(scaling + "yarn_beta_slow", 1.0),
            _ORIGINAL: float(_gguf_original_length(fields, prefix)),
            "truncate": 1.0,
        },
        attention_factor=_magnitude(factor),
    )


def _gguf_longrope(
    fields: Fields, prefix: str, factors: Mapping[str, tuple[float, ...]], theta: float, attention_factor: float
) -> RopeConfig:
    missing = [name for name in (LONG_FACTORS, SHORT_FACTORS) if name not in factors]
    if missing:
        raise UnsupportedError(f"{fields.source}: rope scaling longrope without tensor {missing[0]!r} is not supported")
    return RopeConfig(
        theta=theta,
        scaling="longrope",
        parameters={_ORIGINAL: float(_gguf_original_length(fields, prefix))},
        short_factors=factors[SHORT_FACTORS],
        long_factors=factors[LONG_FACTORS],
        attention_factor=attention_factor,
    )


def _gguf_original_length(fields: Fields, prefix: str) -> int:
    return fields.positive_int(
        prefix + "rope.scaling.original_context_length", fields.positive_int(prefix + "context_length")
    )
