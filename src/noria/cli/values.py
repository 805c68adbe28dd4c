"""How values are written on the command line: whole numbers, sizes with a unit, numbers; and options' names in errors.

A size counts tokens, blocks or bytes, and may have a unit. Ports, threads and requests are counted in plain numbers:
a unit there is more likely a slip than meant.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, get_args

import msgspec
from cyclopts import Token

from noria.config import EngineOptions, ServerOptions
from noria.sampling import SamplingParams

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_size(text: str) -> int:
    """A whole number, perhaps with a unit: 4096, 8k (8,000), 2M, 1.5GiB. Raises ValueError."""
    found = re.fullmatch(r"([+-]?\d+(?:\.\d+)?)([a-z]*)", text.strip().lower().replace("_", ""))
    if found is None or found[2] not in _UNITS:
        raise ValueError(f'"{text}" is not a size: a whole number such as 4096, 8k (8,000), 2M or 4GiB')
    value = Fraction(found[1]) * _UNITS[found[2]]
    if value.denominator != 1:
        raise ValueError(f'"{text}" is not a whole number')
    return value.numerator


def parse_int(text: str) -> int:
    """A whole number without a unit. Raises ValueError, which says what to write."""
    plain = text.strip().replace("_", "")
    if re.fullmatch(r"[+-]?\d+", plain):
        return int(plain)
    try:
        meant = f"; write {parse_size(text)}"
    except ValueError:
        meant = ""
    raise ValueError(f'"{text}" is not a whole number without a unit{meant}')


def parse_number(text: str) -> float:
    """Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f'"{text}" is not a number such as 30 or 0.5') from None


def parse_seconds(text: str) -> float:
    """Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f'"{text}" is not a number of seconds such as 30 or 0.5, without a unit') from None


_PARSERS: dict[str, Callable[[str], Any]] = {
    "INT": parse_int,
    "SIZE": parse_size,
    "SECONDS": parse_seconds,
    "FLOAT": parse_number,
    "SHARE": parse_number,
}


def converter(value: str) -> Callable[[Any, Sequence[Token]], Any] | None:
    """What turns the text of an option whose value is called so into it; None where nothing special does."""
    parse = _PARSERS.get(value)
    if parse is None:
        return None

    def convert(type_: Any, tokens: Sequence[Token]) -> Any:
        text = tokens[0].value
        if text.lower() == "none" and type(None) in get_args(type_):
            return None
        return parse(text)

    return convert


_NAMES = [spec.name for options in (EngineOptions, ServerOptions) for spec in dataclasses.fields(options)]
_NAMES += [spec.name for spec in msgspec.structs.fields(SamplingParams)]
_ANYWHERE = re.compile(rf"(?<![\w.`-])({'|'.join(name for name in _NAMES if '_' in name)})(?!\w)")
_AT_THE_START = re.compile(rf"^({'|'.join(_NAMES)})(?!\w)")
"""A name like `port` or `seed` is also a word, but not where a message begins with what is wrong."""


def with_flags(message: str) -> str:
    """An error that names options as programs do, with their flags: `max_num_seqs` becomes `--max-num-seqs`."""

    def flag(found: re.Match[str]) -> str:
        return f"--{found[1].replace('_', '-')}"

    return _ANYWHERE.sub(flag, _AT_THE_START.sub(flag, message))
