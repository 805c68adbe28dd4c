"""HTTP/1.0: no chunks, and the end of the connection is the end of the answer."""

import json
import socket
import time

from serving import parse_events, running_server


def over_http_1_0(server, method: str, path: str, body: bytes = b"") -> tuple[bytes, bytes]:
    """Head and body of the answer, up to where the server closes the connection."""
    head = f"{method} {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((server.host, server.port), timeout=10) as connection:
        connection.sendall(head.encode() + body)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    answer_head, _, answer = received.partition(b"\r\n\r\n")
    return answer_head.lower(), answer


def test_an_http_1_0_client_gets_a_stream_without_chunks(server):
    body = {"prompt": "some words", "max_tokens": 20, "stream": True}
    head, answer = over_http_1_0(server, "POST", "/v1/completions", json.dumps(body).encode())
    assert b" 200 " in head
    assert b"connection: close" in head
    assert b"transfer-encoding" not in head
    text = "".join(event["choices"][0]["text"] for event in parse_events(answer))
    assert text == server.complete(**body | {"stream": False}).json["choices"][0]["text"]


def test_an_http_1_0_client_gets_everything_else_too(server):
    body = {"prompt": "some words", "max_tokens": 3}
    head, answer = over_http_1_0(server, "POST", "/v1/completions", json.dumps(body).encode())
    assert f"content-length: {len(answer)}\r\n".encode() in head + b"\r\n"
    assert json.loads(answer)["usage"]["completion_tokens"] == 3
    head, answer = over_http_1_0(server, "POST", "/v1/completions", b'{"prompt": 1.5, "stream": true}')
    assert b" 400 " in head
    assert json.loads(answer)["error"]["param"] == "prompt"
    head, answer = over_http_1_0(server, "HEAD", "/health")
    assert answer == b""


def test_an_http_1_0_client_may_read_its_stream_slowly():
    """While events wait for it, comments that keep the connection alive are due as well."""
    body = json.dumps({"prompt": "x", "max_tokens": 100, "n": 100, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    engine = {"max_num_seqs": 100, "num_blocks": 2000}
    with (
        running_server(engine, {"sse_keep_alive_interval": 0.2, "max_stream_backlog": 20_000}) as server,
        socket.socket() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect((server.host, server.port))
        connection.sendall(head + body)
        connection.recv(100)
        time.sleep(2)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
        server.wait_quiet()
        said = "".join(server.log)
    assert len(received) > 500_000, "more than lies between the two, so that the stream had to wait"
    assert received.endswith(b"data: [DONE]\n\n")
    assert "Traceback" not in said
