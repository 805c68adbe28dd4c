"""Limits, Unicode, many at once, clients that leave, and connections that are used in every way HTTP allows."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from noria.conformance.client import Response, Server, each_status
from noria.conformance.contract import Source, Theme, expect
from noria.conformance.endpoints import CHAT, COMPLETIONS, PROMPTS, Endpoint

THEME = Theme("robustness")
BOTH = (COMPLETIONS, CHAT)
BEYOND_ANY_CONTEXT = 10**7


# -- limits


def _too_long(server: Server) -> str:
    """A text of more tokens than the context has: by what the model's card says, else by a good guess."""
    card = next(card for card in server.get("/v1/models").json["data"] if card["id"] == server.model)
    limit = card.get("max_model_len") or (card.get("meta") or {}).get("n_ctx_train")
    return "word " * (limit + 100 if isinstance(limit, int) else 200_000)


@THEME.check_each("a prompt longer than the context is refused with 400", Source.OPENAI, *BOTH)
def prompt_too_long(server: Server, endpoint: Endpoint) -> None:
    for stream in (False, True):
        server.refusal(endpoint, 400, 413, **endpoint.prompt(_too_long(server)), stream=stream)
    server.must_be_well(endpoint)


@THEME.check_each("its error has the code context_length_exceeded", Source.OPENAI, *BOTH)
def prompt_too_long_code(server: Server, endpoint: Endpoint) -> None:
    error = server.refusal(endpoint, 400, **endpoint.prompt(_too_long(server)))
    expect(error.get("code") == "context_length_exceeded", f"code is {error.get('code')!r}")


@THEME.check_each("max_tokens beyond the context is refused", Source.OPENAI, *BOTH)
def max_tokens_too_many(server: Server, endpoint: Endpoint) -> None:
    """Streamed, so that a server which takes it can be left at once."""
    status, _ = _begin(server, endpoint, max_tokens=BEYOND_ANY_CONTEXT, stream=True)
    expect(status in (400, 422), f"max_tokens {BEYOND_ANY_CONTEXT} is answered with {status}")


@THEME.check_each("a body of 20 MB is answered or refused, and does no harm", Source.OURS, *BOTH)
def large_body(server: Server, endpoint: Endpoint) -> None:
    body = json.dumps(endpoint.body(server.model, {"max_tokens": 1, "x_unknown": "x" * 20_000_000})).encode()
    try:
        response = server.send("POST", endpoint.path, body)
        expect(response.status in (200, 400, 413, 422), f"answered with {response.shown}")
    except (BrokenPipeError, ConnectionResetError):
        pass  # refused unread, which is its right
    server.must_be_well(endpoint)


@THEME.check_each("ten thousand unknown fields do no harm", Source.OURS, *BOTH)
def many_fields(server: Server, endpoint: Endpoint) -> None:
    response = server.post(endpoint, max_tokens=1, **{f"x_unknown_{i}": i for i in range(10_000)})
    expect(response.status in (200, 400, 413, 422), f"answered with {response.shown}")
    server.must_be_well(endpoint)


# -- Unicode


@THEME.check_each("text of every kind is taken", Source.JSON, *BOTH)
def unicode_prompt(server: Server, endpoint: Endpoint) -> None:
    for text in (
        "naïve café",
        "漢字とかな",
        "שלום עולם",
        "नमस्ते",
        "👩‍👩‍👧‍👦 🏳️‍🌈",
        "e\u0301\u0323",
        "\u2028\u2029\u202e",
        "\ufeffx\u0000y",
    ):
        server.answer(endpoint, **endpoint.prompt(text), max_tokens=3)


@THEME.check_each("raw UTF-8 and escapes in the body are the same prompt", Source.JSON, *BOTH)
def unicode_escapes(server: Server, endpoint: Endpoint) -> None:
    body = endpoint.body(server.model, endpoint.prompt("漢字 and 😀 and é"))
    answers = []
    for ascii_only in (True, False):
        data = json.dumps(body, ensure_ascii=ascii_only).encode()
        answers.append(server.supported(server.send("POST", endpoint.path, data), endpoint.path).json)
    counts = [answer["usage"]["prompt_tokens"] for answer in answers]
    expect(counts[0] == counts[1], f"{counts[0]} prompt tokens escaped, {counts[1]} raw")
    texts = [endpoint.text(answer["choices"][0]) for answer in answers]
    expect(texts[0] == texts[1], f"{texts[0]!r} escaped, {texts[1]!r} raw")


@THEME.check_each("stop strings may be any text", Source.OPENAI, *BOTH)
def unicode_stop(server: Server, endpoint: Endpoint) -> None:
    plain = server.text(endpoint)
    other = server.text(endpoint, stop=["漢字", "😀", "\u0000\u2028"])
    expect(plain == other, f"{other!r} with stop strings that do not occur, {plain!r} without")


# -- many at once


def _together(count: int, call: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count)))


@THEME.check_each("sixteen requests at once are all answered", Source.OPENAI, *BOTH)
def many_at_once(server: Server, endpoint: Endpoint) -> None:
    answers = _together(16, lambda i: server.answer(endpoint, **endpoint.prompt(f"Number {i}: {PROMPTS[i % 3]}")))
    ids = {answer["id"] for answer in answers}
    expect(len(ids) == 16, f"{len(ids)} ids for 16 answers")


@THEME.check_each("eight streams at once do not mix", Source.OPENAI, *BOTH)
def streams_at_once(server: Server, endpoint: Endpoint) -> None:
    def stream(number: int) -> tuple[int, str]:
        got = server.stream(endpoint, max_tokens=4 + number, stream_options={"include_usage": True})
        ids = {event["id"] for event in got.events}
        expect(len(ids) == 1, f"{len(ids)} ids in one stream")
        got.finish_reason()
        return int(got.usage["completion_tokens"]), ids.pop()

    streams = _together(8, stream)
    expect(len({name for _, name in streams}) == 8, "two streams have one id")
    for number, (count, _) in enumerate(streams):
        expect(count <= 4 + number, f"{count} tokens in a stream with max_tokens {4 + number}")


@THEME.check_each("a text does not depend on who else is served", Source.OURS, *BOTH)
def at_once_as_alone(server: Server, endpoint: Endpoint) -> None:
    alone = [server.text(endpoint, **endpoint.prompt(prompt)) for prompt in PROMPTS]
    texts = _together(9, lambda i: server.text(endpoint, **endpoint.prompt(PROMPTS[i % 3])))
    for number, text in enumerate(texts):
        expect(text == alone[number % 3], f"{text!r} among others, {alone[number % 3]!r} alone")


# -- clients that leave


def _begin(server: Server, endpoint: Endpoint, **fields: Any) -> tuple[int, bytes]:
    """Sends a request, reads the status and the first bytes of the answer, and hangs up."""
    with server.connection() as connection:
        body = json.dumps(endpoint.body(server.model, fields))
        headers = {"Content-Type": "application/json"} | server.authorization
        connection.request("POST", server.root + endpoint.path, body, headers)
        response = connection.getresponse()
        return response.status, response.read1(20)


@THEME.check_each("a client that leaves a stream does no harm", Source.OURS, *BOTH)
def leaves_a_stream(server: Server, endpoint: Endpoint) -> None:
    for _ in range(4):
        status, first = _begin(server, endpoint, stream=True, max_tokens=200)
        expect(status == 200 and first, f"a stream is answered with {status}")
    server.must_be_well(endpoint)


@THEME.check_each("a client that leaves before the answer does no harm", Source.OURS, *BOTH)
def leaves_before_the_answer(server: Server, endpoint: Endpoint) -> None:
    body = json.dumps(endpoint.body(server.model, {"max_tokens": 200})).encode()
    for _ in range(4):
        with server.socket() as connection:
            connection.sendall(server.head("POST", endpoint.path, {"Content-Length": str(len(body))}) + body)
            time.sleep(0.02)
    server.must_be_well(endpoint)


@THEME.check("a client that sends half a body and leaves does no harm", Source.HTTP)
def leaves_half_a_body(server: Server) -> None:
    for sent in (b"", b'{"model"'):
        with server.socket() as connection:
            connection.sendall(server.head("POST", COMPLETIONS.path, {"Content-Length": "5000"}) + sent)
            time.sleep(0.02)
    server.must_be_well(COMPLETIONS)


# -- connections


def _complete(server: Server, connection: http.client.HTTPConnection, **fields: Any) -> Response:
    body = COMPLETIONS.body(server.model, fields)
    return server.send("POST", COMPLETIONS.path, body, connection=connection)


def _must_still_be_open(connection: http.client.HTTPConnection) -> None:
    """http.client would open another connection without a word."""
    expect(connection.sock is not None, "the server closed the connection after its answer")


@THEME.check("one connection serves several requests", Source.HTTP)
def keep_alive(server: Server) -> None:
    with server.connection() as connection:
        for _ in range(3):
            expect(_complete(server, connection, max_tokens=1).status == 200, "not answered with 200")
            _must_still_be_open(connection)


@THEME.check("a connection goes on after a refusal", Source.HTTP)
def keep_alive_after_error(server: Server) -> None:
    with server.connection() as connection:
        _complete(server, connection, temperature="hot").error(400, 422)
        _must_still_be_open(connection)
        expect(_complete(server, connection, max_tokens=1).status == 200, "not answered with 200")


@THEME.check("a connection goes on after a stream", Source.HTTP)
def keep_alive_after_stream(server: Server) -> None:
    with server.connection() as connection:
        expect(_complete(server, connection, stream=True).status == 200, "not answered with 200")
        _must_still_be_open(connection)
        expect(_complete(server, connection, max_tokens=1).status == 200, "not answered with 200")


@THEME.check("Connection: close closes it after the answer", Source.HTTP)
def connection_close(server: Server) -> None:
    with server.socket() as connection:
        connection.sendall(server.head("GET", "/v1/models", {"Connection": "close"}))
        connection.settimeout(min(10, server.timeout_s))
        received = b"".join(iter(lambda: connection.recv(65536), b""))  # a time-out if it stays open
    expect(received.startswith(b"HTTP/1.1 200"), f"answered with {received[:60]!r}")


@THEME.check("requests sent at once on one connection are answered in order", Source.HTTP)
def pipelining(server: Server) -> None:
    heads = [
        server.head("GET", "/v1/no-such-path"),
        server.head("GET", "/v1/models"),
        server.head("GET", "/v1/no-such-path", {"Connection": "close"}),
    ]
    with server.socket() as connection:
        connection.sendall(b"".join(heads))
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    statuses = [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]]
    expect(statuses == [b"404", b"200", b"404"], f"three requests are answered with {statuses}")


@THEME.check("a body may come in chunks", Source.HTTP)
def chunked_body(server: Server) -> None:
    body = json.dumps(COMPLETIONS.body(server.model, {"max_tokens": 1})).encode()
    headers = {"Content-Type": "application/json"} | server.authorization
    with server.connection() as connection:
        connection.request(
            "POST", server.root + COMPLETIONS.path, iter((body[:9], body[9:])), headers, encode_chunked=True
        )
        status = connection.getresponse().status
    expect(status == 200, f"answered with {status}")


@THEME.check("a body may come slowly", Source.HTTP)
def slow_body(server: Server) -> None:
    body = json.dumps(COMPLETIONS.body(server.model, {"max_tokens": 1})).encode()
    with server.socket() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = server.head("POST", COMPLETIONS.path, {"Content-Length": str(len(body)), "Connection": "close"})
        for part in (head[:20], head[20:], body[:10], body[10:]):
            connection.sendall(part)
            time.sleep(0.15)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    expect(b" 200" in received.split(b"\r\n")[0], f"answered with {received[:80]!r}")


# -- last, since a server may have much to do after it


@THEME.check("a list of two thousand prompts is answered or refused, and does no harm", Source.OURS)
def many_prompts(server: Server) -> None:
    response = server.post(COMPLETIONS, prompt=["x"] * 2000, max_tokens=1)
    each_status([response], 200, 400, 413, 422, 503)
    server.must_be_well(COMPLETIONS)
