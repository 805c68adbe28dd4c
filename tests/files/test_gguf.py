"""GGUF reader and dequantisation against the gguf package's own, on files written here and on the default model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from files.checkpoints import TINY_LLAMA_GGUF, tiny_gguf_tensors, vocabulary_metadata, write_gguf
from noria.errors import ModelFileError
from noria.files import gguf_format
from noria.files.gguf import END_TOKENS, GgufModel
from noria.files.gguf_format import ENCODINGS
from noria.files.mapped import MappedFile
from noria.text.gguf_vocabulary import CONTROL_BY_NAME

QUANTISED_BY_PACKAGE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
FINITE_BYTES = {  # where a block keeps its float16 scales: high bytes below 0x40 there make them finite
    "Q2_K": slice(80, 84), "Q3_K": slice(108, 110), "Q4_K": slice(0, 4), "Q5_K": slice(0, 4), "Q6_K": slice(208, 210),
    "IQ1_M": slice(48, 56),
}  # fmt: skip


def encoded(name: str, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Blocks of an encoding: quantised by the package where it can, else random bits with finite scales."""
    rng = np.random.default_rng(sum(map(ord, name)))
    kind = gguf.GGMLQuantizationType[name]
    if name in QUANTISED_BY_PACKAGE or name == "BF16":
        return quantize(rng.standard_normal((rows, columns), dtype=np.float32), kind)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    blocks[..., FINITE_BYTES.get(name, slice(0, 2))] &= 0x3F
    return blocks.reshape(rows, -1)


def assert_same_as_package(path: Path) -> gguf.GGUFReader:
    """Names, order, shapes, encodings and values. Returns the package's reader, which is slow to open."""
    ours, theirs = GgufModel(path), gguf.GGUFReader(path)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info, read = ours.tensors[tensor.name], ours.read(tensor.name)
        assert info.encoding == tensor.tensor_type.name
        assert info.shape == tuple(reversed(tensor.shape.tolist())), tensor.name
        assert read.data.shape == info.shape
        expected = dequantize(tensor.data, tensor.tensor_type)
        if read.dtype == "bfloat16":
            values = (read.data.astype(np.uint32) << 16).view(np.float32)
        else:
            assert read.data.dtype == read.dtype
            values = read.data.astype(np.float32)
        expected = expected.reshape(info.shape)
        assert np.array_equal(values.view(np.uint32), expected.view(np.uint32)), f"values of {tensor.name} differ"
    return theirs


@pytest.mark.parametrize("name", [e.name for e in ENCODINGS.values() if e.name not in ("F32", "F16")])
def test_every_encoding_equals_the_package(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    # Rows of one and of several blocks, and a third dimension.
    tensors = tiny_gguf_tensors() | {
        "one_block": (encoded(name, 3, 256), kind),
        "many_blocks": (encoded(name, 5, 1024), kind),
        "three_dimensions": (encoded(name, 6, 512).reshape(2, 3, -1), kind),
    }
    path = write_gguf(tmp_path / "m.gguf", tensors)
    assert_same_as_package(path)
    assert GgufModel(path).tensors["three_dimensions"].shape == (2, 3, 512)


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_plain_values_come_as_they_are(tmp_path: Path, alignment: int | None) -> None:
    rng = np.random.default_rng(1)
    half = rng.standard_normal((3, 33)).astype(np.float16)
    tensors = tiny_gguf_tensors() | {"half": (half, None), "odd": (rng.standard_normal((5, 7), dtype=np.float32), None)}
    path = write_gguf(tmp_path / "m.gguf", tensors, alignment=alignment)
    assert_same_as_package(path)
    model = GgufModel(path)
    assert model.read("half").dtype == "float16"
    assert model.read("odd").dtype == "float32"
    np.testing.assert_array_equal(model.read("half").data, half)
    bits = encoded("BF16", 4, 64)
    path = write_gguf(tmp_path / "b.gguf", tiny_gguf_tensors() | {"b": (bits, gguf.GGMLQuantizationType.BF16)})
    assert GgufModel(path).read("b").dtype == "bfloat16"
    np.testing.assert_array_equal(GgufModel(path).read("b").data, bits.view(np.uint16))


def test_a_wrong_offset_in_the_reader_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above is able to fail: one block off, and it does."""
    path = write_gguf(tmp_path / "m.gguf", tiny_gguf_tensors())
    assert_same_as_package(path)

    read_header = gguf_format.read_header

    def one_block_off(file: MappedFile) -> gguf_format.GgufHeader:
        header = read_header(file)
        header.offsets["blk.0.attn_q.weight"] -= 34
        return header

    monkeypatch.setattr("noria.files.gguf_shards.read_header", one_block_off)
    with pytest.raises(AssertionError, match=r"blk\.0\.attn_q\.weight"):
        assert_same_as_package(path)


def test_metadata_equals_the_package(tmp_path: Path) -> None:
    metadata = TINY_LLAMA_GGUF | {
        "a.text": "Zürich 東京 🦜",
        "a.negative": -5,
        "a.flag": True,
        "a.other_flag": False,
        "a.float": 0.1,
        "a.empty_text": "",
        "a.texts": ["", "ä", "<|im_end|>", "a" * 1000],
        "a.ints": [1, -2, 3],
        "a.floats": [0.5, 1.5],
        "a.flags": [True, False],
    }
    path = write_gguf(tmp_path / "m.gguf", tiny_gguf_tensors(), metadata)
    theirs = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    counts = {"GGUF.version": 3, "GGUF.tensor_count": 3, "GGUF.kv_count": 8 + 10 - 1}
    assert counts | dict(GgufModel(path).metadata) == theirs


def test_default_model_equals_the_package(default_model_path: Path) -> None:
    theirs = assert_same_as_package(default_model_path)
    model = GgufModel(default_model_path)
    for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        assert model.metadata[name] == theirs.fields[name].contents()
    assert model.eos_token_ids == (0, 2)  # <|endoftext|> and <|im_end|>
    assert model.config.vocab_size == 49152
    assert model.config.rope.theta == 100_000.0
    vocabulary = model.tokenizer.vocabulary
    assert vocabulary is not None
    assert (vocabulary.model, vocabulary.pre, len(vocabulary.tokens)) == ("gpt2", "smollm", 49152)
    assert model.tokenizer.chat_template is not None


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    model = GgufModel(write_gguf(tmp_path / "m.gguf", tiny_gguf_tensors()))
    with pytest.raises(ModelFileError, match=r"m\.gguf: tensor 'nope' is missing"):
        model.read("nope")


def test_end_tokens_are_those_named_and_those_known_by_their_spelling(tmp_path: Path) -> None:
    tokens = ["a", "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "</s>", "<|fim_pad|>", "<|end|>", "eom", "<|im_start|>"]
    types = [1, 3, 4, 1, 3, 3, 3, 3, 3]  # <|eot_id|> is a normal token here: converters have got that wrong
    metadata = TINY_LLAMA_GGUF | vocabulary_metadata(tokens, types, eos_token_id=4, eom_token_id=7, eot_token_id=-1)
    model = GgufModel(write_gguf(tmp_path / "m.gguf", tiny_gguf_tensors(), metadata))
    assert model.eos_token_ids == (1, 2, 3, 4, 6, 7)
    assert set(END_TOKENS) <= CONTROL_BY_NAME, "what ends an answer is no text to the tokenizer, whatever its type"


def test_a_model_without_a_tokenizer_opens(tmp_path: Path) -> None:
    model = GgufModel(write_gguf(tmp_path / "m.gguf", tiny_gguf_tensors()), name="tiny")
    assert model.name == "tiny"
    assert model.eos_token_ids == ()
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.tokens"):
        _ = model.tokenizer


def test_vocabulary_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    for tokens, types, message in (
        (["a", "b"], [1], r"2 tokens, but 1 entries"),
        ([str(i) for i in range(33)], [1] * 33, r"33 tokens .* only 32 rows"),
        ([1, 2], [1, 1], r"'tokenizer\.ggml\.tokens' should be an array of str"),
    ):
        metadata = TINY_LLAMA_GGUF | vocabulary_metadata(tokens, types)  # type: ignore[arg-type]
        model = GgufModel(write_gguf(tmp_path / "m.gguf", tiny_gguf_tensors(), metadata))
        with pytest.raises(ModelFileError, match=message):
            _ = model.tokenizer


def test_llama3_scaling_is_read_from_its_tensor(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    tensors = tiny_gguf_tensors() | {"rope_freqs.weight": (factors, None)}
    rope = GgufModel(write_gguf(tmp_path / "m.gguf", tensors)).config.rope
    assert (rope.scaling, rope.frequency_factors) == ("factors", tuple(factors.tolist()))
    for bad in (0.0, -1.0, np.inf, np.nan):
        factors[3] = bad
        with pytest.raises(ModelFileError, match=r"'rope_freqs\.weight' should hold positive float32 numbers"):
            GgufModel(write_gguf(tmp_path / "m.gguf", tensors))
