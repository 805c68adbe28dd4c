"""HTTP/1.1 as uvicorn reads it with httptools, but for a few things: `Http1Protocol`.

A request that offers to go on in another protocol (`Upgrade: h2c`, as Java's HttpClient and `curl --http2` do) is
answered as if it did not (RFC 9110, 7.8). What is no HTTP is refused in the shape of all other errors. Fields behind a
chunked body are passed over (RFC 9110, 6.5.1): a proxy has not looked at them. And requests that wait on a connection
for the answer to the one before are few, and all of them hear when the client leaves.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from noria.server.errors import ApiError

logger = logging.getLogger(__name__)

MAX_PIPELINED = 16
"""Requests that may wait on one connection. One read may bring thousands of small ones, each of some kilobytes here."""


class _RefusedHeadError(Exception):
    """Says what is wrong with a head that could be parsed."""


class _Parser(httptools.HttpRequestParser):
    """Has a head that offers another protocol read once more, without the offer.

    At the end of such a head httptools stops: it takes what follows for the other protocol, a body too. What it could
    read after that depends on the head (nothing, after `Connection: close`), so a new parser takes over.
    """

    def __init__(self, protocol: Http1Protocol) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self._protocol = protocol

    def feed_data(self, data: bytes | bytearray | memoryview | array[int]) -> None:
        parser = self
        while True:
            try:
                super(_Parser, parser).feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = self._protocol.head_without_offer + bytes(data[offer.args[0] :])
                parser = self._protocol.parser = _Parser(self._protocol)
            except httptools.HttpParserCallbackError as error:
                cause = error.__context__
                is_ours = isinstance(cause, _RefusedHeadError)
                self._protocol.problem = str(cause) if is_ours else "the URL or a header is malformed"
                raise
            except httptools.HttpParserError as error:
                self._protocol.problem = str(error)
                raise
            else:
                return


class Http1Protocol(HttpToolsProtocol):
    """See above. Of uvicorn's own it needs the parser's callbacks, and what they keep of a head."""

    parser: _Parser

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser = _Parser(self)
        self.head_without_offer = b""
        self.problem = ""
        """What was wrong with the last data."""
        self._is_in_head = False
        self._unanswered: deque[RequestResponseCycle] = deque()
        """Requests in order, without those at the front whose answers were complete when the last one came."""

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._unanswered:  # uvicorn tells the last one only
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)
        # What has not begun holds on to us: without this both would stay until Python looks for circles.
        self._unanswered.clear()
        self.pipeline.clear()
        self.cycle = None  # type: ignore[assignment]

    def on_message_begin(self) -> None:
        self._is_in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self.parser.should_upgrade():
            self.head_without_offer = self._make_head_without_offer()
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _RefusedHeadError(f"more than {MAX_PIPELINED} requests wait on one connection")
        super().on_headers_complete()
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        self._unanswered.append(self.cycle)
        if self.pipeline:
            self.flow.resume_reading()  # which uvicorn has just paused: nobody would see the client leave

    def _make_head_without_offer(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":  # is an offer in itself
            raise _RefusedHeadError("this server is no proxy")
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Called for what could not be parsed."""
        self.refuse(ApiError(400, f"this is not HTTP/1.1: {self.problem or msg}", code="invalid_http"))

    def refuse(self, error: ApiError) -> None:
        """Answers what is no whole request, and closes the connection.

        Only the log is told if an earlier request still waits for its answer, or gets it: this would be taken for it.
        """
        cycle = self.cycle
        is_answering = cycle and not cycle.response_complete and (cycle.response_started or not cycle.more_body)
        if self.pipeline or is_answering:
            logger.warning("a connection is closed beside an answer: %s", error)
        else:
            body = error.body
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            lines = [STATUS_LINE[error.status].strip(), *(name + b": " + value for name, value in headers), b"", body]
            self.transport.write(b"\r\n".join(lines))
        self.transport.close()
