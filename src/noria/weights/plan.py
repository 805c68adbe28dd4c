"""Which tensors of a file become which parameters of a model: `WeightPlan`, checked before anything is loaded.

A `Parameter` is what a model function is given: it has a canonical name (`layers.3.qkv.weight`) whatever the file
format, and is made of one or several tensors of the file stacked along their first dimension. Used by
`noria.models.registry` and by executors; no torch. It does not read values, save to tell whether two heads are equal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from noria.errors import ModelFileError
from noria.files.model import ModelFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One tensor of the file. `shape` is what the model's configuration makes us expect."""

    tensor: str
    shape: tuple[int, ...]
    interleaved_heads: int | None = None
    """Set when the file stores each of that many heads with rotary pairs side by side (GGUF's llama q and k)."""
    added: float = 0.0
    """Added to every value at load, in float32: 1 where a norm multiplies by 1 + weight and the file has the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a model: `sources` stacked along the first dimension."""

    name: str
    sources: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.sources[0].shape
        return (sum(source.shape[0] for source in self.sources), *first[1:])

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """All parameters of a model in load order. A tied head is no parameter: the embedding serves."""

    parameters: tuple[Parameter, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter by its canonical name."""
        return {parameter.name: parameter.shape for parameter in self.parameters}

    @property
    def num_elements(self) -> int:
        return sum(parameter.num_elements for parameter in self.parameters)

    @property
    def sources(self) -> list[Source]:
        return [source for parameter in self.parameters for source in parameter.sources]


def check_complete(plan: WeightPlan, files: ModelFiles, *, ignored: Iterable[str] = ()) -> None:
    """Raises `ModelFileError` if a tensor is missing or misshapen, or if the file has one that the plan does not use.

    `ignored` are regular expressions of tensor names that may be there without being used.
    """
    tensors = files.tensors
    missing = [source.tensor for source in plan.sources if source.tensor not in tensors]
    if missing:
        raise ModelFileError(f"{files.path}: {_count(missing, 'tensor')} missing: {_some(missing)}")
    for source in plan.sources:
        info = tensors[source.tensor]
        if tuple(info.shape) != source.shape:
            raise ModelFileError(
                f"{info.file}: tensor {source.tensor} has shape {list(info.shape)}, "
                f"but the model's configuration asks for {list(source.shape)}"
            )
    used = dict.fromkeys(source.tensor for source in plan.sources)
    patterns = [re.compile(pattern) for pattern in ignored]
    extra = [name for name in tensors if name not in used and not any(p.search(name) for p in patterns)]
    if extra:
        raise ModelFileError(
            f"{tensors[extra[0]].file}: {_count(extra, 'tensor')} that architecture "
            f"{files.config.architecture!r} does not use: {_some(extra)}; the file does not match its configuration"
        )


def equal_bits(files: ModelFiles, first: str, second: str) -> bool:
    """Whether two tensors of the file hold the same values, bit for bit."""
    a, b = files.tensors[first], files.tensors[second]
    if tuple(a.shape) != tuple(b.shape) or a.encoding != b.encoding:
        return False
    return np.array_equal(_bits(files, first), _bits(files, second))


def _bits(files: ModelFiles, name: str) -> npt.NDArray[np.unsignedinteger[Any]]:
    data = files.read(name).data
    return data.view(np.uint32 if data.dtype.itemsize == 4 else np.uint16)


def _count(names: list[str], noun: str) -> str:
    return f"{len(names)} {noun}{'' if len(names) == 1 else 's'}"


def _some(names: list[str], limit: int = 5) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
