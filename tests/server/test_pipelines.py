"""Requests that wait on one connection for the answer to the one before, and what stands behind a chunked body."""

import contextlib
import json
import socket

import pytest
from serving import running_server

from noria.server.connections import MAX_HEAD_BYTES
from noria.server.http1 import MAX_PIPELINED

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LONG = {"prompt": "x", "max_tokens": 1000}


def post(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data


def chunked(body: dict[str, object], *headers: bytes) -> bytes:
    """Up to what stands behind the body."""
    data = json.dumps(body).encode()
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: x", b"Transfer-Encoding: chunked", *headers, b""]
    return b"\r\n".join([*lines, b"%x" % len(data), data, b"0", b""])


def received_from(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("num_bytes_later", [0, len(GET)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request_whatever_waits_behind_it(stream, num_bytes_later):
    with running_server({"step_s": 0.1}) as server:
        first = post(LONG | {"stream": stream}) + GET
        with socket.create_connection((server.host, server.port), timeout=5) as connection:
            connection.sendall(first[: len(first) - num_bytes_later])
            server.wait_until(lambda: server.metric("generation_tokens_total") >= 1)
            connection.sendall(first[len(first) - num_bytes_later :])
        server.wait_quiet()
        assert server.metric("request_success_total", finished_reason="abort") == 1


def test_as_many_requests_as_may_wait_are_answered_in_order(server):
    with socket.create_connection((server.host, server.port), timeout=5) as connection:
        last = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n").replace(b"health", b"version")
        connection.sendall(post({"prompt": "x", "max_tokens": 2}) + GET * (MAX_PIPELINED - 1) + last)
        received = received_from(connection)
    assert received.count(b"HTTP/1.1 200 OK") == MAX_PIPELINED + 1
    assert received.index(b"text_completion") < received.index(b'"ready"') < received.index(b'"version"')


def test_a_connection_on_which_more_wait_is_closed():
    """A quarter of a megabyte of them, in one read, had each been made a request of: some 40 MB."""
    with running_server({"step_s": 0.1}) as server:
        with socket.create_connection((server.host, server.port), timeout=5) as connection:
            connection.sendall(post(LONG) + GET * (MAX_PIPELINED + 1))
            assert received_from(connection) == b"", "it would be taken for the answer"
        server.wait_quiet()
    assert any("more than 16 requests wait" in line for line in server.log)


# --- behind a chunked body ---


def test_what_stands_behind_a_body_is_passed_over(server):
    trailers = b"X-Request-Id: behind\r\nContent-Encoding: gzip\r\nAuthorization: Bearer x\r\n\r\n"
    with socket.create_connection((server.host, server.port), timeout=5) as connection:
        connection.sendall(chunked({"prompt": "x", "max_tokens": 2}, b"Connection: close") + trailers)
        received = received_from(connection)
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert b"behind" not in received


@pytest.mark.parametrize("unit", [b"a: b\r\n", b"x"])
def test_what_stands_behind_a_body_has_a_largest_size(server, unit):
    with socket.create_connection((server.host, server.port), timeout=5) as connection:
        connection.sendall(chunked({"prompt": "x", "max_tokens": 2}))
        received = b""
        # Of more than one read, which may be four times as large: what comes with the body is not counted. And what has
        # not been read when the server closes resets the connection.
        with contextlib.suppress(ConnectionError):
            for _ in range(16):
                connection.sendall(unit * (MAX_HEAD_BYTES // len(unit)))
            received = received_from(connection)
    assert received == b"" or b"head_too_large" in received
    assert server.is_healthy()


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip\r\nTransfer-Encoding: chunked"])
def test_a_coded_transfer_is_refused_unread(server, coding):
    request = chunked({"prompt": "x"}).replace(b"chunked", coding, 1)
    with socket.create_connection((server.host, server.port), timeout=5) as connection:
        connection.sendall(request + b"\r\n")
        received = received_from(connection)
    assert received.startswith(b"HTTP/1.1 415 ")
    assert b"Transfer-Encoding 'gzip" in received
