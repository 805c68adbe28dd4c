"""What a server makes of requests at the wire: offers of other protocols, half a connection, what is no HTTP."""

import json
import socket
from typing import Any

import pytest
from serving import Server, running_server

from noria.server.connections import MAX_HEAD_BYTES

H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")
BODY = {"prompt": "some words", "max_tokens": 5}


def post(path: str, body: bytes, *headers: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: x", *headers]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body


def ask(server: Server, *parts: bytes) -> tuple[int, bytes, bytes]:
    """Status, head and body of the one answer to what is sent, part after part, and up to where the server closes."""
    with socket.create_connection((server.host, server.port), timeout=5) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            connection.sendall(part)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), head.lower(), body


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# --- offers of another protocol ---


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_an_offer_of_http_2_is_passed_over_and_the_body_read(server, path, is_split, is_chunked):
    body = json.dumps(BODY).encode()
    request = post(path, body, *H2C, "Connection: close")
    if is_chunked:
        length = f"Content-Length: {len(body)}".encode()
        request = request.replace(length, b"Transfer-Encoding: chunked").replace(body, b"%x\r\n" % len(body) + body)
        request += b"\r\n0\r\n\r\n"
    parts = [bytes([byte]) for byte in request] if is_split else [request]
    status, head, answer = ask(server, *parts)
    assert status == 200
    assert b"upgrade" not in head
    expected = server.request("POST", path, BODY).json
    for name in ("usage", "tokens"):
        assert json.loads(answer).get(name) == expected.get(name)


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "h2c, websocket", "TLS/1.0"])
def test_a_connection_goes_on_after_offers(server, protocol):
    """Three requests on one connection, of which two offer, and a third that wants it closed."""
    body = json.dumps(BODY).encode()
    offers = post("/v1/completions", body, "Connection: upgrade", f"Upgrade: {protocol}")
    get = f"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: {protocol}\r\nConnection: Upgrade\r\n\r\n".encode()
    with socket.create_connection((server.host, server.port), timeout=5) as connection:
        connection.sendall(offers + get + post("/tokenize", body, "Connection: close"))
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.count(b"HTTP/1.1 200 OK") == received.count(b"HTTP/1.1") == 3
    assert received.index(b"text_completion") < received.index(b'"ok"') < received.index(b'"tokens"')
    assert not any("Unsupported upgrade" in line for line in server.log)


def test_a_body_that_is_waited_for_is_asked_for_beside_an_offer(server):
    body = json.dumps(BODY).encode()
    request = post("/v1/completions", body, *H2C, "Connection: close", "Expect: 100-continue")
    with socket.create_connection((server.host, server.port), timeout=5) as connection:
        connection.sendall(request.removesuffix(body))
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


# --- what is no HTTP ---


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost x\r\n\r\n",
        "GET /é HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        post("/tokenize", b"{}", "Content-Length: 3"),
        post("/tokenize", b"{}", *H2C, "Transfer-Encoding: chunked"),
    ],
)
def test_what_is_no_http_is_refused_in_the_shape_of_all_errors(server, data):
    status, head, body = ask(server, data)
    assert status == 400
    assert b"content-type: application/json" in head
    assert b"connection: close" in head
    assert f"content-length: {len(body)}".encode() in head
    error = error_of(body)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")
    assert len(error["message"]) > len("this is not HTTP/1.1: ")


def test_what_is_no_http_does_not_get_into_an_answer_under_way():
    """The connection ends instead, and the request with it."""
    with running_server({"step_s": 0.05}) as server:
        body = json.dumps({"prompt": "x", "max_tokens": 1000, "stream": True}).encode()
        with socket.create_connection((server.host, server.port), timeout=5) as connection:
            connection.sendall(post("/v1/completions", body))
            received = b""
            while b"data: " not in received:
                received += connection.recv(65536)
            connection.sendall(b"no HTTP\r\n\r\n")
            received += b"".join(iter(lambda: connection.recv(65536), b""))
        server.wait_quiet()
    assert received.count(b"HTTP/1.1") == 1
    assert b"[DONE]" not in received


@pytest.mark.parametrize("start", [b"GET /", b"GET /health HTTP/1.1\r\nHost: x\r\nA: ", b"GET /health HTTP/1.1\r\n"])
def test_a_head_has_a_largest_size(server, start):
    """However many headers it has; on a connection's second request too."""
    first = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    rest = b"a: b\r\n" if start.endswith(b"1.1\r\n") else b"x"
    too_much = (start + rest * MAX_HEAD_BYTES)[: MAX_HEAD_BYTES + 1]
    for before in (b"", first):
        with socket.create_connection((server.host, server.port), timeout=5) as connection:
            connection.sendall(before)
            received = b""
            while before and b'"ready"}' not in received:
                received += connection.recv(65536)
            for at in range(0, len(too_much), 10_000):
                connection.sendall(too_much[at : at + 10_000])
            received = b"".join(iter(lambda: connection.recv(65536), b""))
        head, _, body = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert error_of(body)["code"] == "head_too_large"


def test_a_head_has_a_largest_size_beside_an_answer_too():
    with running_server({"step_s": 0.05}) as server:
        body = json.dumps({"prompt": "x", "max_tokens": 1000}).encode()
        with socket.create_connection((server.host, server.port), timeout=5) as connection:
            connection.sendall(post("/v1/completions", body))
            server.wait_until(lambda: server.metric("num_requests_running") == 1)
            connection.sendall(b"GET /")
            for _ in range(MAX_HEAD_BYTES // 1024):
                connection.sendall(b"x" * 1024)
            received = b"".join(iter(lambda: connection.recv(65536), b""))
        assert received == b"", "it would be taken for the answer"
        server.wait_quiet()


def test_a_head_may_be_large_and_bodies_do_not_count(server):
    """Also a body that comes bit by bit, and heads together."""
    body = json.dumps({"prompt": "x", "max_tokens": 1, "user": "u" * 2 * MAX_HEAD_BYTES}).encode()
    request = post("/v1/completions", body, "A: " + "a" * (MAX_HEAD_BYTES // 2))
    with socket.create_connection((server.host, server.port), timeout=5) as connection:
        for _ in range(4):
            for start in range(0, len(request), 20_000):
                connection.sendall(request[start : start + 20_000])
            received = b""
            while b"text_completion" not in received or not received.endswith(b"}"):
                received += connection.recv(65536)
            assert received.startswith(b"HTTP/1.1 200 ")


# --- half a connection ---


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_half_is_taken_for_gone(stream):
    """Until something is sent to it nobody can tell the two apart, and most that close have left."""
    with running_server({"step_s": 0.1}) as server:
        body = json.dumps({"prompt": "x", "max_tokens": 1000, "stream": stream}).encode()
        with socket.create_connection((server.host, server.port), timeout=5) as connection:
            connection.sendall(post("/v1/completions", body))
            server.wait_until(lambda: server.metric("generation_tokens_total") >= 1)
            connection.shutdown(socket.SHUT_WR)
            received = b"".join(iter(lambda: connection.recv(65536), b""))
        assert b"[DONE]" not in received
        server.wait_quiet()
        assert server.metric("request_success_total", finished_reason="abort") == 1


# --- encodings ---


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("coding", ["gzip", "GZIP", "deflate, gzip", "br", "x" * 5000])
def test_an_encoded_body_is_refused_unread(server, path, coding):
    response = server.request("POST", path, b"\x1f\x8b\x08", headers={"Content-Encoding": coding})
    assert response.status == 415
    assert response.headers["accept-encoding"] == "identity"
    assert response.error["code"] == "unsupported_content_encoding"
    assert coding[:100] in response.error["message"]
    assert "Content-Encoding" in response.error["message"]
    assert len(response.body) < 2000


@pytest.mark.parametrize("coding", ["identity", "Identity", ""])
def test_no_encoding_may_be_said_in_so_many_words(server, coding):
    assert server.request("POST", "/v1/completions", BODY, headers={"Content-Encoding": coding}).status == 200


# --- bodies that are no use ---


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("depth", [1_000, 130_000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b"[", b"")])
def test_what_is_nested_too_deeply_is_told_so(server, path, depth, opening, closing):
    body = b'{"prompt": ' + opening * depth + b"1" + closing * depth + b"}"
    response = server.request("POST", path, body)
    assert (response.status, response.error["code"]) == (400, "body_too_complex")
    assert "nested" in response.error["message"]


@pytest.mark.parametrize("raw", [b"", b" \r\n\t"])
@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")])
def test_an_empty_body_is_told_what_was_expected(server, path, field, raw):
    response = server.request("POST", path, raw)
    assert (response.status, response.error["code"]) == (400, "invalid_json")
    assert response.error["message"] == f"the body is empty: a JSON object with at least {field} was expected"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "model": "m" * 10_000_000}),
        ("/v1/chat/completions", {"messages": [{"role": "r" * 100_000, "content": "x"}]}),
        ("/v1/chat/completions", {"messages": [], "model": "\0" * 100_000}),
        ("/tokenize", {"prompt": "x", "model": "m" * 100_000}),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"b" * 100_000: 1}}),
        ("/" + "p" * 20_000, {}),
        ("/v1/models/" + "m" * 20_000, None),
        ("/pause?mode=" + "m" * 20_000, {}),
    ],
)
def test_little_is_told_again_of_what_a_client_sent(server, path, body):
    response = server.request("GET" if body is None else "POST", path, body)
    assert 400 <= response.status < 500
    assert len(response.error["message"]) < 1100
    assert len(response.body) < 7000


def test_what_is_left_of_a_long_message_are_its_ends(server):
    message = server.complete(prompt="x", model="m" * 5000).error["message"]
    assert message.startswith("the model 'mmm")
    assert message.endswith("mmm' is not served here; there is scripted")
