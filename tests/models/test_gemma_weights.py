"""Gemma 3 270M with its real weights: GGUF and Hugging Face form, both executors, against transformers in float32."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.support import PagedDriver, executor_greedy, transformers_logits
from noria.files.sources import open_model
from noria.ops.native import NativeExecutor, why_unavailable
from noria.ops.reference import TorchExecutor

pytestmark = pytest.mark.full

LENGTHS = (1, 20, 700)  # the window is of 512
NUM_GREEDY_TOKENS = 64
TOLERANCE = 2e-3  # of logits up to some tens, after 18 layers; a wrong window or rope is off by units


@pytest.fixture(scope="module")
def judge(gemma_path: Path) -> Any:
    """transformers' reading of the same file, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            str(gemma_path.parent), gguf_file=gemma_path.name, dtype=torch.float32
        )
    return model.eval()


@pytest.fixture(scope="module")
def directory(judge: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma")
    judge.hf_quantizer, judge.is_quantized = None, False
    if hasattr(judge.config, "quantization_config"):
        del judge.config.quantization_config
    judge.save_pretrained(path)
    return path


@pytest.mark.parametrize("executor_class", [TorchExecutor, NativeExecutor])
@pytest.mark.parametrize("form", ["gguf", "huggingface"])
def test_logits_and_greedy_tokens_equal_transformers(
    form: str, executor_class: Any, judge: Any, gemma_path: Path, directory: Path
) -> None:
    if executor_class is NativeExecutor and (reason := why_unavailable()):
        pytest.skip(reason)
    files = open_model(gemma_path if form == "gguf" else directory)
    driver = PagedDriver(executor_class(files, dtype="float32"), num_blocks=96, block_size=16)
    rng = np.random.default_rng(5)
    prompts = [[2, *rng.integers(1_000, 200_000, length - 1).tolist()] for length in LENGTHS]
    for prompt, ours in zip(prompts, driver.logits(prompts, [256] * len(prompts)), strict=True):
        np.testing.assert_allclose(ours, transformers_logits(judge, prompt), rtol=0, atol=TOLERANCE)
    for prompt, answer in zip(prompts, executor_greedy(driver, prompts, NUM_GREEDY_TOKENS), strict=True):
        chosen = transformers_logits(judge, prompt + answer)[len(prompt) - 1 : -1].argmax(-1)
        assert answer == chosen.tolist(), f"a prompt of {len(prompt)} tokens"
