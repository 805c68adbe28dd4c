"""What a route is: enough to serve it, and to describe it in /openapi.json. One list makes both, so they agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from noria.server.bodies import as_field_error, decode_body
from noria.server.endpoint import ignored_header
from noria.server.errors import ApiError
from noria.server.gate import check_json
from noria.server.state import ServerState

AnyBody = TypeVar("AnyBody", bound=msgspec.Struct)


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


def read_query(request: Request, kind: type[AnyBody]) -> AnyBody:
    """What stands behind the question mark. Raises `ApiError`."""
    try:
        return msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        raise as_field_error(str(error)) from error


async def read_json(request: Request, kind: type[AnyBody], state: ServerState) -> tuple[AnyBody, dict[str, str]]:
    """The body of a request, and the headers that tell of fields nobody knows. Raises `ApiError`."""
    try:
        held = await state.body_reader.read(request.scope, request.receive)
    except ApiError as error:
        if error.status != HTTPStatus.REQUEST_TIMEOUT:
            await state.body_reader.discard(request.receive)
        error.headers["Connection"] = "close"  # there may be more to come
        raise
    with held:
        raw = held.content or b"{}"
        if state.config is not None:
            check_json(raw, state.config)
        body, ignored = await state.text_work.run(partial(decode_body, raw, kind), num_bytes=len(raw))
    return body, ignored_header(ignored)
