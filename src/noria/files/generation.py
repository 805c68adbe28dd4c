"""How a model's makers want its tokens sampled where a request does not say.

Used by `noria.files.huggingface` (`generation_config.json`), `noria.files.gguf` (`general.sampling.*`), and whoever
starts a model. The names are those of `noria.sampling.SamplingParams`. Not taken over: `do_sample` (servers sample
unless asked not to), lengths, and what belongs to other ways of decoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from noria.errors import ModelFileError, RequestError
from noria.files.fields import Fields
from noria.sampling import SamplingParams

if TYPE_CHECKING:
    from noria.files.model import ModelFiles

_JSON_NAMES: Final = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_GGUF_NAMES: Final = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def read_json_defaults(fields: Fields) -> dict[str, Any]:
    """From a parsed `generation_config.json`. Raises `ModelFileError` for a value that cannot be honoured."""
    return _read(fields, _JSON_NAMES)


def read_gguf_defaults(fields: Fields) -> dict[str, Any]:
    """From the metadata of a GGUF file. Raises `ModelFileError` for a value that cannot be honoured."""
    return _read(fields, _GGUF_NAMES)


def sampling_defaults(files: ModelFiles, generation_config: str) -> Mapping[str, Any]:
    """The model's own defaults, or none if the option `generation_config` says "none"."""
    return files.sampling_defaults if generation_config == "auto" else {}


def describe_defaults(files: ModelFiles, defaults: Mapping[str, Any]) -> str:
    """One line for people: what requests get that do not say otherwise, and at which tokens answers end."""
    ends = ", ".join(map(str, files.eos_token_ids)) or "none"
    if not defaults:
        return f"sampling defaults: Noria's own; end of sequence: token ids {ends}"
    named = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    return f"sampling defaults of the model (--generation-config none to leave them): {named}; end of sequence: " \
        f"token ids {ends}"  # fmt: skip


def _read(fields: Fields, names: Mapping[str, str]) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for theirs, ours in names.items():
        value: Any = fields.get(theirs)
        if value is None:
            continue
        if type(value) is float and ours == "top_k" and value.is_integer():
            value = int(value)
        try:
            SamplingParams(**{ours: value})
        except RequestError as error:
            raise ModelFileError(
                f"{fields.source}: field {theirs!r} cannot be a default of sampling: {error}. Mend it, or start with "
                "--generation-config none"
            ) from error
        # GGUF keeps float32: 0.95 should not be shown, or sampled with, as 0.949999988.
        defaults[ours] = float(f"{value:.7g}") if type(value) is float else value
    return defaults
