"""What becomes of a request's body when the answer begins before all of it has been read: `UnreadBodies`."""

from __future__ import annotations

from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noria.server.request_body import BodyReader


class UnreadBodies:
    """An ASGI layer around everything: whoever answers 401, 404 or 413 need not think of the body.

    Such an answer is sent at once and whole, with `Connection: close`. Only then is the rest of the body read and
    thrown away, without haste (left to itself, uvicorn takes it as fast as it comes), and the connection closed.
    """

    def __init__(self, app: ASGIApp, reader: BodyReader) -> None:
        self._app = app
        self._reader = reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(receive, send)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            if exchange.is_held_open:
                if exchange.status != HTTPStatus.REQUEST_TIMEOUT:  # nobody waits any longer for such a client
                    await self._reader.discard(receive)
                await send({"type": "http.response.body", "body": b""})


class _Exchange:
    """One request and its answer, which is not ended as long as the body is unread: that would end the connection."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._is_read = False
        self._is_early = False
        self.status: int | None = None
        self.is_held_open = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._is_read = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._is_early = not self._is_read
            if self._is_early:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        elif self._is_early and not message.get("more_body", False):
            self.is_held_open = True
            message = {**message, "more_body": True}
        await self._send(message)


def _has_body(scope: Scope) -> bool:
    """Whether a request has one, as its head says (RFC 9112, 6)."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0") != b"")
        for name, value in scope["headers"]
    )
