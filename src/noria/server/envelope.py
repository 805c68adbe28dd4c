"""What every answer and every chunk of one call has in common: its id, when it was made, and by which model.

Most chunks of a call differ in nothing but a piece of text, so a `ChunkTemplate` is encoded once and filled in.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from noria.server.answers import Answer, Usage

TEXT_MARK = "text goes here"

_encode = msgspec.json.Encoder().encode


def new_call_id() -> str:
    """Never a client's: two calls may bring the same one. The engine's names for a call's sequences begin with it."""
    return uuid.uuid4().hex


class Envelope:
    """Encodes choices as one JSON object. `prefix` begins the call's id, as clients expect of each endpoint."""

    def __init__(self, prefix: str, model: str, call_id: str, request_id: str | None = None) -> None:
        """`request_id` is the client's name for the call, if it has one. It is told to the client and used nowhere."""
        self._id = f"{prefix}-{request_id or call_id}"
        self._created = int(time.time())
        self._model = model

    def encode(
        self, kind: type[Answer], choices: Sequence[Any], usage: Usage | None = None, **extensions: Any
    ) -> bytes:
        """`choices` are those of `kind`; `usage` is left out when it is None.

        `extensions` are further fields, which clients of OpenAI's API do not know.
        """
        told = UNSET if usage is None else usage
        return _encode(
            kind(id=self._id, created=self._created, model=self._model, choices=choices, usage=told, **extensions)
        )

    def template(self, kind: type[Answer], choice: Any) -> ChunkTemplate:
        """For chunks that are `choice` but for a text, in whose place it has `TEXT_MARK`."""
        return ChunkTemplate(self.encode(kind, [choice]))


class ChunkTemplate:
    """An encoded chunk with a place for a text."""

    def __init__(self, encoded: bytes) -> None:
        # From the right: choices come after them, so a model's name and a client's id can hold what they like.
        self._before, _, self._after = encoded.rpartition(msgspec.json.encode(TEXT_MARK))

    def fill(self, text: str) -> bytes:
        """The chunk with that text."""
        return self._before + _encode(text) + self._after
