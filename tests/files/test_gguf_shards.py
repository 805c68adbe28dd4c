"""GGUF models in several files: the same tensors as in one, whichever is named; missing, short and left-over shards."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from files.checkpoints import TINY_LLAMA_GGUF, tiny_gguf_tensors, vocabulary_metadata, write_gguf
from noria.errors import ModelFileError
from noria.files.gguf import GgufModel
from noria.files.locate import locate_model

METADATA = TINY_LLAMA_GGUF | vocabulary_metadata(["a", "<|im_end|>"], [1, 3], eos_token_id=1)
NAMES = list(tiny_gguf_tensors())


def shard_name(number: int, count: int = 3, model: str = "tiny") -> str:
    return f"{model}-{number:05d}-of-{count:05d}.gguf"


def write_shard(path: Path, number: int, names: list[str], **split: Any) -> Path:
    """Shard `number`, from 1, with some of the tiny tensors; `split` replaces what it says of itself."""
    fields = {"no": number - 1, "count": 3, "tensors.count": len(NAMES)} | split
    metadata = {f"split.{name}": value for name, value in fields.items() if value is not None}
    if number == 1:
        metadata |= METADATA
    return write_gguf(path / shard_name(number), {name: tiny_gguf_tensors()[name] for name in names}, metadata)


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return [write_shard(tmp_path, i + 1, [name]) for i, name in enumerate(NAMES)]


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        GgufModel(path)
    for part in parts:
        assert part in str(caught.value)


def test_any_shard_opens_all(tmp_path: Path, shards: list[Path]) -> None:
    whole = GgufModel(write_gguf(tmp_path / "whole.gguf", tiny_gguf_tensors(), METADATA))
    for path in shards:
        model = GgufModel(path)
        assert list(model.tensors) == list(whole.tensors)
        assert model.config == whole.config
        assert model.eos_token_ids == whole.eos_token_ids == (1,)
        assert model.tokenizer == whole.tokenizer
        for name in NAMES:
            np.testing.assert_array_equal(model.read(name).data, whole.read(name).data)
            np.testing.assert_array_equal(model.raw(name).rows, whole.raw(name).rows)
        assert [model.tensors[name].file for name in NAMES] == shards
        assert locate_model(path, report=print).name == "tiny"


def test_what_the_gguf_package_splits_opens(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", split_max_tensors=1, small_first_shard=True)
    for name, value in METADATA.items():
        if isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    for name, (data, encoding) in tiny_gguf_tensors().items():
        writer.add_tensor(name, data, raw_dtype=encoding)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = GgufModel(tmp_path / shard_name(3, 4, "big"))
    whole = GgufModel(write_gguf(tmp_path / "whole.gguf", tiny_gguf_tensors(), METADATA))
    assert model.config == whole.config
    for name in NAMES:
        np.testing.assert_array_equal(model.read(name).data, whole.read(name).data)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_shard_is_named(shards: list[Path], missing: int) -> None:
    shards[missing].unlink()
    for path in shards:
        if path.exists():
            refused(path, f"shard {shards[missing]} is missing", "one of 3 files")


@pytest.mark.parametrize("short", [0, 1, 2])
def test_a_short_shard_is_named_with_its_tensor(shards: list[Path], short: int) -> None:
    data = shards[short].read_bytes()
    shards[short].write_bytes(data[:-100])
    refused(shards[0], str(shards[short]), f"tensor {NAMES[short]!r} ends at byte")


def test_left_over_shards_are_named(tmp_path: Path) -> None:
    def write(**split: Any) -> Path:
        for i, name in enumerate(NAMES):
            path = write_shard(tmp_path, i + 1, [name], **(split if i == 1 else {}))
        return path

    second = str(tmp_path / shard_name(2))
    for field, value in (("count", 4), ("no", 2), ("tensors.count", 4), ("count", 0), ("tensors.count", None)):
        last = write(**{field: value})
        refused(last, f"{second} does not belong", f"'split.{field}' is {value}", "left over")


def test_tensors_that_are_too_few_or_twice_are_told(tmp_path: Path, shards: list[Path]) -> None:
    write_shard(tmp_path, 3, [NAMES[1]])
    refused(shards[0], f"tensor {NAMES[1]!r} is in", str(shards[1]), str(shards[2]))
    for i, name in enumerate(NAMES):
        write_shard(tmp_path, i + 1, [name], **{"tensors.count": 4})
    refused(shards[0], "hold 4 tensors, but they hold 3")


def test_a_shard_under_another_name_is_told_what_to_be_called(tmp_path: Path, shards: list[Path]) -> None:
    for name in ("model.gguf", shard_name(2), shard_name(1, 2)):
        path = tmp_path / "elsewhere" / name
        path.parent.mkdir(exist_ok=True)
        shutil.copy(shards[0], path)
        refused(path, "file 1 of 3", "should end with -00001-of-00003.gguf")


def test_numbers_out_of_range_are_damage(tmp_path: Path) -> None:
    for value in (3, None):
        refused(write_shard(tmp_path, 1, NAMES, no=value), "'split.no' should be from 0 to 2")
    path = write_shard(tmp_path, 2, NAMES, no=1)
    data = path.read_bytes()
    place = data.index(b"split.no") + 8 + 4
    path.write_bytes(data[:place] + struct.pack("<I", 2**32 - 1) + data[place + 4 :])
    refused(path, "'split.no' should be from 0 to 2, not 4294967295")


def test_a_count_of_one_is_no_split(tmp_path: Path) -> None:
    for count in (0, 1):
        path = write_gguf(tmp_path / "m.gguf", tiny_gguf_tensors(), METADATA | {"split.count": count})
        assert list(GgufModel(path).tensors) == NAMES
