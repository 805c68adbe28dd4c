"""Every architecture this version can run: how its weights are found and which function computes it.

`find` is called by executors. A new architecture is a new entry here, and a new module beside `decoder.py` if it
computes something that the decoder does not; `docs/models.md` goes through one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from noria.errors import UnsupportedError
from noria.files.model import ModelConfig, ModelFiles
from noria.models import decoder
from noria.ops.base import B, Ops, T
from noria.ops.rope import Float32Array
from noria.weights.decoder import plan_decoder
from noria.weights.plan import WeightPlan


class Bind(Protocol):
    """Puts parameters, by canonical name, into the structure that `Forward` takes."""

    def __call__(self, config: ModelConfig, parameters: Mapping[str, T]) -> decoder.Decoder[T]: ...


class Forward(Protocol):
    """A model: a pure function of ops, weights and batch."""

    def __call__(self, ops: Ops[T, B], model: decoder.Decoder[T], batch: B) -> decoder.Outputs[T]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What an executor needs to run one kind of model, in the order in which it needs it."""

    name: str
    plan: Callable[[ModelFiles], WeightPlan]
    """Maps the file's tensors to parameters and checks that they are complete. Raises `ModelFileError`."""
    constants: Callable[[ModelConfig], dict[str, Float32Array]]
    """Parameters that no file holds, by canonical name."""
    bind: Bind
    forward: Forward


def _decoder(name: str) -> Architecture:
    """An architecture that is a `decoder.Decoder`: its weight map is found by its name."""
    return Architecture(
        name=name, plan=plan_decoder, constants=decoder.constants, bind=decoder.bind, forward=decoder.forward
    )


_ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        _decoder("llama"),
        _decoder("qwen2"),
        _decoder("qwen3"),
        _decoder("mistral"),
        _decoder("gemma2"),
        _decoder("gemma3"),
        _decoder("phi3"),
        _decoder("smollm3"),
        _decoder("granite"),
    )
}


def supported() -> tuple[str, ...]:
    """Names of all architectures, in a stable order."""
    return tuple(_ARCHITECTURES)


def find(architecture: str) -> Architecture:
    """The architecture of that name. Raises `UnsupportedError` that lists what there is."""
    found = _ARCHITECTURES.get(architecture)
    if found is None:
        raise UnsupportedError(f"architecture {architecture!r} is not supported; supported: {', '.join(supported())}")
    return found
