"""What a route is: enough to serve it, and to describe it in /openapi.json. One list makes both, so they agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSpec:
    """One path and what it takes and gives. `handler` is a function of a request, or an ASGI application."""

    path: str
    handler: Any
    summary: str
    methods: tuple[str, ...] = ("GET",)
    body: type[msgspec.Struct] | None = None
    """Sent as JSON."""
    query: type[msgspec.Struct] | None = None
    answers: tuple[type[msgspec.Struct], ...] = ()
    """One of these as JSON, with status 200. Empty: something else, of the type `media_type`."""
    media_type: str = "application/json"
    chunk: type[msgspec.Struct] | None = None
    """What the data of each event is, if the answer may come as server-sent events."""


def json_answer(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")
