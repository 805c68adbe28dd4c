"""Hugging Face directories: values, shards against index and headers, damaged safetensors, tokenizer files, EOS ids."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from files.checkpoints import (
    ALL_TENSORS as ALL,
)
from files.checkpoints import (
    SHARDS,
    TINY_LLAMA_JSON,
    write_directory,
    write_index,
    write_raw_safetensors,
    write_safetensors,
    write_sharded,
)
from noria.errors import ModelError, ModelFileError, UnsupportedError
from noria.files.huggingface import HuggingFaceModel
from noria.files.safetensors import SafetensorsFile

FIRST, SECOND = SHARDS
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_sharded(tmp_path / "model")


def refused(path: Path, *parts: str, kind: type[ModelError] = ModelFileError) -> None:
    """Opening `path` fails, and the message holds every one of `parts`."""
    with pytest.raises(kind) as caught:
        HuggingFaceModel(path)
    for part in parts:
        assert part in str(caught.value)


def assert_holds_all(model: HuggingFaceModel) -> None:
    assert sorted(model.tensors) == sorted(ALL)
    for name, (encoding, data) in ALL.items():
        info, read = model.tensors[name], model.read(name)
        assert (info.encoding, info.shape, read.dtype) == (encoding, data.shape, DTYPES[encoding])
        assert read.data.dtype == data.dtype
        np.testing.assert_array_equal(read.data, data)


def test_single_file(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "tiny")
    write_safetensors(path / "model.safetensors", ALL)
    model = HuggingFaceModel(path)
    assert_holds_all(model)
    assert (model.name, model.format, model.path) == ("tiny", "huggingface", path)
    with pytest.raises(ModelFileError, match="tensor 'nope' is missing"):
        model.read("nope")


def test_shards(sharded: Path) -> None:
    model = HuggingFaceModel(sharded)
    assert_holds_all(model)
    assert model.tensors["lm_head.weight"].file == sharded / SECOND


def test_the_library_reads_the_same(sharded: Path) -> None:
    """The safetensors library judges what the tests write (it cannot give bfloat16 to numpy)."""
    safetensors = pytest.importorskip("safetensors", reason="the safetensors library is not installed")
    with safetensors.safe_open(sharded / FIRST, framework="numpy") as library:
        assert sorted(library.keys()) == sorted(SHARDS[FIRST])
        for name in library.keys():  # noqa: SIM118 - not a mapping
            np.testing.assert_array_equal(library.get_tensor(name), HuggingFaceModel(sharded).read(name).data)


def test_misaligned_data_is_copied(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + np.array([1.5, -2], np.float32).tobytes())
    assert (8 + len(header)) % 4
    data = SafetensorsFile(path).read("a").data
    assert data.flags.aligned
    assert data.tolist() == [1.5, -2]


# Shards


def test_missing_shard(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    refused(sharded, SECOND, "is missing", "'lm_head.weight'")


@pytest.mark.parametrize("num_bytes", [1, 100])
def test_truncated_shard(sharded: Path, num_bytes: int) -> None:
    data = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes(data[:-num_bytes])
    refused(sharded, SECOND, "'lm_head.weight'", f"has only {1024 - num_bytes}")


def test_shard_with_bytes_at_the_end(sharded: Path) -> None:
    with (sharded / SECOND).open("ab") as file:
        file.write(b"\0" * 8)
    refused(sharded, SECOND, "8 bytes after the last tensor")


@pytest.mark.parametrize("stale", ["model-00003-of-00003.safetensors", "model.safetensors"])
def test_stale_extra_shard(sharded: Path, stale: str) -> None:
    write_safetensors(sharded / stale, {"x": ("F32", np.zeros(1, np.float32))})
    refused(sharded, stale, "left over")


def test_stale_shard_beside_a_single_file(tmp_path: Path) -> None:
    path = write_directory(tmp_path)
    write_safetensors(path / "model.safetensors", ALL)
    write_safetensors(path / FIRST, SHARDS[FIRST])
    refused(path, FIRST, "left over")


def test_other_families_are_left_alone(sharded: Path) -> None:
    (sharded / "consolidated.safetensors").write_bytes(b"never opened")
    (sharded / "adapter_model.safetensors").write_bytes(b"never opened")
    assert_holds_all(HuggingFaceModel(sharded))


def test_tensor_in_index_but_not_in_shard(sharded: Path) -> None:
    write_index(sharded, {name: FIRST if name in SHARDS[FIRST] else SECOND for name in [*ALL, "model.ghost.weight"]})
    refused(sharded, SECOND, "'model.ghost.weight' is missing")


def test_tensor_in_shard_but_not_in_index(sharded: Path) -> None:
    write_index(sharded, {"model.embed_tokens.weight": FIRST, "lm_head.weight": SECOND})
    refused(sharded, FIRST, "'model.norm.weight' is not in model.safetensors.index.json")


def test_tensor_placed_in_the_other_shard(sharded: Path) -> None:
    write_index(sharded, {name: SECOND if name in SHARDS[FIRST] else FIRST for name in ALL})
    refused(sharded, FIRST, "'lm_head.weight' is missing")


def test_total_size_mismatch(sharded: Path) -> None:
    placed = {name: shard for shard, tensors in SHARDS.items() for name in tensors}
    write_index(sharded, placed, total_size=3105)
    refused(sharded, "index.json", "total_size is 3105 bytes, but the shards hold 3104")
    write_index(sharded, placed, total_size=None)
    assert_holds_all(HuggingFaceModel(sharded))


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "", "pytorch_model.bin", 3, None])
def test_index_with_a_strange_shard_name(sharded: Path, shard: Any) -> None:
    write_index(sharded, {"model.norm.weight": shard})
    refused(sharded, "index.json", "'model.norm.weight'", "not a shard's name")


def test_index_without_placement(sharded: Path) -> None:
    for content in ("{}", '{"weight_map": {}}'):
        (sharded / "model.safetensors.index.json").write_text(content)
        refused(sharded, "index.json", "'weight_map' is missing")
    (sharded / "model.safetensors.index.json").write_text("[]")
    refused(sharded, "index.json should hold a JSON object")
    (sharded / "model.safetensors.index.json").unlink()
    refused(sharded, "holds shards such as " + FIRST, "index.json is missing")


# Directories that are something else


def test_directories_without_a_model(tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path), "config.json is missing")
    (tmp_path / "m.gguf").touch()
    refused(tmp_path, "config.json is missing", str(tmp_path / "m.gguf"))
    write_directory(tmp_path)
    refused(tmp_path, "holds no weights: model.safetensors is missing")
    (tmp_path / "pytorch_model.bin").touch()
    refused(tmp_path, "pytorch_model.bin", "supported are safetensors", kind=UnsupportedError)


def test_config_that_is_not_json(tmp_path: Path) -> None:
    for content in (b"", b"{", b"\xff\xfe", b"[1]", b"[" * 100_000, b'{"vocab_size": ' + b"9" * 5000 + b"}"):
        (tmp_path / "config.json").write_bytes(content)
        refused(tmp_path, "config.json")


# Damaged safetensors files


def entry(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry([2], 0, 4)}, 4, "'a' of shape [2] in F32 takes 8 bytes, but the header gives it 4"),
        ({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, 4, "'b' begins at data byte 0"),
        ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, 12, "'b' begins at data byte 8"),
        ({"a": entry([1], 4, 8)}, 8, "'a' begins at data byte 4"),
        ({"a": entry([1], 0, 4)}, 2, "'a' ends at data byte 4, but the file has only 2"),
        ({"a": entry([1], 4, 0)}, 4, "'data_offsets' should be begin and end"),
        ({"a": entry([-1], 0, 4)}, 4, "'shape' should be a list of sizes"),
        ({"a": entry([2**62], 0, 4)}, 4, "'shape' should be a list of sizes"),
        ({"a": entry([True], 0, 4)}, 4, "'shape' should be a list of sizes"),
        ({"a": entry([1] * 70, 0, 4)}, 4, "'a' has 70 dimensions"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "'data_offsets' should be a list"),
        ({"a": [1]}, 4, "'a' has no valid entry"),
        (b'{"a":' + json.dumps(entry([1], 0, 4)).encode() + b',"a":1}', 4, "the name 'a' occurs twice"),
        (b"{]", 0, "not valid JSON"),
        (b"[" * 50_000, 0, "not valid JSON"),
    ],
)  # fmt: skip
def test_damaged_header(tmp_path: Path, header: Any, data: int, message: str) -> None:
    path = write_raw_safetensors(tmp_path / "m.safetensors", header, b"\0" * data)
    with pytest.raises(ModelFileError) as caught:
        SafetensorsFile(path)
    assert message in str(caught.value)
    assert "m.safetensors" in str(caught.value)


@pytest.mark.parametrize("encoding", ["F4", "I8", "I64", "BOOL", "nonsense", None])
def test_other_encodings_are_unsupported(tmp_path: Path, encoding: Any) -> None:
    path = write_raw_safetensors(tmp_path / "m.safetensors", {"a.weight": entry([4], 0, 4, encoding)}, b"\0" * 4)
    with pytest.raises(UnsupportedError, match=r"tensor 'a\.weight' is stored as .*; supported are F32, F16, BF16"):
        SafetensorsFile(path)


@pytest.mark.parametrize(
    "data", [b"", b"\1", b"\xff" * 8, struct.pack("<Q", 2**40) + b"{}", struct.pack("<Q", 3) + b"{}"]
)
def test_header_length_is_checked(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"m\.safetensors"):
        SafetensorsFile(path)


GOOD = json.dumps({"a": entry([2, 2], 0, 16), "b": entry([3], 16, 22, "BF16")}).encode()


@settings(max_examples=300, deadline=1000)
@given(position=st.integers(0, len(GOOD) + 8), change=st.binary(min_size=1, max_size=4), cut=st.integers(0, 60))
def test_random_damage_never_escapes(position: int, change: bytes, cut: int) -> None:
    data = bytearray(struct.pack("<Q", len(GOOD)) + GOOD + b"\0" * 22)
    data[position : position + len(change)] = change
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "m.safetensors"
        path.write_bytes(data[: len(data) - max(0, cut - 40)])
        try:
            file = SafetensorsFile(path)
        except ModelError as error:
            event("refused")
            message = str(error)
        else:
            event("opened")
            message = None
        if message is not None:
            assert "m.safetensors" in message
            return
        for name, info in file.tensors.items():
            assert file.read(name).data.shape == info.shape


# Tokenizer files and EOS ids


def with_files(path: Path, **files: Any) -> HuggingFaceModel:
    write_directory(path, files.pop("config", TINY_LLAMA_JSON), **files)
    write_safetensors(path / "model.safetensors", ALL)
    return HuggingFaceModel(path)


def test_tokenizer_files(tmp_path: Path) -> None:
    model = with_files(tmp_path, tokenizer={}, tokenizer_config={"chat_template": "{{ x }}", "eos_token": "</s>"})
    assert model.tokenizer.tokenizer_json == tmp_path / "tokenizer.json"
    assert model.tokenizer.tokenizer_config["eos_token"] == "</s>"
    assert model.tokenizer.chat_template == "{{ x }}"
    assert model.tokenizer.vocabulary is None


def test_chat_template_places(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for number, (template, expected) in enumerate(((None, None), ("S", "S"), (named, "D"), (named[:1], None))):
        model = with_files(tmp_path / str(number), tokenizer={}, tokenizer_config={"chat_template": template})
        assert model.tokenizer.chat_template == expected
    (tmp_path / "2" / "chat_template.jinja").write_text("Ja 🦜")
    assert HuggingFaceModel(tmp_path / "2").tokenizer.chat_template == "Ja 🦜"
    model = with_files(tmp_path / "bad", tokenizer={}, tokenizer_config={"chat_template": 3})
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json: field 'chat_template' should be a string"):
        _ = model.tokenizer


def test_weights_without_a_tokenizer_open(tmp_path: Path) -> None:
    model = with_files(tmp_path)
    assert model.eos_token_ids == ()
    with pytest.raises(ModelFileError, match=r"has no tokenizer\.json"):
        _ = model.tokenizer


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        (2, {}, (2,)),
        ([9, 3, 9], {}, (3, 9)),
        (None, {"generation_config": {"eos_token_id": [7, 5]}}, (5, 7)),
        (2, {"generation_config": {"eos_token_id": 1}}, (1, 2)),
        (-1, {"generation_config": {"eos_token_id": [32, 31]}}, (31,)),  # outside the vocabulary of 32
        (2, {"tokenizer_config": {"eos_token": "<e>", "added_tokens_decoder": {"4": {"content": "<e>"}}}}, (2, 4)),
        (
            2,
            {
                "tokenizer_config": {"eos_token": {"content": "<e>"}},
                "tokenizer": {"added_tokens": [{"id": 8, "content": "<e>"}]},
            },
            (2, 8),
        ),
        (2, {"tokenizer_config": {"eos_token": "e"}, "tokenizer": {"model": {"vocab": {"e": 6}}}}, (2, 6)),
        (2, {"tokenizer_config": {"eos_token": "unknown"}, "tokenizer": {}}, (2,)),
        (2, {"tokenizer_config": {"eos_token": None}}, (2,)),
    ],
)
def test_eos_ids(tmp_path: Path, config: Any, files: dict[str, Any], expected: tuple[int, ...]) -> None:
    model = with_files(tmp_path, config=TINY_LLAMA_JSON | {"eos_token_id": config}, **files)
    assert model.eos_token_ids == expected


@pytest.mark.parametrize("value", ["2", True, [2, "3"], 2.0])
def test_eos_ids_of_a_wrong_kind_name_the_field(tmp_path: Path, value: Any) -> None:
    model = with_files(tmp_path, generation_config={"eos_token_id": value})
    with pytest.raises(ModelFileError, match=r"generation_config\.json: field 'eos_token_id'"):
        _ = model.eos_token_ids
