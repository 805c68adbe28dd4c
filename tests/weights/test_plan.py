"""The weight plan: complete or refused by name, for both formats; who decides whether the head is tied. No torch."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.errors import ModelFileError
from noria.files.model import HostTensor, ModelConfig, RopeConfig, TensorInfo
from noria.models import registry
from noria.weights.plan import WeightPlan
from noria.weights.read import read_sources, split_halves

HIDDEN, INNER, VOCAB = 8, 12, 20
Q, KV = 4 * 2, 2 * 2
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    rope=RopeConfig(),
)


class MemoryFiles:
    """`ModelFiles` over arrays: a tiny model, complete unless a test changes it."""

    def __init__(self, file_format: str, architecture: str, **config: Any) -> None:
        self.format = file_format
        self.path = Path("/models/tiny")
        self.name = "tiny"
        self.config = replace(CONFIG, architecture=architecture, **config)
        self.values: dict[str, np.ndarray] = {}
        for name, shape in tensor_shapes(file_format, architecture).items():
            self.put(name, *shape)

    def put(self, name: str, *shape: int) -> None:
        self.values[name] = np.random.default_rng(len(self.values)).standard_normal(shape).astype(np.float32)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        path = self.path / "weights"
        return {name: TensorInfo(name, value.shape, "F32", path) for name, value in self.values.items()}

    def read(self, name: str) -> HostTensor:
        return HostTensor(self.values[name], "float32")


PARTS = {  # of a layer: name in GGUF, name in Hugging Face, shape of the weight
    "attn_q": ("self_attn.q_proj", (Q, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (KV, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (KV, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, Q)),
    "ffn_gate": ("mlp.gate_proj", (INNER, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (INNER, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, INNER)),
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
}


def tensor_shapes(file_format: str, architecture: str) -> dict[str, tuple[int, ...]]:
    gguf = file_format == "gguf"
    shapes: dict[str, tuple[int, ...]] = {}
    shapes["token_embd.weight" if gguf else "model.embed_tokens.weight"] = (VOCAB, HIDDEN)
    shapes["output_norm.weight" if gguf else "model.norm.weight"] = (HIDDEN,)
    for layer in range(CONFIG.num_layers):
        for ours, (theirs, shape) in PARTS.items():
            name = f"blk.{layer}.{ours}" if gguf else f"model.layers.{layer}.{theirs}"
            shapes[f"{name}.weight"] = shape
            if architecture == "qwen2" and ours in ("attn_q", "attn_k", "attn_v"):
                shapes[f"{name}.bias"] = shape[:1]
    return shapes


FORMATS = [(f, a) for f in ("gguf", "huggingface") for a in ("llama", "qwen2")]


def plan_of(files: MemoryFiles) -> WeightPlan:
    return registry.find(files.config.architecture).plan(files)


@pytest.mark.parametrize(("file_format", "architecture"), FORMATS)
def test_every_tensor_is_used_once(file_format: str, architecture: str) -> None:
    files = MemoryFiles(file_format, architecture)
    plan = plan_of(files)
    assert sorted(source.tensor for source in plan.sources) == sorted(files.values)
    assert plan.num_elements == sum(value.size for value in files.values.values())
    assert plan.shapes["layers.1.qkv.weight"] == (Q + 2 * KV, HIDDEN)
    assert plan.shapes["layers.1.gate_up.weight"] == (2 * INNER, HIDDEN)
    assert ("layers.0.qkv.bias" in plan.shapes) == (architecture == "qwen2")
    assert "head.weight" not in plan.shapes


@pytest.mark.parametrize(("file_format", "architecture"), FORMATS)
def test_each_missing_tensor_is_named(file_format: str, architecture: str) -> None:
    for name in MemoryFiles(file_format, architecture).values:
        files = MemoryFiles(file_format, architecture)
        del files.values[name]
        with pytest.raises(ModelFileError, match=rf"^/models/tiny: 1 tensor missing: {name}$"):
            plan_of(files)


@pytest.mark.parametrize(("file_format", "architecture"), FORMATS)
def test_each_misshapen_tensor_is_named(file_format: str, architecture: str) -> None:
    for name, value in MemoryFiles(file_format, architecture).values.items():
        files = MemoryFiles(file_format, architecture)
        files.put(name, value.shape[0] + 1, *value.shape[1:])
        found, expected = [value.shape[0] + 1, *value.shape[1:]], list(value.shape)
        with pytest.raises(ModelFileError) as error:
            plan_of(files)
        assert f"/models/tiny/weights: tensor {name} has shape {found}" in str(error.value)
        assert f"asks for {expected}" in str(error.value)


@pytest.mark.parametrize(
    ("file_format", "name"),
    [
        ("gguf", "blk.2.attn_q.weight"),  # one layer more than the configuration says
        ("gguf", "rope_freqs.weight"),  # the configuration has not taken its values
        ("huggingface", "model.layers.0.self_attn.q_norm.weight"),  # another architecture's
        ("huggingface", "lm_head.bias"),
    ],
)
def test_an_unexpected_tensor_is_named(file_format: str, name: str) -> None:
    files = MemoryFiles(file_format, "llama")
    files.put(name, 3)
    with pytest.raises(ModelFileError, match=rf"/weights: 1 tensor that architecture 'llama' does not use: {name};"):
        plan_of(files)


def test_many_names_are_cut_short() -> None:
    files = MemoryFiles("gguf", "llama", num_layers=3)
    with pytest.raises(ModelFileError, match=r"9 tensors missing: blk\.2\.attn_norm\.weight, .* and 4 more$"):
        plan_of(files)


def test_a_lone_bias_is_not_enough() -> None:
    files = MemoryFiles("huggingface", "llama")
    files.put("model.layers.0.self_attn.k_proj.bias", KV)
    with pytest.raises(ModelFileError, match=r"2 tensors missing: .*0\.self_attn\.q_proj\.bias, .*v_proj\.bias$"):
        plan_of(files)


def test_known_harmless_tensors_are_passed_over() -> None:
    files = MemoryFiles("huggingface", "llama")
    files.put("model.layers.0.self_attn.rotary_emb.inv_freq", 1)
    plan_of(files)
    rope = RopeConfig(scaling="factors", frequency_factors=(1.0,))
    files = MemoryFiles("gguf", "llama", rope=rope)
    files.put("rope_freqs.weight", 1)
    plan_of(files)


@pytest.mark.parametrize("file_format", ["gguf", "huggingface"])
@pytest.mark.parametrize("claim", [None, True, False])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_the_tensors_decide_whether_the_head_is_tied(
    file_format: str, claim: bool | None, head: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = MemoryFiles(file_format, "llama", tie_word_embeddings=claim)
    gguf = file_format == "gguf"
    name = "output.weight" if gguf else "lm_head.weight"
    if head == "different":
        files.put(name, VOCAB, HIDDEN)
    elif head == "equal":
        files.values[name] = files.values["token_embd.weight" if gguf else "model.embed_tokens.weight"].copy()
    with caplog.at_level(logging.WARNING):
        plan = plan_of(files)
    tied = head == "absent" or (head == "equal" and claim is True)
    assert ("head.weight" in plan.shapes) == (not tied)
    contradicted = (head == "absent" and claim is False) or (head == "different" and claim is True)
    assert len(caplog.records) == contradicted
    assert all(name in record.getMessage() for record in caplog.records)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3))
def test_split_halves_undoes_interleaving(heads: int, pairs: int, inputs: int) -> None:
    halves = np.arange(heads * 2 * pairs * inputs).reshape(heads * 2 * pairs, inputs)
    interleaved = np.empty_like(halves)
    for head in range(heads):
        for pair in range(pairs):
            for member in range(2):
                start = head * 2 * pairs
                interleaved[start + 2 * pair + member] = halves[start + member * pairs + pair]
    np.testing.assert_array_equal(split_halves(interleaved, heads), halves)


@pytest.mark.parametrize(("architecture", "permuted"), [("llama", True), ("qwen2", False)])
def test_gguf_llama_heads_are_reordered_and_no_others(architecture: str, permuted: bool) -> None:
    # Heads of 4 here, since in heads of 2 both orders are the same.
    files = MemoryFiles("gguf", architecture, head_dim=4, num_heads=2, num_kv_heads=1)
    (qkv,) = (p for p in plan_of(files).parameters if p.name == "layers.0.qkv.weight")
    q, k, v = (tensor.data for tensor in read_sources(files, qkv))
    stored_q, stored_k, stored_v = (files.values[f"blk.0.attn_{part}.weight"] for part in "qkv")
    order = [0, 2, 1, 3] if permuted else [0, 1, 2, 3]
    np.testing.assert_array_equal(q, stored_q[[*order, *(4 + i for i in order)]])
    np.testing.assert_array_equal(k, stored_k[order])
    np.testing.assert_array_equal(v, stored_v)


def test_a_reader_that_breaks_its_word_is_found() -> None:
    files = MemoryFiles("gguf", "llama")
    plan = plan_of(files)
    files.put("blk.0.attn_output.weight", HIDDEN, Q + 1)
    (parameter,) = (p for p in plan.parameters if p.name == "layers.0.attention_output.weight")
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_output\.weight was read with shape \[8, 9\]"):
        list(read_sources(files, parameter))
