"""What we add to uvicorn's handling of connections: limits on waiting for a head (`protocol_class`), and `Connected`.

uvicorn limits how long a connection may idle after an answer, but neither before the first request nor inside a head,
and what is not a body may be of any size. What it makes of a request's bytes is in `noria.server.http1`.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noria.server.errors import ApiError
from noria.server.http1 import Http1Protocol

MAX_HEAD_BYTES = 64 * 1024
"""Of a request's line and headers, or of what surrounds the pieces of a chunked body, that come bit by bit; what comes
at once may be a few times larger."""


def protocol_class(head_timeout_s: float) -> type[asyncio.Protocol]:
    """The protocol for HTTP, which then closes a connection that waits for a request's head for so long.

    The time runs from the beginning of the connection, and again from the first byte after an answer. And it closes one
    that has sent more than `MAX_HEAD_BYTES` of which neither a request nor a piece of a body has come.
    """

    class ImpatientProtocol(Http1Protocol):
        _head_timer: asyncio.TimerHandle | None = None
        _num_head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            is_idle = before is None or before.response_complete
            self._num_head_bytes += len(data)
            super().data_received(data)
            if self.cycle is not before:  # each head makes one
                self._stop_waiting()
                self._num_head_bytes = 0
                return
            if is_idle and self._head_timer is None:
                self._wait_for_head()
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                message = f"the request's head, or what is behind its body, is larger than {MAX_HEAD_BYTES} bytes"
                self.refuse(ApiError(431, message, code="head_too_large"))

        def on_body(self, body: bytes) -> None:
            self._num_head_bytes = 0
            super().on_body(body)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _wait_for_head(self) -> None:
            self._head_timer = asyncio.get_running_loop().call_later(head_timeout_s, self.transport.abort)

        def _stop_waiting(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return ImpatientProtocol


class Connected:
    """An application that is told more of its connection than ASGI says, where uvicorn offers it (unofficially).

    `noria.transport` in the scope is the connection's transport: the only way to cut a client that does not read, since
    an orderly close waits for it. And HTTP/1.0 has no chunks: what has no length ends there with the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = getattr(send, "__self__", None)
        scope["noria.transport"] = getattr(cycle, "transport", None)
        if scope.get("http_version") == "1.0" and hasattr(cycle, "chunked_encoding"):
            send = _without_chunks(cycle, send)
        await self._app(scope, receive, send)


def _without_chunks(cycle: Any, send: Send) -> Send:
    """`send` for one request of HTTP/1.0 (RFC 9112, 6.3), to which uvicorn says `Connection: close` anyway.

    `cycle` is uvicorn's, for that request. It takes an answer without a length for chunked unless it believes that the
    length is known, and then it counts. What is left of the length stays endless until the last part, since parts may
    overtake each other or be cancelled while they wait for a slow reader.
    """
    is_counted = True

    async def send_plainly(message: Message) -> None:
        nonlocal is_counted
        if message["type"] == "http.response.start":
            is_counted = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not is_counted:
                cycle.chunked_encoding = False
        elif not is_counted:
            is_last = not message.get("more_body", False)
            cycle.expected_content_length = len(message.get("body", b"")) if is_last else sys.maxsize
        await send(message)

    return send_plainly
