"""Connections that send no request, or the head of one bit by bit, are closed: `protocol_class`.

uvicorn limits how long a connection may idle after an answer, but neither before the first request nor inside a head.
"""

from __future__ import annotations

import asyncio

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
