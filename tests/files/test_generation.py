"""What a model's files recommend for sampling: names, bounds, and what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from files.checkpoints import (
    ALL_TENSORS,
    TINY_LLAMA_GGUF,
    tiny_gguf_tensors,
    write_directory,
    write_gguf,
    write_safetensors,
)
from noria.errors import ModelFileError
from noria.files.generation import describe_defaults, sampling_defaults
from noria.files.gguf import GgufModel
from noria.files.huggingface import HuggingFaceModel


def from_json(path: Path, **generation_config: Any) -> HuggingFaceModel:
    write_directory(path, generation_config=generation_config)
    write_safetensors(path / "model.safetensors", ALL_TENSORS)
    return HuggingFaceModel(path)


def from_gguf(path: Path, **sampling: Any) -> GgufModel:
    metadata = {f"general.sampling.{name}": value for name, value in sampling.items()}
    return GgufModel(write_gguf(path / "m.gguf", tiny_gguf_tensors(), TINY_LLAMA_GGUF | metadata))


def test_json_defaults(tmp_path: Path) -> None:
    model = from_json(
        tmp_path,
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        min_p=None,
        repetition_penalty=1,
        do_sample=False,
        max_new_tokens=7,
        eos_token_id=[1, 31],
    )
    assert model.sampling_defaults == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1}
    assert model.eos_token_ids == (1, 31)
    assert sampling_defaults(model, "auto") == model.sampling_defaults
    assert sampling_defaults(model, "none") == {}
    line = describe_defaults(model, model.sampling_defaults)
    assert "temperature 0.6, top_p 0.95, top_k 20, repetition_penalty 1; end of sequence: token ids 1, 31" in line
    assert "--generation-config none" in line
    assert "Noria's own; end of sequence: token ids 1, 31" in describe_defaults(model, {})


def test_without_a_file_there_are_none(tmp_path: Path) -> None:
    write_directory(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", ALL_TENSORS)
    assert HuggingFaceModel(tmp_path).sampling_defaults == {}
    assert from_gguf(tmp_path).sampling_defaults == {}


def test_gguf_defaults_are_the_numbers_that_were_meant(tmp_path: Path) -> None:
    model = from_gguf(tmp_path, temp=0.7, top_p=0.95, top_k=64, min_p=0.01, penalty_repeat=1.05, mirostat=2)
    assert model.sampling_defaults == {
        "temperature": 0.7, "top_p": 0.95, "top_k": 64, "min_p": 0.01, "repetition_penalty": 1.05,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 2.5), ("temperature", "0.6"), ("top_p", 0), ("top_k", 1.5), ("repetition_penalty", -1.0)],
)
def test_what_cannot_be_honoured_names_the_field_and_the_way_out(tmp_path: Path, field: str, value: Any) -> None:
    model = from_json(tmp_path, **{field: value})
    with pytest.raises(ModelFileError, match=rf"generation_config\.json: field '{field}' .*--generation-config none"):
        sampling_defaults(model, "auto")
    assert sampling_defaults(model, "none") == {}
