"""Damaged GGUF files end in a ModelFileError that names the file and the tensor: planted damage, then random damage."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from files.checkpoints import TINY_LLAMA_GGUF, tiny_gguf_tensors, vocabulary_metadata, write_gguf
from noria.errors import ModelError, ModelFileError, UnsupportedError
from noria.files.gguf import GgufModel
from noria.files.gguf_format import UNREADABLE_ENCODINGS

METADATA = TINY_LLAMA_GGUF | vocabulary_metadata(["a", "b", "<|im_end|>"], [1, 1, 3], eos_token_id=2)


def small_file() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        return write_gguf(Path(directory) / "m.gguf", tiny_gguf_tensors(), METADATA).read_bytes()


GOOD = small_file()
DATA_BYTES = 32 * 64 * 4 + 8 * 2 * 34 + 64 * 4  # of the three tensors; each begins at a multiple of 32 by itself
ENTRY = {name: GOOD.index(name.encode()) + len(name) for name in tiny_gguf_tensors()}
"""Where each tensor's entry goes on after the name: dimension count u32, dimensions u64, encoding u32, offset u64."""


def patched(position: int, replacement: bytes) -> bytes:
    return GOOD[:position] + replacement + GOOD[position + len(replacement) :]


def field(name: str) -> int:
    """Where a metadata field's type stands."""
    return GOOD.index(name.encode()) + len(name)


def open_bytes(directory: Path, data: bytes) -> GgufModel:
    path = directory / "damaged.gguf"
    path.write_bytes(data)
    return GgufModel(path)


U32, U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack
Q = ENTRY["blk.0.attn_q.weight"]
NORM = ENTRY["output_norm.weight"]

PLANTED = {
    "empty": (b"", r"damaged\.gguf is empty"),
    "too short for a header": (GOOD[:20], r"truncated"),
    "not GGUF": (b"PK\3\4" + GOOD[4:], r"begins with b'PK\\x03\\x04'"),
    "tensor count": (patched(8, U64(2**61)), r"tensors at byte \d+ cannot fit"),
    "one tensor too many": (patched(8, U64(4)), r"the name of tensor 3"),
    "metadata count": (patched(16, U64(2**63)), r"9223372036854775808 metadata entries"),
    "length of a name": (patched(24, U64(2**64 - 1)), r"the name of metadata entry 0"),
    "type of a field": (patched(field("llama.block_count"), U32(99)), r"'llama\.block_count' has the unknown type 99"),
    "length of an array": (
        patched(field("ggml.tokens") + 8, U64(2**62)),
        r"tokens' claims 4611686018427387904 entries",
    ),
    "array longer than file": (patched(field("ggml.tokens") + 8, U64(2**22)), r"tokens' \(4194304 strings\)"),
    "array of arrays": (
        patched(field("ggml.token_type") + 4, U32(9)),
        r"token_type' is an array of the unknown type 9",
    ),
    "length of a string in an array": (patched(field("ggml.tokens") + 16, U64(2**40)), r"string 0 of 3 of .*tokens'"),
    "text that is not UTF-8": (patched(field("ggml.tokens") + 24, b"\xff"), r"string 0 of .*tokens'.* is not UTF-8"),
    "no dimension": (patched(NORM, U32(0)), r"'output_norm\.weight' has 0 dimensions"),
    "many dimensions": (patched(NORM, U32(2**31)), r"'output_norm\.weight' has 2147483648 dimensions"),
    "dimension of zero": (patched(Q + 12, U64(0)), r"'blk\.0\.attn_q\.weight' has the shape \[0, 64\]"),
    "huge dimension": (patched(Q + 12, U64(2**63)), r"'blk\.0\.attn_q\.weight' ends at byte"),
    "rows not of whole blocks": (patched(Q + 4, U64(63)), r"'blk\.0\.attn_q\.weight' has rows of 63 values"),
    "unknown encoding": (patched(Q + 20, U32(5)), r"'blk\.0\.attn_q\.weight' has the unknown encoding 5"),
    "offset beyond the file": (patched(Q + 24, U64(2**40)), r"'blk\.0\.attn_q\.weight' has offset 1099511627776"),
    "offset overlaps": (patched(Q + 24, U64(8192 - 32)), r"'blk\.0\.attn_q\.weight' has offset 8160; expected is 8192"),
    "offset misaligned": (patched(Q + 24, U64(8192 + 2)), r"'blk\.0\.attn_q\.weight' has offset 8194.*multiple of 32"),
    "truncated by a byte": (GOOD[:-1], r"'output_norm\.weight' ends at byte \d+, but the file has \d+ bytes"),
    "truncated inside a matrix": (GOOD[:-300], r"'blk\.0\.attn_q\.weight' ends at byte"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_damage_is_named(tmp_path: Path, name: str) -> None:
    data, message = PLANTED[name]
    with pytest.raises(ModelFileError, match=message) as caught:
        open_bytes(tmp_path, data)
    assert "damaged.gguf" in str(caught.value)


def test_the_undamaged_file_opens(tmp_path: Path) -> None:
    model = open_bytes(tmp_path, GOOD)
    assert list(model.tensors) == list(tiny_gguf_tensors())
    assert len(GOOD) - max(model._header.offsets.values()) == 64 * 4, "the file ends with its last tensor"


def test_duplicate_names_are_refused(tmp_path: Path) -> None:
    tensors = tiny_gguf_tensors()
    more = tensors | {"output_norm.weighs": tensors["output_norm.weight"]}
    data = write_gguf(tmp_path / "m.gguf", more).read_bytes()
    with pytest.raises(ModelFileError, match=r"tensor 'output_norm\.weight' occurs twice"):
        open_bytes(tmp_path, data.replace(b"output_norm.weighs", b"output_norm.weight"))
    metadata = METADATA | {"a.b": 1, "a.c": 2}
    data = write_gguf(tmp_path / "m.gguf", tensors, metadata).read_bytes()
    with pytest.raises(ModelFileError, match=r"field 'a\.b' occurs twice"):
        open_bytes(tmp_path, data.replace(b"a.c", b"a.b"))


@pytest.mark.parametrize("alignment", [0, 3, 4, 48])
def test_bad_alignment_is_refused(tmp_path: Path, alignment: int) -> None:
    data = write_gguf(tmp_path / "m.gguf", tiny_gguf_tensors(), METADATA, alignment=64).read_bytes()
    position = data.index(b"general.alignment") + len("general.alignment") + 4
    with pytest.raises(ModelFileError, match=r"'general\.alignment'"):
        open_bytes(tmp_path, data[:position] + U32(alignment) + data[position + 4 :])


def test_other_versions_and_encodings_are_unsupported(tmp_path: Path) -> None:
    for version, message in ((U32(1), "version 1; supported"), (U32(4), "version 4"), (b"\0\0\0\3", "big-endian")):
        with pytest.raises(UnsupportedError, match=message):
            open_bytes(tmp_path, patched(4, version))
    assert list(open_bytes(tmp_path, patched(4, U32(2))).tensors) == list(tiny_gguf_tensors())
    for number, encoding in UNREADABLE_ENCODINGS.items():
        with pytest.raises(
            UnsupportedError, match=rf"'blk\.0\.attn_q\.weight' is stored as {encoding}; supported are BF16"
        ):
            open_bytes(tmp_path, patched(Q + 20, U32(number)))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    for length in [*range(0, len(GOOD) - DATA_BYTES + 40, 7), *range(len(GOOD) - 300, len(GOOD), 50)]:
        with pytest.raises(ModelFileError, match=r"damaged\.gguf"):
            open_bytes(tmp_path, GOOD[:length])


HEADER_BYTES = len(GOOD) - DATA_BYTES


def open_and_read_all(directory: Path, data: bytes) -> str | None:
    """The message of the ModelError that opening and reading everything ends in, None if all goes well."""
    try:
        model = open_bytes(directory, data)
        _ = model.eos_token_ids, model.tokenizer
    except ModelError as error:
        return str(error)
    with np.errstate(all="ignore"):  # damaged scales overflow, which is not the reader's business
        for name, info in model.tensors.items():
            assert model.read(name).data.shape == info.shape
    return None


def test_every_single_changed_byte(tmp_path: Path) -> None:
    """Opening and reading succeeds or raises a ModelError that names the file, whichever byte of the header changes."""
    num_opened = num_refused = 0
    for position in range(HEADER_BYTES):
        changed = GOOD[position] ^ (0x80 if position % 2 else 0x01)
        message = open_and_read_all(tmp_path, patched(position, bytes([changed])))
        assert message is None or "damaged.gguf" in message
        num_opened += message is None
        num_refused += message is not None
    assert num_opened > 100, "changed text and numbers that nothing contradicts"
    assert num_refused > 100, "everything else"


@settings(max_examples=400, deadline=1000)
@given(
    changes=st.lists(
        st.tuples(
            st.integers(0, HEADER_BYTES),
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.sampled_from(
                    [b"\xff" * 8, b"\0" * 8, U64(2**31), U64(2**32), U64(2**63), U64(2**22), U32(9), U32(8)]
                ),
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    kept=st.integers(0, 4 * len(GOOD)).map(lambda length: min(length, len(GOOD))),
)
@example(changes=[(0, b"G")], kept=len(GOOD))
def test_random_damage_never_escapes(changes: list[tuple[int, bytes]], kept: int) -> None:
    """The same for several changes at once and for files cut short."""
    data = bytearray(GOOD)
    for position, replacement in changes:
        data[position : position + len(replacement)] = replacement
    with tempfile.TemporaryDirectory() as directory:
        message = open_and_read_all(Path(directory), bytes(data[:kept]))
    event("opened" if message is None else "refused")
    assert message is None or "damaged.gguf" in message


def test_the_package_agrees_that_the_small_file_is_good(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GOOD)
    assert len(gguf.GGUFReader(path).tensors) == 3
