"""What a request to one of the smaller routes says, typed and checked."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request

from noria.server.bodies import decode_body
from noria.server.field_errors import as_field_error
from noria.server.gate import check_json
from noria.server.headers import ignored_header
from noria.server.request_body import while_connected
from noria.server.state import ServerState

AnyBody = TypeVar("AnyBody", bound=msgspec.Struct)


def read_query(request: Request, kind: type[AnyBody]) -> AnyBody:
    """What stands behind the question mark. Raises `ApiError`."""
    values = dict(request.query_params)
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise as_field_error(str(error), kind, values) from error


async def read_json(request: Request, kind: type[AnyBody], state: ServerState) -> tuple[AnyBody, dict[str, str]]:
    """The body of a request, and the headers that tell of fields nobody knows. Raises `ApiError` and `ClientLeft`."""
    with await state.body_reader.read(request.scope, request.receive) as held:
        raw = held.content or b"{}"
        if state.config is not None:
            check_json(raw, state.config)
        decode = partial(decode_body, raw, kind, is_strict=state.options.strict_fields)
        body, ignored = await while_connected(request.receive, state.text_work.run(decode, num_bytes=len(raw)))
    return body, ignored_header(ignored)
