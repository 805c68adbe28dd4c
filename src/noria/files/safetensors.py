"""One safetensors file, mapped and checked: `SafetensorsFile`.

Used by `noria.files.huggingface`. The format is a length, a JSON header and the data, so this reads it directly instead
of through the safetensors library: that one cannot hand bfloat16 to numpy, its errors name neither file nor tensor, and
it would be a dependency for forty lines. Only encodings that hold weights are read (F32, F16, BF16, and fp8).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final, Literal

from noria.errors import ModelFileError, UnsupportedError
from noria.files.fields import MAX_SIZE, parse_json, short
from noria.files.fp8 import FP8_ENCODINGS, decode_fp8
from noria.files.mapped import MappedFile
from noria.files.model import HostTensor, RawTensor, TensorInfo

MAX_HEADER_BYTES: Final = 100_000_000
"""The safetensors library has the same limit."""

ENCODINGS: Final[dict[str, tuple[Literal["float32", "float16", "bfloat16"], str, int]]] = {
    "F32": ("float32", "<f4", 4),
    "F16": ("float16", "<f2", 2),
    "BF16": ("bfloat16", "<u2", 2),
    "F8_E4M3": ("float32", "u1", 1),
    "F8_E5M2": ("float32", "u1", 1),
}
"""By the file's name for it: our name, how numpy sees it, bytes per value. fp8 is decoded to float32."""


class SafetensorsFile:
    """An opened safetensors file. Opening checks that its tensors fill its data exactly, without gaps or overlaps."""

    def __init__(self, path: Path) -> None:
        """Raises ModelFileError for a damaged file, UnsupportedError for an encoding that cannot be read."""
        self.path = path
        self._file = MappedFile(path)
        self.tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        header, data_start = self._read_header()
        self.num_data_bytes = self._file.size - data_start
        """Bytes of all tensors together."""
        self._place_tensors(header, data_start)

    def read(self, name: str) -> HostTensor:
        """The values of one of `tensors`: a read-only view of the mapped file, or decoded from fp8 (without scales)."""
        info = self.tensors[name]
        dtype, stored, _ = ENCODINGS[info.encoding]
        data = self._file.array(self._offsets[name], info.shape, stored)
        return HostTensor(decode_fp8(data, info.encoding) if info.encoding in FP8_ENCODINGS else data, dtype)

    def raw(self, name: str) -> RawTensor:
        """The bytes of one of `tensors`: a read-only view of the mapped file."""
        info = self.tensors[name]
        row_bytes = info.shape[-1] * ENCODINGS[info.encoding][2] if info.shape else ENCODINGS[info.encoding][2]
        return RawTensor(self._file.rows(self._offsets[name], math.prod(info.shape[:-1]), row_bytes), info.encoding)

    def _read_header(self) -> tuple[dict[str, Any], int]:
        """The header without its `__metadata__`, and where the data begins."""
        size = self._file.size
        length = int.from_bytes(self._file.bytes[:8], "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ModelFileError(
                f"{self.path} is not a valid safetensors file: a header of {length} bytes does not fit into its {size} "
                "bytes; it was probably not copied or downloaded completely"
            )
        header = parse_json(self._file.bytes[8 : 8 + length], f"the header of {self.path}", unique_names=True)
        header.pop("__metadata__", None)
        return header, 8 + length

    def _place_tensors(self, header: dict[str, Any], data_start: int) -> None:
        spans: list[tuple[int, int, str]] = []
        for name, entry in header.items():
            where = f"{self.path}: tensor {short(name)}"
            if not isinstance(entry, dict):
                raise ModelFileError(f"{where} has no valid entry in the header")
            encoding, shape, (begin, end) = entry.get("dtype"), _sizes(entry, "shape", where), _span(entry, where)
            if not isinstance(encoding, str) or encoding not in ENCODINGS:
                raise UnsupportedError(f"{where} is stored as {short(encoding)}; supported are {', '.join(ENCODINGS)}")
            num_bytes = ENCODINGS[encoding][2]
            for length in shape:
                num_bytes *= length
            if end - begin != num_bytes:
                raise ModelFileError(
                    f"{where} of shape {list(shape)} in {encoding} takes {num_bytes} bytes, "
                    f"but the header gives it {end - begin}"
                )
            spans.append((begin, end, name))
            self.tensors[name] = TensorInfo(name, shape, encoding, self.path)
            self._offsets[name] = data_start + begin
        self._check_spans(sorted(spans))

    def _check_spans(self, spans: list[tuple[int, int, str]]) -> None:
        position = 0
        for begin, end, name in spans:
            if begin != position:
                raise ModelFileError(
                    f"{self.path}: tensor {name!r} begins at data byte {begin}, "
                    f"but the tensor before it ends at {position}"
                )
            if end > self.num_data_bytes:
                raise ModelFileError(
                    f"{self.path}: tensor {name!r} ends at data byte {end}, but the file has only "
                    f"{self.num_data_bytes}; it was probably not copied or downloaded completely"
                )
            position = end
        if position != self.num_data_bytes:
            raise ModelFileError(
                f"{self.path}: {self.num_data_bytes - position} bytes after the last tensor belong to none; "
                "is the file damaged?"
            )


def _sizes(entry: dict[str, Any], name: str, where: str) -> tuple[int, ...]:
    sizes = entry.get(name)
    if not isinstance(sizes, list) or any(type(size) is not int or not 0 <= size < MAX_SIZE for size in sizes):
        raise ModelFileError(f"{where}: {name!r} should be a list of sizes, not {str(sizes)[:80]}")
    if len(sizes) > 8:
        raise ModelFileError(f"{where} has {len(sizes)} dimensions")
    return tuple(sizes)


def _span(entry: dict[str, Any], where: str) -> tuple[int, int]:
    offsets = _sizes(entry, "data_offsets", where)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelFileError(f"{where}: 'data_offsets' should be begin and end, not {list(offsets)}")
    return offsets[0], offsets[1]
