"""The native executor against transformers and against itself: right, and the same bits whatever stands beside."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.support import PagedDriver, agreement, pack, random_prompts, tiny_model, transformers_logits
from noria.errors import OptionError
from noria.files.sources import open_model
from noria.ops.native import NativeExecutor
from noria.runner.executor import Float32Array

try:
    from noria.ops import _native
except ImportError:
    pytest.skip("the native executor was not built here", allow_module_level=True)
if not _native.has_avx512_bf16():
    pytest.skip("this CPU has no AVX-512 with BF16", allow_module_level=True)

SHAPES: dict[str, dict[str, Any]] = {
    "as small as can be": {},
    "nothing is a multiple of 32": {
        "hidden_size": 72, "intermediate_size": 112, "head_dim": 16, "num_attention_heads": 3,
        "num_key_value_heads": 1, "vocab_size": 141,
    },
    "intermediate size of 16 times an odd number": {"intermediate_size": 80},
    "heads of 64 in threes": {"hidden_size": 96, "head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2},
    "heads of 128": {"hidden_size": 64, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 2},
    "heads of 80": {"hidden_size": 64, "head_dim": 80, "num_attention_heads": 4, "num_key_value_heads": 4},
    "seven heads share one": {"hidden_size": 56, "head_dim": 32, "num_attention_heads": 7, "num_key_value_heads": 1},
}  # fmt: skip
LENGTHS = [1, 2, 15, 16, 17, 40, 64, 65, 130]


def driver(executor: NativeExecutor, seed: int = 0) -> PagedDriver:
    return PagedDriver(executor, num_blocks=80, block_size=16, seed=seed)


def alone(executor: NativeExecutor, prompts: list[list[int]]) -> list[Float32Array]:
    """Each prompt by itself, whole, in a fresh pool."""
    return [driver(executor).logits([prompt], [len(prompt)])[0].copy() for prompt in prompts]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_float32_logits_are_transformers(tmp_path: Path, architecture: str, shape: str) -> None:
    model = tiny_model(architecture, **SHAPES[shape])
    model.save_pretrained(tmp_path)
    executor = NativeExecutor(open_model(tmp_path), dtype="float32", threads=2)
    prompts = random_prompts(LENGTHS)
    found = driver(executor).logits(prompts, [len(prompt) for prompt in prompts])
    for prompt, logits in zip(prompts, found, strict=True):
        np.testing.assert_allclose(logits, transformers_logits(model, prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("use_amx", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_logits_are_close(tmp_path: Path, shape: str, use_amx: bool) -> None:
    """As close as bfloat16 products allow: its rounding is 2^-9, and these models are random and not forgiving."""
    _need(use_amx)
    model = tiny_model("llama", **SHAPES[shape] | {"initializer_range": 0.05})
    model.save_pretrained(tmp_path)
    executor = NativeExecutor(open_model(tmp_path), dtype="bfloat16", threads=2, use_amx=use_amx)
    prompts = random_prompts(LENGTHS)
    found = np.concatenate(driver(executor).logits(prompts, [len(prompt) for prompt in prompts]))
    expected = np.concatenate([transformers_logits(model, prompt) for prompt in prompts])
    assert agreement(expected, found).mean_kl < 2e-5


@pytest.mark.parametrize("use_amx", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", ["as small as can be", "nothing is a multiple of 32", "heads of 64 in threes"])
def test_the_same_bits_alone_among_others_in_chunks_and_in_any_block(
    tmp_path: Path, shape: str, dtype: str, use_amx: bool
) -> None:
    if dtype == "float32" and use_amx:
        pytest.skip("float32 has no tiles")
    _need(use_amx)
    tiny_model("llama", **SHAPES[shape]).save_pretrained(tmp_path)
    files = open_model(tmp_path)
    executor = NativeExecutor(files, dtype=dtype, threads=2, use_amx=use_amx)
    prompts = random_prompts(LENGTHS)
    expected = alone(executor, prompts)
    for seed, chunks in enumerate([[200] * 9, [1] * 9, [37] * 9, [1, 2, 3, 16, 5, 7, 64, 13, 33]]):
        found = driver(executor, seed=seed + 1).logits(prompts, chunks)
        assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True)), chunks
    single = NativeExecutor(files, dtype=dtype, threads=1, use_amx=use_amx)
    assert all(np.array_equal(a, b) for a, b in zip(expected, alone(single, prompts), strict=True)), "one thread"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_ids", 131, "token id is outside the vocabulary"),
        ("token_ids", -1, "token id is outside the vocabulary"),
        ("slots", 5 * 16, "slot is outside the KV pool"),
        ("slots", 3, "slot is outside the KV pool"),
        ("block_table", 5, "block is outside the KV pool"),
        ("block_table", 0, "block is outside the KV pool"),
        ("positions", 7, "positions must follow"),
        ("logit_tokens", 4, "logit row is outside the batch"),
        ("context_len", 17, "more context than blocks"),
        ("context_len", 2**31 - 1, "more context than blocks"),
        ("context_len", 3, "no tokens, or more than its context"),
        ("query_start", 3, "do not add up"),
    ],
)
def test_what_is_not_there_never_reaches_native_code(tmp_path: Path, field: str, value: int, message: str) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    executor = NativeExecutor(open_model(tmp_path), dtype="float32", threads=1)
    executor.allocate_kv(4, 16)
    batch = pack([([1, 2, 3, 4], 0, [2])], 16, wanted="last")
    executor.forward(batch)
    getattr(batch, field).flat[-1] = value
    with pytest.raises(ValueError, match=message):
        executor.forward(batch)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say what is resident")
@pytest.mark.parametrize("prefault", [False, True])
def test_kv_memory_is_taken_at_start_or_as_it_is_used(tmp_path: Path, prefault: bool) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    executor = NativeExecutor(open_model(tmp_path), dtype="float32", threads=2, prefault_kv=prefault)
    num_blocks = 64 * 2**20 // (16 * executor.kv_bytes_per_token)
    before = _resident_bytes()
    executor.allocate_kv(num_blocks, 16)
    assert (_resident_bytes() - before > 60 * 2**20) == prefault


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_block_sizes_that_do_not_suit_it_are_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    executor = NativeExecutor(open_model(tmp_path), dtype="float32", threads=1)
    with pytest.raises(OptionError, match="multiple of 16, not 8"):
        executor.allocate_kv(4, 8)


def _need(use_amx: bool) -> None:
    if use_amx and not _native.has_amx_bf16():
        pytest.skip("this CPU has no AMX")


def test_a_refused_batch_leaves_the_next_one_untimed(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    executor = NativeExecutor(open_model(tmp_path), dtype="float32", threads=2)
    executor.allocate_kv(8, 16)
    with pytest.raises(ValueError, match="token"):
        executor.forward_timed(pack([([10**6], 0, [1])], 16, wanted="last"))
    batch = pack([([1, 2], 0, [1])], 16, wanted="last")
    executor.forward(batch)
    assert executor._native.seconds == []
    assert len(executor.forward_timed(batch)[1]) == len(executor.program.operations)
