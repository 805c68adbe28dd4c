"""Errors as clients see them: OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, and a status."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from noria.errors import EngineError, NoriaError, RequestError, UnavailableError

MAX_MESSAGE_CHARACTERS = 1000
"""Of a message, which may tell again what the client sent: a name of 10 MB is not worth sending back."""


class ErrorContent(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """What every error looks like. `param` names the field at fault, `code` says what is wrong in a word."""

    error: ErrorContent


class ApiError(Exception):
    """Ends a request with a status and an error body. `param` names the field at fault, as the client spelled it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = clipped(message)
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})
        self.content = ErrorAnswer(ErrorContent(message, kind, param, code))

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(self.content)


def clipped(text: str, most: int = MAX_MESSAGE_CHARACTERS) -> str:
    """A text without its middle if it is too long: what is wrong stands at its ends, what was sent between."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} [... {len(text) - 2 * (most // 2)} characters ...] {text[-(most // 2) :]}"


def unavailable(message: str, code: str, *, retry_after_s: int = 1) -> ApiError:
    """503 for what will pass: loading, draining, a full queue, a deadline."""
    return ApiError(
        503, message, kind="service_unavailable_error", code=code, headers={"Retry-After": str(retry_after_s)}
    )


def as_api_error(error: Exception, renamed: Mapping[str, str] | None = None) -> ApiError:
    """Any error of ours in HTTP's terms. `renamed` maps internal field names to those of the endpoint."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        param = (renamed or {}).get(error.param or "", error.param)
        return ApiError(400, str(error), param=param, code=error.code)
    if isinstance(error, UnavailableError):
        return unavailable(str(error), error.code)
    if isinstance(error, RecursionError):  # only what a client nested is ever walked that deep
        return ApiError(400, "the body is nested too deeply", code="invalid_value")
    if isinstance(error, EngineError):
        return ApiError(500, str(error), kind="server_error", code="engine_error")
    if isinstance(error, NoriaError):
        return ApiError(500, str(error), kind="server_error")
    return ApiError(500, "an internal error; the server's log has the details", kind="server_error")
