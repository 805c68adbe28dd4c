"""What every answer and every chunk of one call has in common: its id, when it was made, and by which model."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from noria.server.generation import Usage


class Envelope:
    """Encodes choices as one JSON object. `prefix` begins the call's id, as clients expect of each endpoint."""

    def __init__(self, prefix: str, model: str) -> None:
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model

    def encode(self, kind: str, choices: Sequence[Any], usage: Usage | None = None) -> bytes:
        """`kind` is the object's type in OpenAI's words; `usage` is left out when it is None."""
        content: dict[str, Any] = {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if usage is not None:
            content["usage"] = usage
        return msgspec.json.encode(content)
