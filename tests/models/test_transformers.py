"""Tiny random checkpoints: float32 logits within 1e-4 of transformers', through the paged executor."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from models.support import (
    ARCHITECTURES,
    LLAMA3,
    LONGROPE,
    TINY,
    WINDOW,
    PagedDriver,
    executor_greedy,
    pack,
    random_prompts,
    tiny_model,
    transformers_greedy,
    transformers_logits,
)
from noria.errors import OptionError
from noria.files.sources import open_model
from noria.ops.native import NativeExecutor, why_unavailable
from noria.ops.reference import TorchExecutor

TOLERANCE = 1e-4
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0}
SHARDED = {"max_shard_size": "50KB"}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, {}),
    "llama-sharded": ("llama", {}, SHARDED),
    "llama-tied-sharded": ("llama", {"tie_word_embeddings": True}, SHARDED),
    "llama-mha": ("llama", {"num_key_value_heads": 4}, {}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}, {}),
    "llama-head-dim": ("llama", {"head_dim": 32}, {}),
    "llama-head-dim-24": ("llama", {"head_dim": 24}, {}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}, {}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}, {}),
    "llama-llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 50_000.0}}, {}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}, {}),
    "llama-yarn-untruncated": (
        "llama",
        {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 16, "beta_slow": 2, "attention_factor": 0.8}},
        {},
    ),
    "qwen2": ("qwen2", {}, {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}, {}),
    "qwen2-sharded": ("qwen2", {}, SHARDED),
    "qwen2-mha": ("qwen2", {"num_key_value_heads": 4}, {}),
    "qwen2-head-dim": ("qwen2", {"head_dim": 32}, {}),
    "qwen2-linear": ("qwen2", {"rope_parameters": LINEAR}, {}),
    "qwen2-llama3": ("qwen2", {"rope_parameters": {**LLAMA3, "rope_theta": 50_000.0}}, {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}, {}),
    "qwen3": ("qwen3", {}, {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}, {}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}, {}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}, {}),
    "mistral": ("mistral", {}, {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}, {}),
    "mistral-head-dim": ("mistral", {"head_dim": 32}, {}),
    "gemma2": ("gemma2", {}, {}),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}, {}),
    "gemma3": ("gemma3", {}, {}),
    "gemma3-mqa": ("gemma3", {"num_key_value_heads": 1}, {}),
    "gemma3-linear": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        {},
    ),
    "phi3": ("phi3", {}, {}),
    "phi3-window": ("phi3", {"sliding_window": WINDOW}, {}),
    "phi3-partial": ("phi3", {"rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.75}}, {}),
    "granite": ("granite", {}, {}),
    "granite-tied": ("granite", {"tie_word_embeddings": True}, {}),
    "smollm3": ("smollm3", {}, {}),
    "smollm3-tied": ("smollm3", {"tie_word_embeddings": True}, {}),
    "smollm3-interval": ("smollm3", {"no_rope_layer_interval": 2}, {}),
    "smollm3-window": ("smollm3", {"use_sliding_window": True, "sliding_window": WINDOW}, {}),
}
NATIVE_LACKS = {"llama-head-dim-24": "heads have a multiple of 16 values, at most 256, not 24"}
"""Cases that the native executor refuses, and its words."""
LENGTHS = (1, 5, 16, 150, 33)
CHUNKS = (1, 2, 100, 66, 7)  # tokens per step; 100 and 66 make tiles of every length up to a full one
NUM_GREEDY_TOKENS = 64

EXECUTORS: dict[str, tuple[Any, int]] = {"torch": (TorchExecutor, 4), "native": (NativeExecutor, 16)}
"""Each executor with a block size that suits it."""


@pytest.fixture(params=EXECUTORS)
def paged(request: pytest.FixtureRequest) -> Callable[..., PagedDriver]:
    """Makes the driver of an executor over the model of a directory, in float32."""
    executor_class, block_size = EXECUTORS[request.param]
    if request.param == "native" and (reason := why_unavailable()):
        pytest.skip(reason)

    def make(path: Path) -> PagedDriver:
        executor = executor_class(open_model(path), dtype="float32", threads=1)
        return PagedDriver(executor, num_blocks=384 // block_size, block_size=block_size)

    return make


def save(model: transformers.PreTrainedModel, path: Path, **options: Any) -> Path:
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(path, **options)
    return path


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(
    case: str, paged: Callable[..., PagedDriver], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    architecture, overrides, options = CASES[case]
    model = tiny_model(architecture, **overrides)
    save(model, tmp_path, **options)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 if options else True

    if request.node.callspec.params["paged"] == "native" and case in NATIVE_LACKS:
        with pytest.raises(OptionError, match=NATIVE_LACKS[case]):
            paged(tmp_path)
        return
    driver = paged(tmp_path)
    prompts = random_prompts(LENGTHS)
    together = driver.logits(prompts, CHUNKS)
    whole = driver.logits(prompts, [512] * len(prompts))
    for prompt, chunked, unchunked in zip(prompts, together, whole, strict=True):
        expected = transformers_logits(model, prompt)
        (alone,) = driver.logits([prompt], [19])
        for ours in (chunked, unchunked, alone):
            np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_transformers(architecture: str, paged: Callable[..., PagedDriver], tmp_path: Path) -> None:
    """From a prompt shorter than the window and from one that is longer."""
    model = tiny_model(architecture)
    prompts = random_prompts([7, 40])
    found = executor_greedy(paged(save(model, tmp_path)), prompts, NUM_GREEDY_TOKENS)
    assert found == [transformers_greedy(model, prompt, NUM_GREEDY_TOKENS) for prompt in prompts]
    assert all(len(set(tokens)) > 3 for tokens in found), "a model that repeats itself tells little"


@pytest.mark.parametrize(("max_model_len", "lengths"), [(48, [9, 48]), (200, [49, 120]), (None, [49, 120])])
def test_longrope_is_chosen_from_the_longest_sequence(
    max_model_len: int | None, lengths: list[int], paged: Callable[..., PagedDriver], tmp_path: Path
) -> None:
    """transformers chooses by the length of each text, so that a choice once and for all can be held against it on the
    texts for which it makes the same."""
    model = tiny_model("phi3", **LONGROPE)
    driver = paged(save(model, tmp_path))
    if max_model_len is not None:
        driver.executor.set_max_model_len(max_model_len)
    prompts = random_prompts(lengths)
    for prompt, ours in zip(prompts, driver.logits(prompts, [512, 512]), strict=True):
        np.testing.assert_allclose(ours, transformers_logits(model, prompt), rtol=0, atol=TOLERANCE)
    found = executor_greedy(driver, prompts[1:], 4 if max_model_len == 48 else NUM_GREEDY_TOKENS)
    if max_model_len != 48:
        assert found == [transformers_greedy(model, prompts[1], NUM_GREEDY_TOKENS)]


def test_rope_scalings_are_told_apart() -> None:
    """The comparison above would be worth nothing if the scalings gave logits within its tolerance of each other."""
    (prompt,) = random_prompts([100])
    ropes = ({"rope_theta": 10_000.0}, LINEAR, {**LLAMA3, "rope_theta": 10_000.0}, YARN)
    found = [transformers_logits(tiny_model("llama", rope_parameters=rope), prompt) for rope in ropes]
    assert min(np.abs(a - b).max() for a, b in itertools.combinations(found, 2)) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("architecture", "without"),
    [
        ("mistral", {"sliding_window": None}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 16}),
        ("gemma2", {"sliding_window": 512}),
        ("gemma3", {"layer_types": ["sliding_attention"] * 7}),
        ("gemma3", {"sliding_window": 512}),
        ("phi3", LONGROPE),
        ("smollm3", {"no_rope_layers": [1] * 5}),
        ("granite", {"embedding_multiplier": 1.0}),
        ("granite", {"attention_multiplier": 0.25}),
        ("granite", {"residual_multiplier": 1.0}),
        ("granite", {"logits_scaling": 1.0}),
    ],
)
def test_what_makes_an_architecture_different_shows(architecture: str, without: dict[str, Any]) -> None:
    """Likewise: the tiny models would not agree if what an architecture has were left out."""
    (prompt,) = random_prompts([100])
    plain, other = (transformers_logits(tiny_model(architecture, **s), prompt) for s in ({}, without))
    assert np.abs(plain - other).max() > 100 * TOLERANCE


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
