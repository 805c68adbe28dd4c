"""Named, typed values of a model's description, with errors that name the file and the field: `Fields`.

Used for `config.json` and for GGUF metadata alike (`noria.files.model_config`), and to read JSON files (`read_json`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from noria.errors import ModelFileError, UnsupportedError

REQUIRED: Final[Any] = object()
"""Default that says: there is no default."""

MAX_SIZE: Final = 2**40
"""No dimension or count of a model is larger; anything above it is damage."""

MIN_NUMBER: Final = 2.0**-126
MAX_NUMBER: Final = 2.0**127
"""Between them lie the numbers that float32, in which they are used, holds without loss of digits."""


class Fields:
    """A mapping from names to values and the name of the file they came from. A null value counts as absent."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def get(self, name: str) -> Any:
        """The raw value, None when absent."""
        return self.values.get(name)

    def wrong(self, name: str, wanted: str) -> ModelFileError:
        """The error for a value that is not what it should be."""
        return ModelFileError(f"{self.source}: field {name!r} should be {wanted}, not {short(self.values.get(name))}")

    def unsupported(self, name: str, supported: str) -> UnsupportedError:
        """The error for a value that means what we do not have."""
        return UnsupportedError(
            f"{self.source}: {name} {short(self.values.get(name))} is not supported; supported: {supported}"
        )

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is REQUIRED:
                raise ModelFileError(f"{self.source}: field {name!r} is missing")
            return default
        return value

    def positive_int(self, name: str, default: Any = REQUIRED, *, most: int = MAX_SIZE) -> int:
        value = self._value(name, default)
        if type(value) is not int or not 0 < value <= most:
            raise self.wrong(name, "a positive integer" if most == MAX_SIZE else f"an integer from 1 to {most}")
        return value

    def positive_float(self, name: str, default: Any = REQUIRED) -> float:
        value = self._value(name, default)
        if not _is_positive_number(value):
            raise self.wrong(name, "a positive number")
        return float(value)

    def positive_floats(self, name: str) -> tuple[float, ...]:
        value = self._value(name, REQUIRED)
        if not isinstance(value, list) or not all(map(_is_positive_number, value)):
            raise self.wrong(name, "a list of positive numbers")
        return tuple(map(float, value))

    def nullable_float(self, name: str, absent: float | None) -> float | None:
        """A positive number; None when the file says null, `absent` when it does not have the name at all."""
        if name in self.values and self.values[name] is None:
            return None
        return absent if self.values.get(name) is None else self.positive_float(name)

    def nullable_int(self, name: str, absent: int | None) -> int | None:
        """`nullable_float` for integers."""
        if name in self.values and self.values[name] is None:
            return None
        return absent if self.values.get(name) is None else self.positive_int(name)

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        value = self._value(name, default)
        if type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: Any = REQUIRED) -> str:
        value = self._value(name, default)
        if type(value) is not str or not _is_unicode(value):
            raise self.wrong(name, "a string")
        return value

    def optional_int(self, name: str) -> int | None:
        """An integer of any sign, or None when absent."""
        value = self._value(name, None)
        if value is not None and type(value) is not int:
            raise self.wrong(name, "an integer")
        return value

    def optional_flag(self, name: str) -> bool | None:
        return None if self._value(name, None) is None else self.flag(name)

    def optional_text(self, name: str) -> str | None:
        return None if self._value(name, None) is None else self.text(name)

    def token_ids(self, name: str) -> list[int]:
        """One id, a list of ids, or nothing: how Hugging Face files write `eos_token_id`."""
        value = self._value(name, [])
        ids = value if type(value) is list else [value]
        if any(type(token) is not int for token in ids):
            raise self.wrong(name, "a token id or a list of them")
        return ids

    def section(self, name: str) -> Fields | None:
        """A nested object, None when absent."""
        value = self._value(name, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self.source}: {name}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelFileError when it cannot be read or is not one JSON object."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error
    return parse_json(data, str(path))


def parse_json(data: bytes, source: str, *, unique_names: bool = False) -> dict[str, Any]:
    """The object in UTF-8 JSON text; `unique_names` refuses an object that has the same name twice."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique_names if unique_names else None)
    except RecursionError as error:
        raise ModelFileError(f"{source} is not valid JSON: nested too deeply") from error
    except ValueError as error:  # includes JSONDecodeError, UnicodeDecodeError and integers of absurd length
        raise ModelFileError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{source} should hold a JSON object, not {short(value)}")
    return value


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the name {short(name)} occurs twice")
        values[name] = value
    return values


def _is_unicode(text: str) -> bool:
    """JSON can spell half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_positive_number(value: Any) -> bool:
    return type(value) in (int, float) and MIN_NUMBER <= value <= MAX_NUMBER


def short(value: Any) -> str:
    """How a value is shown in an error: what is very long is cut, since files are not to be trusted."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
