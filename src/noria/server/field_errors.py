"""What msgspec has against a body or a query, as an answer: JSON's words for types, the field's name, what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import EnumMeta
from typing import Any

import msgspec

from noria.server.errors import ApiError

JSON_WORDS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "object": "an object",
    "array": "an array",
    "null": "null",
}
ELSEWHERE = {
    ("messages", "prompt"): "a prompt goes to /v1/completions",
    ("prompt", "messages"): "messages go to /v1/chat/completions",
}
"""What to say when the first is missing and the second is there."""


def as_field_error(message: str, kind: type[msgspec.Struct], values: Mapping[str, Any]) -> ApiError:
    """msgspec says "Expected `int | null`, got `str` - at `$.max_tokens`": the path becomes `param`. `values` are what
    was to become a `kind`."""
    found = re.search(r" - at `\$\.?([^`]*)`$", message)
    if found:
        param = found[1].replace("[...]", "")  # some value of a map
        text = _choices(param, kind) or re.sub("`([a-z |]+)`", _in_words, message[: found.start()])
        return ApiError(400, f"{param}: {text}", param=param, code="invalid_type")
    found = re.search(r"missing required field `([^`]*)`", message)
    if found:
        hints = [hint for (missing, there), hint in ELSEWHERE.items() if missing == found[1] and there in values]
        text = "; ".join([f"{found[1]} is required", *hints])
        return ApiError(400, text, param=found[1], code="missing_required_parameter")
    return ApiError(400, re.sub("`([a-z |]+)`", _in_words, message), code="invalid_type")


def _in_words(types: re.Match[str]) -> str:
    words = [JSON_WORDS.get(name, name) for name in types[1].split(" | ")]
    return " or ".join(words)


def _choices(param: str, kind: type[msgspec.Struct]) -> str | None:
    """The values that a field may have, if they are named."""
    types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    choices = types.get(param)
    return f"expected one of {', '.join(choices)}" if isinstance(choices, EnumMeta) else None
