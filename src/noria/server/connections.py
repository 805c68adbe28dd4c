"""What we add to uvicorn's handling of connections: a limit on waiting for a head (`protocol_class`), and `Connected`.

uvicorn limits how long a connection may idle after an answer, but neither before the first request nor inside a head.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol


def protocol_class(head_timeout_s: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol for HTTP, which then closes a connection that waits for a request's head for so long.

    The time runs from the beginning of the connection, and again from the first byte after an answer.
    """

    class ImpatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:  # each head makes one
                self._stop_waiting()
            elif self._head_timer is None and (before is None or before.response_complete):
                self._wait_for_head()

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
        # h11, uvicorn's other implementation, has no such attribute, and knows HTTP/1.0.
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
