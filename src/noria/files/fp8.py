"""Weights of 8-bit floating point in safetensors files: `decode_fp8`, and the scales that lie beside them.

Used by `noria.files.safetensors` and `noria.files.huggingface`. A weight `NAME.weight` may have a tensor
`NAME.weight_scale` or `NAME.weight_scale_inv` that it is multiplied with (both names are in use, and mean the same):
one number, one for each row, or one for each block of rows and columns. Scales of activations are not used: activations
are not quantised here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from noria.errors import ModelFileError
from noria.files.model import TensorInfo

_SCALE_SUFFIXES: Final = ("_scale_inv", "_scale")
_ACTIVATION_SCALES: Final = (".input_scale", ".activation_scale")


def _e4m3_values() -> npt.NDArray[np.float32]:
    """Sign, 4 bits of exponent around 7, 3 bits of fraction; no infinities, and all bits set is not a number."""
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, bits & 7
    values = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    values[bits & 127 == 127] = np.nan
    return np.where(bits >> 7, -values, values).astype(np.float32)


def _e5m2_values() -> npt.NDArray[np.float32]:
    """The upper half of a float16."""
    return (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)


_VALUES: Final[dict[str, npt.NDArray[np.float32]]] = {"F8_E4M3": _e4m3_values(), "F8_E5M2": _e5m2_values()}
FP8_ENCODINGS: Final = tuple(_VALUES)


def decode_fp8(bits: npt.NDArray[np.uint8], encoding: str) -> npt.NDArray[np.float32]:
    """The numbers that the bytes stand for, in the same shape."""
    values: npt.NDArray[np.float32] = _VALUES[encoding][bits]
    return values


def scales_of(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """For each 8-bit weight that has a tensor of scales: the name of that tensor."""
    found: dict[str, str] = {}
    for name, info in tensors.items():
        if info.encoding in FP8_ENCODINGS:
            scale = next((name + suffix for suffix in _SCALE_SUFFIXES if name + suffix in tensors), None)
            if scale is not None:
                found[name] = scale
    return found


def is_activation_scale(name: str, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether a tensor is the scale of what goes into an 8-bit weight."""
    for suffix in _ACTIVATION_SCALES:
        if name.endswith(suffix):
            weight = tensors.get(name.removesuffix(suffix) + ".weight")
            return weight is not None and weight.encoding in FP8_ENCODINGS
    return False


def scaled(
    values: npt.NDArray[np.float32],
    scale: npt.NDArray[np.float32],
    info: TensorInfo,
    block_size: tuple[int, int] | None,
) -> npt.NDArray[np.float32]:
    """`values` times their scale. `block_size`: rows and columns that share a scale, where each block has its own.

    Raises `ModelFileError` if the scales do not fit the tensor.
    """
    if scale.size == 1:
        return values * scale.reshape(())
    if values.ndim == 2:
        rows, columns = values.shape
        if scale.shape in ((rows,), (rows, 1)):
            return values * scale.reshape(rows, 1)
        if block_size is not None:
            high, wide = block_size
            if scale.shape == (-(-rows // high), -(-columns // wide)):
                high, wide = min(high, rows), min(wide, columns)
                spread: npt.NDArray[np.float32] = scale.repeat(high, axis=0)[:rows].repeat(wide, axis=1)[:, :columns]
                return values * spread
    raise ModelFileError(
        f"{info.file}: the scales of tensor {info.name!r} of shape {list(info.shape)} have the shape "
        f"{list(scale.shape)}; supported are one for all, one for each row, or one for each block of the "
        "'weight_block_size' in config.json"
    )
