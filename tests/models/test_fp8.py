"""fp8 checkpoints as torch writes them: every number, and a model whose weights are quantised with scales."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.support import PagedDriver, random_prompts, tiny_model, transformers_logits
from noria.files.fp8 import decode_fp8
from noria.files.sources import open_model
from noria.ops.reference import TorchExecutor

DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


@pytest.mark.parametrize("encoding", DTYPES)
def test_all_256_numbers_are_torchs(encoding: str) -> None:
    bits = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(bits).view(DTYPES[encoding]).float().numpy()
    np.testing.assert_array_equal(decode_fp8(bits, encoding), expected)


def quantise(directory: Path, encoding: str, block: int | None) -> dict[str, torch.Tensor]:
    """Puts the matrices of all layers into fp8, with a scale each or one for each block; returns what they then are."""
    path = directory / "model.safetensors"
    tensors, meant = load_file(path), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name]
        rows, columns = weight.shape
        high, wide = (block, block) if block else (rows, columns)
        blocks = [[weight[i : i + high, j : j + wide] for j in range(0, columns, wide)] for i in range(0, rows, high)]
        scale = torch.stack([torch.stack([b.abs().max() / 400 for b in line]) for line in blocks])
        spread = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        tensors[name] = (weight / spread).to(DTYPES[encoding])
        tensors[f"{name}_scale_inv" if block else f"{name}_scale"] = scale if block else scale.reshape(())
        meant[name] = tensors[name].float() * spread
    save_file(tensors, path)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"} | ({"weight_block_size": [block, block]} if block else {})
    (directory / "config.json").write_text(json.dumps(config))
    return meant


@pytest.mark.parametrize("encoding", DTYPES)
@pytest.mark.parametrize("block", [None, 40])
def test_a_quantised_model_runs_as_the_weights_it_stands_for(tmp_path: Path, encoding: str, block: int | None) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    before = transformers_logits(model, random_prompts([20])[0])
    missing = model.load_state_dict(quantise(tmp_path, encoding, block), strict=False)
    assert not missing.unexpected_keys
    prompts = random_prompts([20, 33])
    expected = [transformers_logits(model, prompt) for prompt in prompts]
    assert np.abs(expected[0] - before).max() > 1e-3, "the encoding should show"
    found = PagedDriver(TorchExecutor(open_model(tmp_path), dtype="float32")).logits(prompts, [20, 16])
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
