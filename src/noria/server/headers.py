"""Heads of answers: what ASGI wants of them, and the headers that are ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.types import Message

MAX_HEADER_CHARACTERS = 1024


def response_start(status: int, headers: Mapping[str, str]) -> Message:
    """The message that begins an answer."""
    encoded = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Names that a client chose, fit for a header: one line of printable ASCII, and not too long."""
    if not names:
        return {}
    text = ", ".join(names[:MAX_HEADER_CHARACTERS])[:MAX_HEADER_CHARACTERS]
    return {"X-Noria-Ignored-Fields": "".join(c if " " <= c <= "~" else "?" for c in text)}
