"""Reading a parameter's values: each source tensor in turn, in the layout the models expect.

Called by executors while they load, one source at a time, so that no more than one tensor is held beside what is
already loaded. Numpy only; converting to a device's type is the executor's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from noria.errors import ModelFileError
from noria.files.model import HostTensor, ModelFiles
from noria.weights.plan import Parameter, Source


def read_sources(files: ModelFiles, parameter: Parameter) -> Iterator[HostTensor]:
    """Yields the values of each source, in stacking order. Raises `ModelFileError`."""
    for source in parameter.sources:
        yield read_source(files, source)


def read_source(files: ModelFiles, source: Source) -> HostTensor:
    tensor = files.read(source.tensor)
    if tensor.data.shape != source.shape:
        raise ModelFileError(
            f"{files.tensors[source.tensor].file}: tensor {source.tensor} was read with shape "
            f"{list(tensor.data.shape)}, expected {list(source.shape)}"
        )
    if source.interleaved_heads is not None:
        tensor = HostTensor(split_halves(tensor.data, source.interleaved_heads), tensor.dtype)
    return HostTensor(_as_float32(tensor) + np.float32(source.added), "float32") if source.added else tensor


def _as_float32(tensor: HostTensor) -> npt.NDArray[np.float32]:
    if tensor.dtype == "bfloat16":
        return (tensor.data.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(tensor.data, dtype=np.float32)


def split_halves(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Reorders the rows of a projection from rotary pairs side by side to pairs half a head apart.

    rows: [num_heads * head_dim, ...]. Within each head, rows 0, 1, 2, 3, ... are the pairs (0, 1), (2, 3), ...; in the
    result the first members of all pairs come first, then the second members, as Hugging Face and our ops have them.
    """
    paired = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [heads, pairs, 2, ...]
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)
