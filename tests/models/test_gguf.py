"""The same random weights from a GGUF file and from transformers: names, head order and rope factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers

from models.support import (
    ARCHITECTURES,
    LLAMA3,
    LONGROPE,
    TINY,
    PagedDriver,
    random_prompts,
    tiny_model,
    transformers_logits,
)
from noria.files.sources import open_model
from noria.ops.reference import TorchExecutor

INTERLEAVED = ("llama", "mistral", "smollm3", "granite")
"""Architectures of which llama.cpp's converter reorders q and k."""

Metadata = Callable[[gguf.GGUFWriter, Any], None]


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The order in which converters store llama's q and k: first and second members of each rotary pair in turn."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def gemma_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    if config.attn_logit_softcapping is not None:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def phi3_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    partial = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(partial * config.hidden_size) // config.num_attention_heads)
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    writer.add_sliding_window(config.sliding_window or 0)
    if (long := config.rope_parameters.get("long_factor")) is not None:
        scale = config.max_position_embeddings / config.original_max_position_embeddings
        writer.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(scale) / math.log(config.original_max_position_embeddings))
        )
        writer.add_tensor("rope_factors_long.weight", np.array(long, dtype=np.float32))
        short = np.array(config.rope_parameters["short_factor"], dtype=np.float32)
        writer.add_tensor("rope_factors_short.weight", short)


def granite_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


METADATA: dict[str, Metadata] = {
    "mistral": lambda writer, config: writer.add_sliding_window(config.sliding_window),
    "qwen3": lambda writer, config: writer.add_key_length(config.head_dim),
    "gemma2": gemma_metadata,
    "gemma3": gemma_metadata,
    "phi3": phi3_metadata,
    "granite": granite_metadata,
}
"""What llama.cpp's converter writes for an architecture beside what it writes for all."""


def write_gguf(model: transformers.PreTrainedModel, path: Path, factors: np.ndarray | None = None) -> None:
    """Names of tensors are those of the `gguf` package, which llama.cpp's converter uses."""
    config = model.config
    architecture = config.model_type.removesuffix("_text")
    stored_as = "llama" if architecture == "mistral" else architecture
    writer = gguf.GGUFWriter(path, stored_as)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    METADATA.get(architecture, lambda writer, config: None)(writer, config)
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == stored_as)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.numpy()
        if architecture in INTERLEAVED and "q_proj" in name:
            array = interleave(array, config.num_attention_heads)
        elif architecture in INTERLEAVED and "k_proj" in name:
            array = interleave(array, config.num_key_value_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(array))
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


FIXED: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
}
"""What the files of an architecture do not say, and llama.cpp therefore decides."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("overrides", [{}, {"num_key_value_heads": 4}], ids=["gqa", "mha"])
def test_logits_equal_transformers(architecture: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(architecture, **FIXED.get(architecture, {}) | overrides)
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path)
    check(model, path)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if not name.startswith("gemma")])
def test_a_head_may_be_tied(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture, tie_word_embeddings=True)
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path)
    check(model, path)


@pytest.mark.parametrize(
    "overrides",
    [LONGROPE, {"rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.75}}, {"sliding_window": 24}],
    ids=["longrope", "partial", "window"],
)
def test_phi3(overrides: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model("phi3", **overrides)
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path)
    check(model, path, lengths=[49, 90])  # beyond the original context of the longrope


def test_biases_of_llama_are_reordered_too(tmp_path: Path) -> None:
    model = tiny_model("llama", attention_bias=True)
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path)
    check(model, path)


def test_rope_factors_are_llama3_scaling(tmp_path: Path) -> None:
    model = tiny_model("llama", rope_parameters={**LLAMA3, "rope_theta": 50_000.0})
    scaled = model.model.rotary_emb.inv_freq.numpy()
    plain = 50_000.0 ** (-np.arange(0, len(scaled)) / len(scaled))
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path, factors=(plain / scaled).astype(np.float32))
    check(model, path)


def check(model: transformers.PreTrainedModel, path: Path, lengths: Sequence[int] = (1, 20, 90)) -> None:
    executor = TorchExecutor(open_model(path), dtype="float32", threads=1)
    prompts = random_prompts(lengths, TINY["vocab_size"])
    for prompt, ours in zip(prompts, PagedDriver(executor).logits(prompts, [1, 9, 50][-len(prompts) :]), strict=True):
        np.testing.assert_allclose(ours, transformers_logits(model, prompt), rtol=0, atol=1e-4)
