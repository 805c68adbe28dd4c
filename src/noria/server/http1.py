"""HTTP/1.1 as uvicorn reads it with httptools, but for two things: `Http1Protocol`.

A request that offers to go on in another protocol (`Upgrade: h2c`, as Java's HttpClient and `curl --http2` do) is
answered as if it did not (RFC 9110, 7.8). And what is no HTTP is refused in the shape of all other errors.
"""

from __future__ import annotations

from array import array
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from noria.server.errors import ApiError


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
            except httptools.HttpParserCallbackError:
                self._protocol.problem = "the URL or a header is malformed"
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

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            return
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":  # is an offer in itself
            raise ValueError("this server is no proxy")
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.head_without_offer = b"\r\n".join([*lines, b"", b""])

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Called for what could not be parsed."""
        self.refuse(ApiError(400, f"this is not HTTP/1.1: {self.problem or msg}", code="invalid_http"))

    def refuse(self, error: ApiError) -> None:
        """Answers what is no whole request, and closes the connection.

        Without a word if an earlier request still waits for its answer, or gets it: this would be taken for a part.
        """
        cycle = self.cycle
        is_answering = cycle and not cycle.response_complete and (cycle.response_started or not cycle.more_body)
        if not self.pipeline and not is_answering:
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
