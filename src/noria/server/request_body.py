"""Bytes from clients: how many, for how long, and how many together. `BodyReader` reads a body or refuses it.

Nothing here looks into a body. What is too large is refused by its Content-Length, before a byte of it is read, and
then thrown away as it comes, for a while (`noria.server.unread`): clients look for an answer only when they have sent
everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from starlette.types import Receive, Scope

from noria.server.errors import ApiError, unavailable

T = TypeVar("T")

BODIES_AT_ONCE = 8
"""Bodies of the largest size that may be in memory together, until they have become tokens."""

DISCARD_S = 5.0
"""How long the rest of an unread body is read and thrown away before the connection is closed."""

DISCARD_BYTES_PER_S = 64 * 2**20
"""How fast bodies are thrown away, all together: as fast as they can come they would take a core from the engine."""


_PLAIN_CODINGS = {b"content-encoding": (b"", b"identity"), b"transfer-encoding": (b"chunked",)}
"""By the header: what says that a body is what it seems to be."""


class ClientLeft(ConnectionResetError):
    """There is nobody to answer any more."""


class BodyReader:
    """Reads request bodies of one server."""

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._discarded_until_s = 0.0
        """When what has been thrown away is due, on the monotonic clock, at `DISCARD_BYTES_PER_S`."""
        self.num_bytes_held = 0

    async def read(self, scope: Scope, receive: Receive) -> HeldBody:
        """The whole body, which counts as held until it is released.

        Raises `ApiError`, before the body has been read, if it is encoded, too large, too slow, or too much beside
        others, and `ClientLeft` if the client leaves meanwhile.
        """
        for name, value in scope["headers"]:
            plain = _PLAIN_CODINGS.get(name)
            if plain is not None and value.strip().lower() not in plain:
                raise _encoded(name, value)
            if name == b"content-length" and (len(value) > 18 or int(value) > self._max_bytes):
                raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                while await self._read_more(body, receive):
                    pass
        except BaseException as error:
            self.num_bytes_held -= len(body)
            if isinstance(error, TimeoutError):
                message = f"the body was not complete after {self._timeout_s:g} s (--request-read-timeout-s)"
                raise ApiError(408, message, code="request_timeout") from None
            raise
        return HeldBody(self, bytes(body))

    async def discard(self, receive: Receive) -> None:
        """Reads what still comes of a body that nobody wants, without haste and for `DISCARD_S` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while True:
                    message = await receive()
                    if message["type"] != "http.request" or not message.get("more_body", False):
                        return
                    now_s = time.monotonic()
                    num_s = len(message.get("body", b"")) / DISCARD_BYTES_PER_S
                    self._discarded_until_s = max(now_s, self._discarded_until_s) + num_s
                    await asyncio.sleep(self._discarded_until_s - now_s)

    async def _read_more(self, body: bytearray, receive: Receive) -> bool:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk = message.get("body", b"")
        if len(body) + len(chunk) > self._max_bytes:
            raise self._too_large()
        if self.num_bytes_held + len(chunk) > BODIES_AT_ONCE * self._max_bytes:
            raise unavailable(f"{self.num_bytes_held} bytes of other requests are being read", "too_many_bodies")
        body += chunk
        self.num_bytes_held += len(chunk)
        return bool(message.get("more_body", False))

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._max_bytes} bytes (--max-body-bytes)"
        return ApiError(413, message, code="body_too_large")


class HeldBody:
    """A body that is in memory, and counts as such until `release`: use it as a context manager too, so that it is
    released whatever happens."""

    def __init__(self, reader: BodyReader, content: bytes) -> None:
        self._reader = reader
        self.content = content

    def release(self) -> None:
        """It is needed no longer. May be called again."""
        self._reader.num_bytes_held -= len(self.content)
        self.content = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.release()


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` comes to, unless the client leaves first: then it is cancelled, and `ClientLeft` raised.

    So it is when the work is cancelled from elsewhere. The body must have been read.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        working.cancel()  # no-op if it is done; otherwise it aborts what it started
        await asyncio.wait({working, leaving})
    if working.cancelled():
        raise ClientLeft
    return working.result()


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _encoded(header: bytes, coding: bytes) -> ApiError:
    return ApiError(
        415,
        f"the body has {header.decode().title()} {coding.decode('latin-1')!r}, which is not understood here: send it "
        "as it is, without one",
        code="unsupported_content_encoding",
        headers={"Accept-Encoding": "identity"},
    )
