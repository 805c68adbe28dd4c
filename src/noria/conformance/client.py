"""A small HTTP client that hides nothing: one connection per request unless told otherwise, bodies as they came."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import urllib.parse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from noria.conformance.contract import NotSupported, Unmet, expect
from noria.conformance.endpoints import PROMPTS, Endpoint
from noria.conformance.sse import read_events

REFUSALS = (400, 404, 405, 422, 501)
"""Statuses with which a server may say that it does not support something."""


@dataclass(frozen=True, slots=True)
class Response:
    """What came back. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as strict JSON. Raises `Unmet`."""
        return strict_json(self.body)

    @property
    def is_json(self) -> bool:
        return self.headers.get("content-type", "").split(";")[0].strip().lower() == "application/json"

    @property
    def shown(self) -> str:
        """Status and the beginning of the body, for a reason."""
        return f"{self.status} {self.body[:160].decode(errors='replace')!r}"

    def error(self, *statuses: int) -> dict[str, Any]:
        """The content of an error of OpenAI's shape with one of those statuses. Raises `Unmet`."""
        expect(self.status in statuses, f"expected status {' or '.join(map(str, statuses))}, got {self.shown}")
        content = self.json
        expect(isinstance(content, dict) and isinstance(content.get("error"), dict), f'no "error": {self.shown}')
        error: dict[str, Any] = content["error"]
        return error


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream that ended as it should: its events between the first and [DONE]."""

    headers: dict[str, str]
    events: list[dict[str, Any]]
    raw: bytes

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        """What the chunks say of one choice, in order."""
        return [choice for event in self.events for choice in event["choices"] if choice["index"] == index]

    def text(self, endpoint: Endpoint, index: int = 0) -> str:
        return "".join(endpoint.piece(choice) for choice in self.choices(index))

    def finish_reason(self, index: int = 0) -> Any:
        reasons = [choice["finish_reason"] for choice in self.choices(index) if choice.get("finish_reason")]
        expect(len(reasons) == 1, f"choice {index} has {len(reasons)} finish reasons in the stream, not one")
        return reasons[0]

    @property
    def usage(self) -> dict[str, Any]:
        """What the usage chunk says. Raises `Unmet`."""
        last = self.events[-1]
        expect(isinstance(last.get("usage"), dict), f"the last chunk has no usage: {last}")
        usage: dict[str, Any] = last["usage"]
        return usage


@dataclass(frozen=True, slots=True)
class Server:
    """The server under test. `url` is its root, without /v1; `needs` are those of the check that uses it."""

    url: str
    model: str = ""
    api_key: str | None = None
    timeout_s: float = 60.0
    needs: tuple[str, ...] = field(default=())

    @classmethod
    def at(cls, url: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> Server:
        """`url` with or without a scheme, a slash at the end, or /v1."""
        full = (url if "://" in url else f"http://{url}").rstrip("/")
        return cls(full.removesuffix("/v1"), api_key=api_key, timeout_s=timeout_s)

    def needing(self, needs: tuple[str, ...]) -> Server:
        return replace(self, needs=needs)

    # -- connections

    @property
    def _parts(self) -> urllib.parse.SplitResult:
        return urllib.parse.urlsplit(self.url)

    @property
    def root(self) -> str:
        """What comes before each path: empty, or that of a server behind a proxy."""
        return self._parts.path

    @contextmanager
    def connection(self) -> Iterator[http.client.HTTPConnection]:
        """A connection that several requests may use."""
        parts = self._parts
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout_s)
        try:
            yield connection
        finally:
            connection.close()

    @contextmanager
    def socket(self) -> Iterator[socket.socket]:
        """The bare connection, for what no HTTP client would send."""
        parts = self._parts
        port = parts.port or (443 if parts.scheme == "https" else 80)
        plain = socket.create_connection((parts.hostname or "", port), timeout=self.timeout_s)
        try:
            if parts.scheme == "https":
                plain = ssl.create_default_context().wrap_socket(plain, server_hostname=parts.hostname)
            yield plain
        finally:
            plain.close()

    def head(self, method: str, path: str, headers: dict[str, str] | None = None, version: str = "1.1") -> bytes:
        """The first lines of a request, up to the empty one."""
        parts = self._parts
        lines = {"Host": parts.netloc, "Content-Type": "application/json"} | self.authorization | (headers or {})
        fields = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"{method} {self.root}{path} HTTP/{version}\r\n{fields}\r\n".encode()

    @property
    def authorization(self) -> dict[str, str]:
        """The header that carries the key, if there is one."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    # -- requests

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        connection: http.client.HTTPConnection | None = None,
    ) -> Response:
        """One request. `body` is sent as it is if it is bytes, else as JSON."""
        if connection is None:
            with self.connection() as own:
                return self.send(method, path, body, headers=headers, connection=own)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        all_headers = {"Content-Type": "application/json"} | self.authorization | (headers or {})
        connection.request(method, self.root + path, data, all_headers)
        got = connection.getresponse()
        return Response(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read())

    def get(self, path: str) -> Response:
        """A GET that must be answered with 200."""
        return self.supported(self.send("GET", path), path)

    def post(self, endpoint: Endpoint, **fields: Any) -> Response:
        """A short greedy request with those fields, whatever comes back."""
        return self.send("POST", endpoint.path, endpoint.body(self.model, fields))

    def answer(self, endpoint: Endpoint, **fields: Any) -> dict[str, Any]:
        """The whole answer, which must come with 200."""
        content = self.supported(self.post(endpoint, **fields), endpoint.path).json
        expect(isinstance(content, dict) and content.get("choices"), f"the answer has no choices: {str(content)[:160]}")
        answer: dict[str, Any] = content
        return answer

    def text(self, endpoint: Endpoint, **fields: Any) -> str:
        """The text of the first choice."""
        return endpoint.text(self.answer(endpoint, **fields)["choices"][0])

    def stream(self, endpoint: Endpoint, **fields: Any) -> Stream:
        """The whole stream, which must come with 200, be well formed and end with [DONE]."""
        response = self.supported(self.post(endpoint, stream=True, **fields), endpoint.path)
        kind = response.headers.get("content-type", "")
        expect(kind.startswith("text/event-stream"), f"a stream must have content type text/event-stream, not {kind!r}")
        contents = read_events(response.body)
        expect(contents and contents[-1] == "[DONE]", "the stream does not end with data: [DONE]")
        events = [strict_json(content.encode()) for content in contents[:-1]]
        expect(events, "the stream has no chunks")
        for event in events:
            expect(
                isinstance(event, dict) and isinstance(event.get("choices", []), list), f"no chunk: {str(event)[:80]}"
            )
            expect("error" not in event, f"the stream has an error: {event}")
        return Stream(response.headers, events, response.body)

    def supported(self, response: Response, path: str) -> Response:
        """The response if its status is 200. Raises `NotSupported` for a refusal that names what the check needs."""
        if response.status == 200:
            return response
        if response.status in REFUSALS:
            texts = _texts_of_refusal(response.body)
            for need in self.needs:
                if any(_names(text, need) for text in texts):
                    raise NotSupported(f"{need}: {response.shown}")
            if response.status == 404 and "model" not in response.body.decode(errors="replace").lower():
                raise NotSupported(f"there is no {path}: {response.shown}")
        raise Unmet(f"expected status 200, got {response.shown}")

    def refusal(self, endpoint: Endpoint, *statuses: int, **fields: Any) -> dict[str, Any]:
        """The error with which it must refuse those fields: 400 or 422 unless other statuses are given."""
        return self.post(endpoint, **fields).error(*(statuses or (400, 422)))

    def must_look_at(self, endpoint: Endpoint, field: str, bad: Any) -> None:
        """A value that a field cannot have must not be answered: who passes over it does so with good ones, too."""
        response = self.post(endpoint, **{field: bad})
        expect(response.status != 200, f"{field} is passed over: {bad!r} for it changes nothing")

    def must_be_well(self, endpoint: Endpoint) -> None:
        """A normal request must be answered now."""
        response = self.post(endpoint, max_tokens=1)
        expect(response.status == 200, f"afterwards a normal request is answered with {response.shown}")

    def long_answer(self, endpoint: Endpoint, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """A prompt's field whose greedy answer ends for its length, with at least 8 characters; and the answer."""
        wanted = {"max_tokens": 16} | fields
        for prompt in PROMPTS:
            answer = self.answer(endpoint, **endpoint.prompt(prompt), **wanted)
            choice = answer["choices"][0]
            if choice["finish_reason"] == "length" and len(endpoint.text(choice)) >= 8:
                return endpoint.prompt(prompt) | {"max_tokens": wanted["max_tokens"]}, answer
        raise Unmet("none of three prompts has an answer of 16 tokens that ends for its length, and has 8 characters")


def _texts_of_refusal(body: bytes) -> list[str]:
    """What it says: message and param of an error, else every text in it, else the body itself."""
    try:
        content = json.loads(body)
    except ValueError:
        return [body.decode(errors="replace")]
    error = content.get("error", content) if isinstance(content, dict) else content
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return [error["message"], str(error.get("param"))]
    return list(_texts_in(error))


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(inner)


def _names(text: str, need: str) -> bool:
    """Whether it is the name, or has it as a word: in quotes, if it is so short that it may be something else."""
    word = re.escape(need.lower())
    pattern = rf"\b{word}\b" if len(need) > 2 else rf"""([`'"]){word}\1"""
    return text.lower() == need.lower() or re.search(pattern, text.lower()) is not None


def strict_json(data: bytes) -> Any:
    """Raises `Unmet` for what is no JSON in UTF-8; Python's reader would take NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise Unmet(f"{constant} is not JSON")

    try:
        return json.loads(data.decode(), parse_constant=refuse)
    except ValueError as error:
        raise Unmet(f"not JSON in UTF-8 ({error}): {data[:160]!r}") from error


def each_status(responses: Iterable[Response], *statuses: int) -> None:
    """Raises `Unmet` for a response with another status."""
    for response in responses:
        expect(response.status in statuses, f"expected status {statuses}, got {response.shown}")
