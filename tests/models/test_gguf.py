"""The same random weights from a GGUF file and from transformers: names, head order and rope factors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers

from models.support import LLAMA3, TINY, PagedDriver, random_prompts, tiny_model, transformers_logits
from noria.files.sources import open_model
from noria.ops.reference import TorchExecutor

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The order in which converters store llama's q and k: first and second members of each rotary pair in turn."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(model: transformers.PreTrainedModel, path: Path, factors: np.ndarray | None = None) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.numpy()
        if config.model_type == "llama" and "q_proj" in name:
            array = interleave(array, config.num_attention_heads)
        elif config.model_type == "llama" and "k_proj" in name:
            array = interleave(array, config.num_key_value_heads)
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, np.ascontiguousarray(array))
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "overrides", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 4}], ids=["untied", "tied", "mha"]
)
def test_logits_equal_transformers(architecture: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(architecture, **overrides)
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path)
    check(model, path)


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


def check(model: transformers.PreTrainedModel, path: Path) -> None:
    executor = TorchExecutor(open_model(path), dtype="float32", threads=1)
    prompts = random_prompts([1, 20, 90], TINY["vocab_size"])
    for prompt, ours in zip(prompts, PagedDriver(executor).logits(prompts, [1, 9, 50]), strict=True):
        np.testing.assert_allclose(ours, transformers_logits(model, prompt), rtol=0, atol=1e-4)
