"""The GGUF container: metadata and the table of tensors, read from a mapped file and checked. No model knowledge.

Used by `noria.files.gguf`. Reads versions 2 and 3, little endian. Nothing in the file is believed before it is
compared with the file's size, and damage ends in a `ModelFileError` that names the file and the place. It does not
decode tensor values, and it does not write.

Layout (all integers little endian): magic, version u32, tensor count u64, metadata count u64; the metadata entries
(name, type u32, value); the tensor entries (name, dimension count u32, dimensions u64 with the fastest first, encoding
u32, offset u64); padding; tensor data. A string is its length in bytes (u64) and UTF-8.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from noria.errors import ModelFileError, UnsupportedError
from noria.files.fields import short
from noria.files.mapped import MappedFile
from noria.files.model import TensorInfo

DEFAULT_ALIGNMENT: Final = 32
MAX_DIMENSIONS: Final = 4
MAX_ARRAY_LENGTH: Final = 2**23
"""Entries of a metadata array. The largest vocabularies have about 300 thousand tokens."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How values are stored: `block_values` consecutive values of a row in `block_bytes` bytes."""

    name: str
    block_values: int
    block_bytes: int


ENCODINGS: Final[dict[int, Encoding]] = {
    0: Encoding("F32", 1, 4),
    1: Encoding("F16", 1, 2),
    30: Encoding("BF16", 1, 2),
    2: Encoding("Q4_0", 32, 18),
    3: Encoding("Q4_1", 32, 20),
    6: Encoding("Q5_0", 32, 22),
    7: Encoding("Q5_1", 32, 24),
    8: Encoding("Q8_0", 32, 34),
    10: Encoding("Q2_K", 256, 84),
    11: Encoding("Q3_K", 256, 110),
    12: Encoding("Q4_K", 256, 144),
    13: Encoding("Q5_K", 256, 176),
    14: Encoding("Q6_K", 256, 210),
    16: Encoding("IQ2_XXS", 256, 66),
    17: Encoding("IQ2_XS", 256, 74),
    18: Encoding("IQ3_XXS", 256, 98),
    19: Encoding("IQ1_S", 256, 50),
    20: Encoding("IQ4_NL", 32, 18),
    21: Encoding("IQ3_S", 256, 110),
    22: Encoding("IQ2_S", 256, 82),
    23: Encoding("IQ4_XS", 256, 136),
    29: Encoding("IQ1_M", 256, 56),
}
"""By the number in the file: the encodings that can be read."""

ENCODING_IDS: Final[dict[str, int]] = {encoding.name: number for number, encoding in ENCODINGS.items()}

UNREADABLE_ENCODINGS: Final[dict[int, str]] = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""Numbers that exist in the format and that this version does not read."""

_SCALARS: Final[dict[int, str]] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING: Final = 8
_ARRAY: Final = 9

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")

_MIN_METADATA_BYTES: Final = 13  # empty name, type, one byte
_MIN_TENSOR_BYTES: Final = 24  # empty name, no dimension, encoding, offset


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What precedes the tensor data. Metadata values are int, float, bool, str, or a list of one of these."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    offsets: dict[str, int]
    """Where each tensor's data begins, in bytes from the start of the file."""


def read_header(file: MappedFile) -> GgufHeader:
    """Reads and checks everything before the tensor data, and that all tensor data lies inside the file.

    Raises ModelFileError, or UnsupportedError for a well-formed file of another version, byte order or encoding.
    """
    cursor = _Cursor(file)
    version = _read_version(cursor)
    num_tensors = cursor.u64("the tensor count")
    num_entries = cursor.u64("the metadata count")
    cursor.check_room(num_entries, _MIN_METADATA_BYTES, f"{num_entries} metadata entries")
    metadata = _read_metadata(cursor, num_entries)
    cursor.check_room(num_tensors, _MIN_TENSOR_BYTES, f"{num_tensors} tensors")
    entries = _read_tensor_entries(cursor, num_tensors)
    alignment = _alignment(file, metadata)
    data_start = _round_up(cursor.position, alignment)
    return _place_tensors(file, version, metadata, entries, data_start, alignment)


class _Cursor:
    """Reads values one after another; every read is checked against the end of the file."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self.data = file.bytes
        self.size = file.size
        self.position = 0

    def damaged(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path} is not a valid GGUF file: {what}")

    def check_room(self, count: int, min_bytes_each: int, what: str) -> None:
        if count * min_bytes_each > self.size - self.position:
            raise self.damaged(f"{what} at byte {self.position} cannot fit into its {self.size} bytes; truncated?")

    def take(self, num_bytes: int, what: str) -> int:
        """Advances over `num_bytes` and returns where they begin."""
        start = self.position
        if num_bytes > self.size - start:
            raise self.damaged(
                f"{what} ({num_bytes} bytes from byte {start}) ends after its {self.size} bytes; truncated?"
            )
        self.position = start + num_bytes
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, what))[0])

    def text(self, what: str) -> str:
        length = self.u64(what)
        start = self.take(length, what)
        return self._decode(self.data[start : start + length], start, what)

    def texts(self, count: int, what: str) -> list[str]:
        """`count` strings. Written out flat: vocabularies hold hundreds of thousands of them."""
        data, size, position = self.data, self.size, self.position
        unpack_length = _U64.unpack_from
        raw: list[bytes] = []
        for _ in range(count):
            start = position + 8
            if start > size:
                break
            position = start + unpack_length(data, position)[0]
            if position > size:
                break
            raw.append(data[start:position])
        if len(raw) < count:
            raise self.damaged(f"string {len(raw)} of {count} of {what} ends after its {size} bytes; truncated?")
        self.position = position
        try:
            return [text.decode() for text in raw]
        except UnicodeDecodeError:
            return [self._decode(text, position, f"string {i} of {what}") for i, text in enumerate(raw)]

    def _decode(self, raw: bytes, position: int, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} near byte {position} is not UTF-8: {raw[:40]!r}") from error

    def scalars(self, dtype: str, count: int, what: str) -> list[Any]:
        start = self.take(count * np.dtype(dtype).itemsize, what)
        if dtype == "?":  # any byte but 0 is true
            return [byte != 0 for byte in self.data[start : start + count]]
        values: list[Any] = np.frombuffer(self.data, dtype=dtype, count=count, offset=start).tolist()
        return values


def _read_version(cursor: _Cursor) -> int:
    start = cursor.take(4, "the magic number")
    magic = cursor.data[start : start + 4]
    if magic != b"GGUF":
        raise cursor.damaged(f"it begins with {magic!r} instead of b'GGUF'")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and version:
        raise UnsupportedError(f"{cursor.path} is a big-endian GGUF file; only little-endian files are supported")
    if version not in (2, 3):
        raise UnsupportedError(f"{cursor.path} is GGUF version {version}; supported are versions 2 and 3")
    return version


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        name = cursor.text(f"the name of metadata entry {index}")
        if name in metadata:
            raise cursor.damaged(f"the metadata field {short(name)} occurs twice")
        metadata[name] = _read_value(cursor, f"metadata field {short(name)}")
    return metadata


def _read_value(cursor: _Cursor, what: str) -> Any:
    kind = cursor.u32(what)
    if kind == _STRING:
        return cursor.text(what)
    if kind in _SCALARS:
        return cursor.scalars(_SCALARS[kind], 1, what)[0]
    if kind != _ARRAY:
        raise cursor.damaged(f"{what} has the unknown type {kind}")
    kind = cursor.u32(what)
    count = cursor.u64(what)
    if count > MAX_ARRAY_LENGTH:
        raise cursor.damaged(f"{what} claims {count} entries; at most {MAX_ARRAY_LENGTH} are accepted")
    if kind == _STRING:
        cursor.check_room(count, 8, f"{what} ({count} strings)")
        return cursor.texts(count, what)
    if kind in _SCALARS:
        return cursor.scalars(_SCALARS[kind], count, what)
    raise cursor.damaged(f"{what} is an array of the unknown type {kind}")


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    name: str
    shape: tuple[int, ...]  # row-major, as in numpy: reversed from the file's order
    encoding: int
    offset: int  # from the start of the tensor data


def _read_tensor_entries(cursor: _Cursor, count: int) -> list[_TensorEntry]:
    entries: list[_TensorEntry] = []
    for index in range(count):
        name = cursor.text(f"the name of tensor {index}")
        what = f"the entry of tensor {short(name)}"
        num_dimensions = cursor.u32(what)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise cursor.damaged(
                f"tensor {short(name)} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible"
            )
        dimensions = cursor.scalars("<u8", num_dimensions, what)
        encoding = cursor.u32(what)
        offset = cursor.u64(what)
        entries.append(_TensorEntry(name, tuple(reversed(dimensions)), encoding, offset))
    return entries


def _alignment(file: MappedFile, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1) or alignment > file.size:
        raise ModelFileError(
            f"{file.path}: field 'general.alignment' should be a power of two from 8, not {alignment!r}"
        )
    return alignment


def _place_tensors(
    file: MappedFile,
    version: int,
    metadata: dict[str, Any],
    entries: list[_TensorEntry],
    data_start: int,
    alignment: int,
) -> GgufHeader:
    """Checks every entry and turns it into a TensorInfo.

    Tensor data lies in the order of the entries without gaps other than padding (llama.cpp insists on it too), so any
    wrong offset is seen: one that overlaps, one that points past the end, and two that are exchanged.
    """
    tensors: dict[str, TensorInfo] = {}
    offsets: dict[str, int] = {}
    expected = 0
    for entry in entries:
        where = f"{file.path}: tensor {short(entry.name)}"
        if entry.name in tensors:
            raise ModelFileError(f"{where} occurs twice")
        encoding = _encoding(where, entry.encoding)
        num_bytes = _num_bytes(where, entry.shape, encoding)
        if entry.offset != expected:
            raise ModelFileError(
                f"{where} has offset {entry.offset}; expected is {expected}, where the tensor before it ends"
                + (f" (a multiple of {alignment})" if entry.offset % alignment else "")
            )
        start = data_start + entry.offset
        if start + num_bytes > file.size:
            raise ModelFileError(
                f"{where} ends at byte {start + num_bytes}, but the file has {file.size} bytes; "
                "it was probably not copied or downloaded completely"
            )
        tensors[entry.name] = TensorInfo(entry.name, entry.shape, encoding.name, file.path)
        offsets[entry.name] = start
        expected = _round_up(entry.offset + num_bytes, alignment)
    return GgufHeader(version, metadata, tensors, offsets)


def _encoding(where: str, number: int) -> Encoding:
    encoding = ENCODINGS.get(number)
    if encoding is not None:
        return encoding
    if number in UNREADABLE_ENCODINGS:
        raise UnsupportedError(
            f"{where} is stored as {UNREADABLE_ENCODINGS[number]}; supported are {', '.join(sorted(ENCODING_IDS))}"
        )
    raise ModelFileError(f"{where} has the unknown encoding {number}")


def _num_bytes(where: str, shape: tuple[int, ...], encoding: Encoding) -> int:
    if 0 in shape:
        raise ModelFileError(f"{where} has the shape {list(shape)}, which holds nothing")
    if shape[-1] % encoding.block_values:
        raise ModelFileError(
            f"{where} has rows of {shape[-1]} values, not whole {encoding.name} blocks of {encoding.block_values}"
        )
    num_values = 1
    for size in shape:
        num_values *= size
    return num_values // encoding.block_values * encoding.block_bytes


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
