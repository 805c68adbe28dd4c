"""Every architecture this version can run: how its weights are found and which function computes it.

`find` is called by executors. A new architecture is a new entry here, and a new module beside `decoder.py` if it
computes something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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


_ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            name="llama",
            plan=partial(plan_decoder, qkv_bias=None, gguf_interleaved=True),
            constants=decoder.constants,
            bind=decoder.bind,
            forward=decoder.forward,
        ),
        Architecture(
            name="qwen2",
            plan=partial(plan_decoder, qkv_bias=True, gguf_interleaved=False),
            constants=decoder.constants,
            bind=decoder.bind,
            forward=decoder.forward,
        ),
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
