"""Model files that are well-formed but say nonsense: each value in turn becomes one that nobody expects there.

Whatever it is, what comes of it is a model or a `ModelError` that names the file: no other error, no list with an entry
for each of a billion layers. `test_gguf_damage.py` and `test_huggingface.py` do the same with bytes.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from files.checkpoints import (
    TINY_LLAMA_GGUF,
    TINY_LLAMA_JSON,
    tiny_gguf_tensors,
    vocabulary_metadata,
    write_directory,
    write_gguf,
    write_raw_safetensors,
)
from noria.errors import ModelError
from noria.files.fp8 import scaled
from noria.files.gguf import GgufModel
from noria.files.huggingface import HuggingFaceModel
from noria.files.model import TensorInfo
from noria.files.model_config import config_from_gguf, config_from_json
from noria.files.safetensors import SafetensorsFile
from noria.models.decoder import constants
from noria.text.tokenizer import load_tokenizer
from text.vocabularies import (
    huggingface_json,
    sentencepiece_json,
    small_gguf_vocabulary,
)

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 1.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0]}
NESTED = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
JSON_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": LLAMA3},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8, "rope_scaling": YARN},
    "qwen3": {"head_dim": 4, "rope_scaling": {"type": "linear", "factor": 2}},
    "mistral": {"sliding_window": 8},
    "gemma2": {"head_dim": 4, "sliding_window": 8, "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 4},
    "gemma3_text": {"head_dim": 4, "sliding_window": 8, "sliding_window_pattern": 2, "rope_parameters": NESTED},
    "phi3": {"partial_rotary_factor": 1.0, "original_max_position_embeddings": 64, "rope_scaling": LONGROPE},
    "smollm3": {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2},
    "granite": {"attention_multiplier": 0.1, "residual_multiplier": 1.0, "logits_scaling": 2.0},
}
GGUF_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"rope.freq_base": 5e4, "attention.sliding_window": 8},
    "qwen2": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
    "qwen3": {"attention.key_length": 16, "attention.value_length": 16},
    "gemma2": {"attn_logit_softcapping": 50.0, "attention.sliding_window": 8},
    "gemma3": {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False]},
    "phi3": {"rope.dimension_count": 8},
    "smollm3": {},
    "granite": {"logit_scale": 2.0, "attention.scale": 0.1, "residual_scale": 0.2},
}
NONSENSE: tuple[Any, ...] = (
    None, True, 0, 1, -1, 7, 2**39, 2**63, 10**400, 1e-320, 1e308, 0.5, float("nan"), "", "x", "A" * 10_000, "\ud800",
    [], [None], [[]], [10**400] * 2, {}, {"a": 1}, {"content": 5}, [{"name": ["x"]}, {"name": "default"}],
)  # fmt: skip

Place = tuple[str | int, ...]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Of everything in nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from places(item, (*at, key))


def changed(document: Any, place: Place, value: Any) -> Any:
    document = copy.deepcopy(document)
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return document


def refusal(source: str, action: Callable[..., object], *arguments: Any) -> str | None:
    """The message of the `ModelError` that `action` ends in, which names `source` and is no flood; None if it works."""
    try:
        action(*arguments)
    except ModelError as error:
        message = str(error)
        assert source in message
        assert len(message) < 2_000
        return message
    return None


@pytest.mark.parametrize("model_type", JSON_ARCHITECTURES)
def test_every_value_of_a_config_json(model_type: str) -> None:
    document = {key: value for key, value in TINY_LLAMA_JSON.items() if key != "architectures"}
    document |= {"model_type": model_type} | JSON_ARCHITECTURES[model_type]
    constants(config_from_json(document, "config.json").at_length(100))
    num_refused = 0
    for place in places(document):
        for value in NONSENSE:
            arguments = changed(document, place, value), "config.json"
            num_refused += refusal("config.json", config_from_json, *arguments) is not None
    assert num_refused > 100


@pytest.mark.parametrize("architecture", GGUF_ARCHITECTURES)
def test_every_value_of_gguf_metadata(architecture: str) -> None:
    document = {architecture + name.removeprefix("llama"): value for name, value in TINY_LLAMA_GGUF.items()}
    document |= {f"{architecture}.{name}": value for name, value in GGUF_ARCHITECTURES[architecture].items()}
    factors = (
        {f"rope_factors_{kind}.weight": (1.0,) * 4 for kind in ("long", "short")} if architecture == "phi3" else {}
    )

    def read(values: dict[str, Any]) -> None:
        values = values | {"general.architecture": architecture}
        config_from_gguf(values, "m.gguf", num_embedding_rows=32, rope_factors=factors)

    read(document)
    num_refused = 0
    for place in places(document):
        for value in NONSENSE:
            num_refused += refusal("m.gguf", read, changed(document, place, value)) is not None
    assert num_refused > 100


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("qwen2", {"num_hidden_layers": 2**39}, "'num_hidden_layers' should be an integer from 1 to 10000, not 54975"),
        ("llama", {"rms_norm_eps": 10**400}, "field 'rms_norm_eps' should be a positive number, not 1000"),
        ("granite", {"logits_scaling": 1e-320}, "field 'logits_scaling' should be a positive number"),
        ("llama", {"rope_theta": 1}, "a rope theta of 1 cannot be"),
        ("phi3", {"original_max_position_embeddings": 1}, "'original_max_position_embeddings' should be above 1"),
    ],
)
def test_what_used_to_escape_is_named(model_type: str, changes: dict[str, Any], message: str) -> None:
    document = {key: value for key, value in TINY_LLAMA_JSON.items() if key != "architectures"}
    document |= {"model_type": model_type} | JSON_ARCHITECTURES[model_type] | changes
    found = refusal("config.json", config_from_json, document, "config.json")
    assert found is not None
    assert message in found


def test_an_absurd_number_of_layers_in_gguf_makes_no_list() -> None:
    metadata = {"gemma2" + name.removeprefix("llama"): value for name, value in TINY_LLAMA_GGUF.items()}
    metadata |= {"general.architecture": "gemma2", "gemma2.block_count": 2**32 - 1}
    read = partial(config_from_gguf, num_embedding_rows=32)
    found = refusal("m.gguf", read, metadata, "m.gguf")
    assert found is not None
    assert "'gemma2.block_count' should be an integer from 1 to 10000" in found


def test_every_value_of_a_safetensors_header(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "F8_E4M3", "shape": [3], "data_offsets": [16, 19]},
    }
    num_refused = 0
    for place in places(header):
        for value in NONSENSE:
            path = write_raw_safetensors(tmp_path / "m.safetensors", changed(header, place, value), b"\0" * 19)
            num_refused += refusal("m.safetensors", SafetensorsFile, path) is not None
    assert num_refused > 200


def test_blocks_larger_than_the_weight_take_no_memory() -> None:
    values, info = np.ones((4, 8), np.float32), TensorInfo("w", (4, 8), "F8_E4M3", Path("m.safetensors"))
    scale = np.array([[2.0, 3.0]], np.float32)
    assert scaled(values, scale, info, (2**39, 4)).tolist() == [[2.0] * 4 + [3.0] * 4] * 4


TOKENIZER_CONFIG: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": {"content": "<|im_end|>"},
    "add_bos_token": True,
    "added_tokens_decoder": {"0": {"content": "<unk>", "special": True}},
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
}


def open_tokenizer(directory: Path) -> None:
    model = HuggingFaceModel(directory)
    tokenizer = load_tokenizer(model.tokenizer)
    tokenizer.decode(tokenizer.encode("<s>ab c 12é<|im_end|>"))
    _ = model.eos_token_ids, tokenizer.least_num_tokens("abc" * 100)


def test_every_value_of_a_tokenizer_config(tmp_path: Path) -> None:
    write_raw_safetensors(tmp_path / "model.safetensors", {}, b"")
    write_directory(tmp_path, tokenizer=sentencepiece_json(), tokenizer_config=TOKENIZER_CONFIG)
    open_tokenizer(tmp_path)
    num_refused = 0
    for place in places(TOKENIZER_CONFIG):
        for value in NONSENSE:
            write_directory(tmp_path, tokenizer_config=changed(TOKENIZER_CONFIG, place, value))
            num_refused += refusal("tokenizer_config.json", open_tokenizer, tmp_path) is not None
    assert num_refused > 50
    for key in ("x", "²", "-1", "1" * 5000):
        write_directory(tmp_path, tokenizer_config={"added_tokens_decoder": {key: {"content": "<unk>"}}})
        assert refusal("tokenizer_config.json: added_tokens_decoder", open_tokenizer, tmp_path) is not None


def test_some_values_of_a_tokenizer_json(tmp_path: Path) -> None:
    """Of the parts beside the vocabulary. The library's own panics are its own kind of error, and are told too."""
    write_raw_safetensors(tmp_path / "model.safetensors", {}, b"")
    vocabulary = small_gguf_vocabulary(pre="smollm")
    choose = random.Random(8)
    num_refused = 0
    for document in (huggingface_json(vocabulary), sentencepiece_json(), sentencepiece_json(metaspace=True)):
        parts = [place for place in places(document) if place[0] != "model"]
        for place in choose.sample(parts, min(40, len(parts))):
            for value in choose.sample(NONSENSE, 6):
                write_directory(tmp_path, tokenizer=changed(document, place, value), tokenizer_config=TOKENIZER_CONFIG)
                num_refused += refusal(str(tmp_path / "tokenizer"), open_tokenizer, tmp_path) is not None
    assert num_refused > 200


def test_a_post_processor_that_lacks_its_token_is_told(tmp_path: Path) -> None:
    document = sentencepiece_json()
    document["post_processor"]["special_tokens"] = {}
    write_raw_safetensors(tmp_path / "model.safetensors", {}, b"")
    write_directory(tmp_path, tokenizer=document, tokenizer_config=TOKENIZER_CONFIG)
    found = refusal("tokenizer.json: cannot be read as a tokenizer", open_tokenizer, tmp_path)
    assert found is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "A" * 10_000}, "tokenizer.ggml.pre 'AAA"),
        ({"model": "bert"}, "tokenizer.ggml.model 'bert'"),
        ({"merges": ["q q"]}, "tokenizer.ggml.merges do not fit"),
        ({"tokens": ["a", "a", "b"]}, "holds the same token twice: 'a'"),
        ({"model": "llama"}, "tokenizer.ggml.scores has 0 entries for 3 tokens"),
        ({"model": "llama", "scores": [0.0, float("nan"), 0.0]}, "tokenizer.ggml.scores: entry 1 is not a number"),
        ({"model": "llama", "scores": [0.0] * 3}, "neither a token for each byte nor an unknown token"),
    ],
)
def test_faults_of_a_gguf_vocabulary_name_the_file(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    fields = {"tokens": ["a", "b", "<|im_end|>"], "types": [1, 1, 3]} | changes
    metadata = TINY_LLAMA_GGUF | vocabulary_metadata(**fields)
    model = GgufModel(write_gguf(tmp_path / "m.gguf", tiny_gguf_tensors(), metadata))
    found = refusal(str(tmp_path / "m.gguf"), load_tokenizer, model.tokenizer)
    assert found is not None
    assert message in found
