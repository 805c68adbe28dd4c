"""The files of one GGUF model: `open_shards`. Usually one; large models are split (`NAME-00001-of-00003.gguf`, ...).

Used by `noria.files.gguf`. Each shard is a GGUF file of its own that says which of how many it is (`split.no` from 0,
`split.count`) and how many tensors all have together (`split.tensors.count`); the first has the model's metadata. All
of that is compared, so that a missing shard, or one left over from another download, is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from noria.errors import ModelFileError
from noria.files.fields import Fields
from noria.files.gguf_format import GgufHeader, read_header
from noria.files.mapped import MappedFile

_SHARD_NAME: Final = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Shard:
    """One file with its header."""

    file: MappedFile
    header: GgufHeader

    @property
    def fields(self) -> Fields:
        return Fields(self.header.metadata, str(self.file.path))


def open_shards(path: Path) -> list[Shard]:
    """All files of the model that `path` is a file of, in order, checked against each other. Raises `ModelError`."""
    named = _open(path)
    count = named.fields.optional_int("split.count") or 0
    if count <= 1:
        return [named]
    number = _number(named, count)
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or (int(match["number"]), int(match["count"])) != (number + 1, count):
        raise ModelFileError(
            f"{path} is file {number + 1} of {count} of a split model by what it says of itself, so its name should "
            f"end with {_suffix(number, count)}; without that the other files cannot be found"
        )
    paths = [path.with_name(match["model"] + _suffix(i, count)) for i in range(count)]
    for other in paths:
        if not other.is_file():
            raise ModelFileError(f"shard {other} is missing; {path} is one of {count} files")
    shards = [named if i == number else _open(other) for i, other in enumerate(paths)]
    _compare(shards)
    return shards


def joint_header(shards: list[Shard]) -> GgufHeader:
    """The metadata of the first shard and the tensors of all; offsets are from the start of each tensor's own file."""
    tensors = {name: info for shard in shards for name, info in shard.header.tensors.items()}
    offsets = {name: offset for shard in shards for name, offset in shard.header.offsets.items()}
    return replace(shards[0].header, tensors=tensors, offsets=offsets)


def _open(path: Path) -> Shard:
    file = MappedFile(path)
    return Shard(file, read_header(file))


def _suffix(number: int, count: int) -> str:
    return f"-{number + 1:05d}-of-{count:05d}.gguf"


def _number(shard: Shard, count: int) -> int:
    number = shard.fields.optional_int("split.no")
    if number is None or not 0 <= number < count:
        raise shard.fields.wrong("split.no", f"from 0 to {count - 1}")
    return number


def _compare(shards: list[Shard]) -> None:
    first = shards[0]
    total = first.fields.optional_int("split.tensors.count")
    holder: dict[str, Shard] = {}
    for number, shard in enumerate(shards):
        for name, wanted in (("split.no", number), ("split.count", len(shards)), ("split.tensors.count", total)):
            found = shard.fields.optional_int(name)
            if found != wanted:
                raise ModelFileError(
                    f"{shard.file.path} does not belong to {first.file.path}: its field {name!r} is {found}, "
                    f"expected is {wanted}; one of the two is left over from another download"
                )
        for tensor in shard.header.tensors:
            if tensor in holder:
                raise ModelFileError(f"tensor {tensor!r} is in {holder[tensor].file.path} and in {shard.file.path}")
            holder[tensor] = shard
    if total is not None and len(holder) != total:
        raise ModelFileError(
            f"{first.file.path} says that its {len(shards)} files hold {total} tensors, but they hold {len(holder)}; "
            "one of them is left over from another download"
        )
