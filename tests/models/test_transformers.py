"""Tiny random checkpoints: float32 logits within 1e-4 of transformers', through the paged executor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from models.support import LLAMA3, TINY, PagedDriver, pack, random_prompts, tiny_model, transformers_logits
from noria.files.sources import open_model
from noria.ops.reference import TorchExecutor

TOLERANCE = 1e-4
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
SHARDED = {"max_shard_size": "50KB"}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, {}),
    "llama-sharded": ("llama", {}, SHARDED),
    "llama-tied-sharded": ("llama", {"tie_word_embeddings": True}, SHARDED),
    "llama-mha": ("llama", {"num_key_value_heads": 4}, {}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}, {}),
    "llama-head-dim": ("llama", {"head_dim": 24}, {}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}, {}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}, {}),
    "llama-llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 50_000.0}}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}, {}),
    "qwen2-sharded": ("qwen2", {}, SHARDED),
    "qwen2-mha": ("qwen2", {"num_key_value_heads": 4}, {}),
    "qwen2-head-dim": ("qwen2", {"head_dim": 24}, {}),
    "qwen2-linear": ("qwen2", {"rope_parameters": LINEAR}, {}),
    "qwen2-llama3": ("qwen2", {"rope_parameters": {**LLAMA3, "rope_theta": 50_000.0}}, {}),
}
LENGTHS = (1, 5, 16, 150, 33)
CHUNKS = (1, 2, 100, 66, 7)  # tokens per step; 100 and 66 make tiles of every length up to a full one


def save(model: transformers.PreTrainedModel, path: Path, **options: Any) -> Path:
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(path, **options)
    return path


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    architecture, overrides, options = CASES[case]
    model = tiny_model(architecture, **overrides)
    save(model, tmp_path, **options)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 if options else True

    executor = TorchExecutor(open_model(tmp_path), dtype="float32", threads=1)
    driver = PagedDriver(executor, num_blocks=96)
    prompts = random_prompts(LENGTHS)
    together = driver.logits(prompts, CHUNKS)
    whole = driver.logits(prompts, [512] * len(prompts))
    for prompt, chunked, unchunked in zip(prompts, together, whole, strict=True):
        expected = transformers_logits(model, prompt)
        (alone,) = driver.logits([prompt], [19])
        for ours in (chunked, unchunked, alone):
            np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE)


def test_rope_scalings_are_told_apart() -> None:
    """The comparison above would be worth nothing if the scalings gave logits within its tolerance of each other."""
    (prompt,) = random_prompts([100])
    scalings = ({}, {"rope_parameters": LINEAR}, {"rope_parameters": {**LLAMA3, "rope_theta": 10_000.0}})
    plain, linear, llama3 = (transformers_logits(tiny_model("llama", **s), prompt) for s in scalings)
    assert min(np.abs(a - b).max() for a, b in ((plain, linear), (plain, llama3), (linear, llama3))) > 100 * TOLERANCE


def test_biases_are_found_in_the_tensors(tmp_path: Path) -> None:
    """Every linear may have one, whatever the configuration says of it."""
    model = tiny_model("llama", attention_bias=True, mlp_bias=True)
    save(model, tmp_path)
    config = tmp_path / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({name: value for name, value in fields.items() if not name.endswith("_bias")}))
    (prompt,) = random_prompts([40])
    executor = TorchExecutor(open_model(tmp_path), dtype="float32", threads=1)
    (ours,) = PagedDriver(executor).logits([prompt], [40])
    np.testing.assert_allclose(ours, transformers_logits(model, prompt), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_files_widen_exactly(stored: torch.dtype, tmp_path: Path) -> None:
    save(tiny_model("llama").to(stored), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    (prompt,) = random_prompts([40])
    executor = TorchExecutor(open_model(tmp_path), dtype="float32", threads=1)
    (ours,) = PagedDriver(executor).logits([prompt], [40])
    np.testing.assert_allclose(ours, transformers_logits(model, prompt), rtol=0, atol=TOLERANCE)


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    """Closer than transformers in bfloat16: the residual stream and the scores keep their bits."""
    model = tiny_model("qwen2")
    save(model, tmp_path)
    (prompt,) = random_prompts([200])
    executor = TorchExecutor(open_model(tmp_path), dtype="bfloat16", threads=1)
    (ours,) = PagedDriver(executor).logits([prompt], [64])
    expected = transformers_logits(model, prompt)
    theirs = transformers_logits(model.to(torch.bfloat16), prompt)
    assert np.abs(ours - expected).mean() < np.abs(theirs - expected).mean()
    assert executor.kv_bytes_per_token == 2 * 3 * 2 * 16 * 2  # key and value, layers, heads, head_dim, bytes


def test_nothing_unwritten_is_read(tmp_path: Path) -> None:
    """A pool full of NaN, as fresh memory may be, gives the same logits."""
    model = tiny_model("llama")
    save(model, tmp_path)
    executor = TorchExecutor(open_model(tmp_path), dtype="float32", threads=1)
    driver = PagedDriver(executor)
    for pool in executor._ops._keys + executor._ops._values:
        pool[1:] = float("nan")
    prompts = random_prompts([1, 30, 61])
    for prompt, ours in zip(prompts, driver.logits(prompts, [1, 7, 33]), strict=True):
        np.testing.assert_allclose(ours, transformers_logits(model, prompt), rtol=0, atol=TOLERANCE)


def test_logits_only_of_the_rows_that_want_them(tmp_path: Path) -> None:
    model = tiny_model("llama")
    save(model, tmp_path)
    executor = TorchExecutor(open_model(tmp_path), dtype="float32", threads=1)
    executor.allocate_kv(16, 4)
    first, second = random_prompts([6, 3])
    batch = pack([(first, 0, [5, 2]), (second, 0, [9])], 4, wanted="last")
    logits = executor.forward(batch)
    assert logits.shape == (2, TINY["vocab_size"])
    assert logits.dtype == np.float32
    for row, prompt in enumerate((first, second)):
        np.testing.assert_allclose(logits[row], transformers_logits(model, prompt)[-1], rtol=0, atol=TOLERANCE)
    none = pack([(first, 3, [5, 2])], 4, wanted="none")
    assert executor.forward(none).shape == (0, TINY["vocab_size"])
