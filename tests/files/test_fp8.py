"""fp8 weights in safetensors files with their scales, and methods of quantisation that are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from files.checkpoints import TINY_LLAMA_JSON, Array, write_directory, write_safetensors
from noria.errors import ModelFileError, UnsupportedError
from noria.files.fp8 import decode_fp8
from noria.files.huggingface import HuggingFaceModel

WEIGHT = "model.layers.0.mlp.up_proj.weight"
BITS = np.random.default_rng(3).integers(0, 0x78, (24, 16), dtype=np.uint8)


def model_of(path: Path, tensors: dict[str, tuple[str, Array]], quantization: Any = None) -> HuggingFaceModel:
    write_directory(path, TINY_LLAMA_JSON | ({} if quantization is None else {"quantization_config": quantization}))
    write_safetensors(path / "model.safetensors", tensors)
    return HuggingFaceModel(path)


def test_numbers_are_those_of_the_formats() -> None:
    """Values from the formats' definition (arXiv 2209.05433, table 1); all 256 are compared with torch's elsewhere."""
    e4m3 = np.array([0x00, 0x80, 0x01, 0x07, 0x08, 0x38, 0xB8, 0x7E, 0xFE], np.uint8)
    np.testing.assert_array_equal(decode_fp8(e4m3, "F8_E4M3"), [0, -0.0, 2**-9, 7 * 2**-9, 2**-6, 1, -1, 448, -448])
    assert np.isnan(decode_fp8(np.array([0x7F, 0xFF], np.uint8), "F8_E4M3")).all()
    e5m2 = np.array([0x00, 0x01, 0x03, 0x04, 0x3C, 0xBC, 0x7B, 0x7C], np.uint8)
    np.testing.assert_array_equal(decode_fp8(e5m2, "F8_E5M2"), [0, 2**-16, 3 * 2**-16, 2**-14, 1, -1, 57344, np.inf])


@pytest.mark.parametrize("encoding", ["F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (24,), (24, 1), (3, 2)])
@pytest.mark.parametrize("stored", ["F32", "BF16", "F16"])
def test_weights_are_multiplied_with_their_scales(
    tmp_path: Path, encoding: str, suffix: str, shape: tuple[int, ...], stored: str
) -> None:
    scale = 2.0 ** np.random.default_rng(4).integers(-6, 3, shape).astype(np.float32)
    kept = {"F32": scale, "F16": scale.astype(np.float16), "BF16": (scale.view(np.uint32) >> 16).astype(np.uint16)}
    block = (8, 10)  # the last column of blocks is narrower
    tensors = {
        WEIGHT: (encoding, BITS),
        WEIGHT + suffix: (stored, np.asarray(kept[stored])),
        "model.layers.0.mlp.up_proj.input_scale": ("F32", np.ones((), np.float32)),
        "model.norm.weight": ("BF16", np.zeros(16, np.uint16)),
    }
    model = model_of(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": list(block)})
    assert set(model.tensors) == {WEIGHT, "model.norm.weight"}, "scales are no weights"
    expected = decode_fp8(BITS, encoding)
    for i in range(24):
        for j in range(16):
            per_row = shape in ((24,), (24, 1))
            own = scale[i // 8, j // 10] if shape == (3, 2) else scale.reshape(-1)[i if per_row else 0]
            expected[i, j] *= own
    read = model.read(WEIGHT)
    assert read.dtype == "float32"
    np.testing.assert_array_equal(read.data, expected)


def test_without_scales_the_numbers_are_the_weights(tmp_path: Path) -> None:
    model = model_of(tmp_path, {WEIGHT: ("F8_E4M3", BITS)})
    np.testing.assert_array_equal(model.read(WEIGHT).data, decode_fp8(BITS, "F8_E4M3"))
    assert model.raw(WEIGHT).encoding == "F8_E4M3"


def test_a_quantised_checkpoint_that_lacks_a_scale_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=rf"model\.safetensors: tensor '{WEIGHT}' .*neither .*_scale_inv'"):
        model_of(tmp_path, {WEIGHT: ("F8_E4M3", BITS)}, {"quant_method": "fp8"})


@pytest.mark.parametrize("shape", [(2,), (3, 3), (2, 2), (24, 16)])
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = {WEIGHT: ("F8_E4M3", BITS), WEIGHT + "_scale_inv": ("F32", np.ones(shape, np.float32))}
    model = model_of(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [8, 10]})
    with pytest.raises(ModelFileError, match=rf"scales of tensor '{WEIGHT}'"):
        model.read(WEIGHT)


@pytest.mark.parametrize("size", [[8], [8, 0], "8", [8, 8.0]])
def test_a_block_size_that_is_none_is_refused(tmp_path: Path, size: Any) -> None:
    with pytest.raises(ModelFileError, match="'weight_block_size' should be two positive integers"):
        model_of(tmp_path, {WEIGHT: ("F8_E4M3", BITS)}, {"quant_method": "fp8", "weight_block_size": size})


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq", "awq", "bitsandbytes", "mxfp4", None])
def test_other_methods_are_refused_by_name(tmp_path: Path, method: str | None) -> None:
    packed = {"model.layers.0.mlp.up_proj.qweight": ("I32", np.zeros((2, 24), np.int32))}
    for field in ("quantization_config", "compression_config"):
        path = tmp_path / field
        write_directory(path, TINY_LLAMA_JSON | {field: {"quant_method": method}})
        write_safetensors(path / "model.safetensors", packed)
        with pytest.raises(UnsupportedError) as caught:
            HuggingFaceModel(path)
        assert f"quantised with {method!r}" in str(caught.value)
        assert "GGUF" in str(caught.value)
