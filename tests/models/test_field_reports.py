"""Field reports K1 and K2 (docs/field_reports.md), for both formats: heads tied or not, and shards that do not fit."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from numpy.testing import assert_allclose
from safetensors.torch import load_file, save_file

from models.support import PagedDriver, random_prompts, tiny_model, transformers_logits
from models.test_gguf import write_gguf
from noria.errors import ModelFileError
from noria.files.sources import open_model
from noria.ops.reference import TorchExecutor

FORMATS = ["huggingface", "gguf"]
HEAD = "lm_head.weight"


def write(model: transformers.PreTrainedModel, path: Path, file_format: str) -> Path:
    """The model with all that its state has, its head too if it is tied."""
    if file_format == "huggingface":
        model.save_pretrained(path)
        return path
    path.mkdir()
    write_gguf(model, path / "tiny.gguf")
    return path / "tiny.gguf"


def assert_runs_as(path: Path, model: transformers.PreTrainedModel) -> None:
    prompts = random_prompts([20])
    executor = TorchExecutor(open_model(path), dtype="float32", threads=1)
    [ours] = PagedDriver(executor).logits(prompts, [20])
    assert_allclose(ours, transformers_logits(model, prompts[0]), rtol=0, atol=1e-4)


def set_flag(path: Path, tied: bool) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))


@pytest.mark.parametrize("head", ["absent", "equal", "different"])
@pytest.mark.parametrize("claim", [True, False, None])
def test_k1_the_head_of_the_file_is_used_whatever_its_flag_says(
    tmp_path: Path, claim: bool | None, head: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`claim` None: a GGUF file, which has no flag."""
    model = tiny_model("llama", tie_word_embeddings=head == "absent")
    if head == "equal":
        model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    path = write(model, tmp_path / "m", "huggingface" if claim is not None else "gguf")
    if claim is None:
        assert ("output.weight" in open_model(path).tensors) == (head != "absent")
    else:
        assert (HEAD in open_model(path).tensors) == (head != "absent")
        set_flag(path, claim)
    with caplog.at_level(logging.WARNING):
        assert_runs_as(path, model)
    is_contradiction = (claim is True and head == "different") or (claim is False and head == "absent")
    assert bool([record for record in caplog.records if "declared" in record.message]) == is_contradiction


@pytest.mark.parametrize("missing", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_k1_no_parameter_is_left_unset(tmp_path: Path, missing: str) -> None:
    path = write(tiny_model("llama"), tmp_path / "m", "huggingface")
    tensors = load_file(path / "model.safetensors")
    del tensors[missing]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelFileError, match=f"1 tensor missing: {missing}"):
        TorchExecutor(open_model(path), dtype="float32", threads=1)


def write_shards(model: transformers.PreTrainedModel, path: Path, file_format: str) -> tuple[Path, list[Path]]:
    """The model in several files: what to open, and the files."""
    if file_format == "huggingface":
        model.save_pretrained(path, max_shard_size="100KB")
        return path, sorted(path.glob("*.safetensors"))
    path.mkdir()
    write_gguf(model, path / "whole.gguf")
    reader = gguf.GGUFReader(path / "whole.gguf")
    writer = gguf.GGUFWriter(path / "tiny.gguf", "llama", split_max_tensors=12)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            _copy_field(writer, name, field)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (path / "whole.gguf").unlink()
    shards = sorted(path.glob("*.gguf"))
    return shards[0], shards


def _copy_field(writer: gguf.GGUFWriter, name: str, field: Any) -> None:
    sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)


@pytest.mark.parametrize("file_format", FORMATS)
def test_k2_shards_run_as_one_file(tmp_path: Path, file_format: str) -> None:
    model = tiny_model("llama")
    path, shards = write_shards(model, tmp_path / "m", file_format)
    assert len(shards) > 2
    assert_runs_as(path, model)


@pytest.mark.parametrize("file_format", FORMATS)
def test_k2_a_missing_shard_is_named(tmp_path: Path, file_format: str) -> None:
    path, shards = write_shards(tiny_model("llama"), tmp_path / "m", file_format)
    shards[1].unlink()
    with pytest.raises(ModelFileError, match=f"shard {shards[1]} is missing"):
        open_model(path)


@pytest.mark.parametrize("file_format", FORMATS)
def test_k2_a_shard_that_is_100_bytes_short_is_named_with_its_last_tensor(tmp_path: Path, file_format: str) -> None:
    path, shards = write_shards(tiny_model("llama"), tmp_path / "m", file_format)
    shards[1].write_bytes(shards[1].read_bytes()[:-100])
    with pytest.raises(ModelFileError, match=rf"{shards[1]}: tensor '[a-z_.0-9]+' ends at"):
        open_model(path)


@pytest.mark.parametrize("file_format", FORMATS)
def test_k2_a_shard_of_another_download_is_named(tmp_path: Path, file_format: str) -> None:
    path, shards = write_shards(tiny_model("llama"), tmp_path / "m", file_format)
    _, others = write_shards(tiny_model("llama", num_hidden_layers=5), tmp_path / "other", file_format)
    if file_format == "huggingface":
        others[-1].rename(shards[-1].with_name("model-00099-of-00099.safetensors"))
        stale = shards[-1].with_name("model-00099-of-00099.safetensors")
    else:
        others[1].rename(shards[1])
        stale = shards[1]
    with pytest.raises(ModelFileError, match=f"{stale}.*left over"):
        open_model(path)


def test_k2_an_empty_directory_is_told_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json is missing"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text(tiny_model("llama").config.to_json_string())
    with pytest.raises(ModelFileError, match=r"holds no weights: model\.safetensors is missing"):
        open_model(tmp_path)
