"""What `quantization_config` of a `config.json` says about the weights: `read_quantization`.

Used by `noria.files.huggingface`. Only 8-bit floating point ("fp8") can be read; every other method is refused by its
name, because its tensors would be taken for something else or not be found at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from noria.errors import UnsupportedError
from noria.files.fields import Fields, short

QUANTIZATION_FIELDS: Final = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class Fp8Quantization:
    """Weights in 8 bits with a scale for each tensor, row, or block of `block_size` rows and columns."""

    block_size: tuple[int, int] | None


def read_quantization(fields: Fields) -> Fp8Quantization | None:
    """None where the weights are stored as they are. Raises `UnsupportedError` naming the method."""
    section = next((section for name in QUANTIZATION_FIELDS if (section := fields.section(name)) is not None), None)
    if section is None:
        return None
    method = section.get("quant_method")
    if method == "fp8":
        return Fp8Quantization(_block_size(section))
    raise UnsupportedError(
        f"{fields.source}: the weights are quantised with {short(method)} ('quant_method' in 'quantization_config'), "
        "which is not supported; supported are F32, F16, BF16 and fp8 weights in safetensors files, and GGUF files. "
        "Use a GGUF file of this model, or its unquantised weights"
    )


def _block_size(section: Fields) -> tuple[int, int] | None:
    sizes = section.get("weight_block_size")
    if sizes is None:
        return None
    if not isinstance(sizes, list) or len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise section.wrong("weight_block_size", "two positive integers")
    return sizes[0], sizes[1]
