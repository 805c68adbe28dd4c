"""Whether the fields of a parameter object have the types that they are declared with, said in plain words.

Called by `SamplingParams` and the option classes when one is made: Python itself checks no annotation, and a text in
place of a number would fail far away from whoever wrote it. True and False are not numbers here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_LONGEST_SHOWN = 60


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Of a list or tuple: every item is one. A text is no list of texts."""
    return lambda value: isinstance(value, list | tuple) and all(map(is_item, value))


def _is_id_to_number(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_int, value)) and all(map(_is_number, value.values()))


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_int, "a whole number"),
    "float": (_is_number, "a number"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "str": (_is_text, "a text"),
    "tuple[str, ...]": (_are(_is_text), "a list of texts"),
    "tuple[int, ...]": (_are(_is_int), "a list of token ids"),
    "tuple[int | None, ...]": (_are(lambda value: value is None or _is_int(value)), "a list of whole numbers and None"),
    "tuple[tuple[int, ...], ...]": (_are(_are(_is_int)), "a list of lists of token ids"),
    "dict[int, float]": (_is_id_to_number, "a map of token ids to numbers"),
}


def mistyped(values: Iterable[tuple[str, Any]], annotations: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Names of fields whose value is not of the annotated type, each with a sentence that says so."""
    for name, value in values:
        annotation = annotations[name]
        kind = annotation.removesuffix(" | None")
        if value is None and kind != annotation:
            continue
        is_one, what = _KINDS[kind]
        if not is_one(value):
            or_none = " or None" if kind != annotation else ""
            yield name, f"{name} must be {what}{or_none}, not {shown(value)}"


def shown(value: Any) -> str:
    """Any value at a sane length: an int may have more digits than Python is willing to print."""
    if _is_int(value) and abs(value) >= 2**64:
        return "a number beyond 64 bits"
    try:
        text = repr(value)
    except Exception:  # an int with too many digits somewhere inside, or somebody's broken class
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
