"""What is too large, too slow, too deep or too much is refused by the gate, at once, and nobody else notices."""

import asyncio
import contextlib
import json
import socket
import time

import pytest
from serving import Call, running_server

from noria.config import SchedulerConfig, ServerOptions
from noria.errors import RequestError
from noria.sampling import SamplingParams
from noria.server.bodies import CompletionBody
from noria.server.calls import Calls
from noria.server.completions import CompletionsApi
from noria.server.endpoint import GenerationEndpoint
from noria.server.errors import ApiError
from noria.server.gate import MAX_PROMPT_TOKENS, check_call, check_depth, check_json, estimate_cost
from noria.server.keys import Keys
from noria.server.request_body import BODIES_AT_ONCE, DISCARD_BYTES_PER_S, BodyReader
from noria.server.state import ServerState

CONFIG = SchedulerConfig(max_model_len=1000, num_blocks=100, block_size=16)


def connect(server, data: bytes) -> socket.socket:
    connection = socket.create_connection((server.host, server.port), timeout=10)
    connection.sendall(data)
    return connection


def post(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes."""
    received = b""
    while data := connection.recv(65536):
        received += data
    return received


# --- bodies ---


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_declared_64_mb_are_refused_before_a_byte_of_them(server, path):
    with connect(server, post(path, f"Content-Length: {64 * 2**20}")) as connection:
        answer = b""
        while b"}}" not in answer:  # the connection stays open for what is still to come
            answer += connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in answer
    assert b"connection: close" in answer.lower()


def test_64_mb_can_be_sent_whole_and_the_refusal_is_read_then(server):
    response = server.request("POST", "/v1/completions", b"x" * (64 * 2**20))
    assert (response.status, response.error["code"]) == (413, "body_too_large")
    assert server.complete(prompt="x", max_tokens=1).status == 200


def test_a_body_without_a_length_is_refused_where_it_becomes_too_large():
    with running_server(server={"max_body_bytes": 1000}) as server:
        with connect(server, post("/v1/completions", "Transfer-Encoding: chunked")) as connection:
            connection.sendall(b"200\r\n" + b" " * 512 + b"\r\n" + b"200\r\n" + b" " * 512 + b"\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
        assert server.complete(prompt="x", max_tokens=1).status == 200
        assert server.complete(prompt="x" * 1000).status == 413


def test_slow_clients_are_cut_and_do_not_count():
    """A head bit by bit, no head at all, a second head that never comes, and a body that does not end."""
    with running_server({"step_s": 0.01}, {"request_read_timeout_s": 1.0}) as server:
        stream = Call(server, prompt="x", max_tokens=300, stream=True)
        body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
        whole = post("/v1/completions", f"Content-Length: {len(body)}") + body
        with (
            connect(server, b"") as silent,
            connect(server, b"POST /v1/comp") as slow_head,
            connect(server, post("/v1/completions", "Content-Length: 100") + b'{"prompt": ') as slow_body,
            connect(server, whole) as second,
        ):
            assert second.recv(65536).startswith(b"HTTP/1.1 200 ")
            second.sendall(b"GET /hea")
            assert read_all(silent) == read_all(slow_head) == b""
            answer = read_all(slow_body)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"request_timeout" in answer
            assert b"HTTP/1.1" not in read_all(second)
        assert stream.result().events[-1]["choices"][0]["finish_reason"] == "length"


def test_a_client_may_take_its_time_within_the_limit(server):
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    with connect(server, post("/v1/completions", f"Content-Length: {len(body)}")[:20]) as connection:
        time.sleep(0.3)
        connection.sendall(post("/v1/completions", f"Content-Length: {len(body)}")[20:] + body[:7])
        time.sleep(0.3)
        connection.sendall(body[7:])
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def body_of(*chunks: bytes):
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]

    async def receive():
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    return receive


@pytest.mark.anyio
async def test_bodies_together_are_bounded_and_given_back():
    reader = BodyReader(max_bytes=10, timeout_s=5)
    done = {"type": "http.request", "body": b"x" * 10, "more_body": False}

    async def receive():
        return done

    held = [await reader.read({"headers": []}, receive) for _ in range(BODIES_AT_ONCE)]
    assert {body.content for body in held} == {b"x" * 10}
    with pytest.raises(ApiError) as refusal:
        await reader.read({"headers": []}, body_of(b"y"))
    assert (refusal.value.status, refusal.value.content.error.code) == (503, "too_many_bodies")
    assert refusal.value.headers["Retry-After"]
    with held[0]:
        held[0].release()
        held[0].release()
    assert held[0].content == b""
    with pytest.raises(ConnectionResetError):
        await reader.read({"headers": []}, body_of(b"yyy", b"y"))
    with pytest.raises(ApiError):
        await reader.read({"headers": []}, body_of(b"y" * 6, b"y" * 6))
    for length in (b"11", b"9" * 5000):
        with pytest.raises(ApiError):
            await reader.read({"headers": [(b"content-length", length)]}, body_of())
    assert reader.num_bytes_held == (BODIES_AT_ONCE - 1) * 10


@pytest.mark.anyio
async def test_a_body_is_given_back_whatever_becomes_of_its_answer(monkeypatch):
    """Here one that never gets as far as to look at it; and the whole call is cancelled, as when a server stops."""
    state = ServerState(ServerOptions(), Keys(ServerOptions()))
    endpoint = GenerationEndpoint(state, CompletionBody, CompletionsApi)
    monkeypatch.setattr("noria.server.endpoint._Answer.run", lambda self: asyncio.sleep(60))
    scope = {"type": "http", "headers": []}

    async def receive():
        if state.body_reader.num_bytes_held:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def app(scope, receive, send):
        await endpoint(scope, receive, send)

    call = asyncio.create_task(Calls(app, access_log=False)(scope, receive, None))
    await asyncio.sleep(0.05)
    assert state.body_reader.num_bytes_held == 2
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert state.body_reader.num_bytes_held == 0
    state.text_work.close()


@pytest.mark.anyio
async def test_what_is_thrown_away_is_read_without_haste_all_of_it_together():
    reader = BodyReader(max_bytes=10, timeout_s=5)
    began_s = time.monotonic()
    part = b"x" * (DISCARD_BYTES_PER_S // 100)
    await asyncio.gather(*(reader.discard(body_of(*[part] * 10)) for _ in range(3)))
    assert 0.29 < time.monotonic() - began_s < 3


@pytest.fixture(scope="module")
def guarded():
    with running_server(server={"api_key": ["key"], "enable_admin_api": True, "access_log": True}) as server:
        yield server
        assert not any("Traceback" in line for line in server.log)


KEY = "Authorization: Bearer key"


@pytest.mark.parametrize(
    ("request_line", "key", "status"),
    [
        ("POST /v1/completions", "", 401),
        ("POST /v1/completions", KEY, 413),
        ("POST /tokenize", KEY, 413),
        ("POST /abort_requests", KEY, 413),
        ("POST /nothing", KEY, 404),
        ("POST /version", KEY, 405),
        ("GET /version", KEY, 200),
        ("POST /ping", "", 200),
    ],
)
def test_whoever_answers_a_body_unread_it_is_thrown_away_without_haste(guarded, request_line, key, status):
    head = [f"{request_line} HTTP/1.1", "Host: x", f"Content-Length: {2**40}", *([key] if key else []), "", ""]
    part, num_sent = bytes(2**20), 0
    with connect(guarded, "\r\n".join(head).encode()) as connection:
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += connection.recv(65536)
        connection.settimeout(0.2)
        until_s = time.monotonic() + 1
        while time.monotonic() < until_s:
            with contextlib.suppress(TimeoutError):
                num_sent += connection.send(part)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert answer.lower().count(b"connection: close") == 1
    assert 2**20 < num_sent < 3 * DISCARD_BYTES_PER_S


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/nothing"])
def test_who_asks_whether_to_send_is_answered_instead(guarded, path):
    with connect(guarded, post(path, KEY, f"Content-Length: {50 * 2**20}", "Expect: 100-continue")) as connection:
        connection.settimeout(2)
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 4")
    assert b"100 Continue" not in answer


def test_a_body_that_has_been_read_keeps_its_connection(guarded):
    body = b'{"prompt": "x"}'
    with connect(guarded, (post("/tokenize", KEY, f"Content-Length: {len(body)}") + body) * 2) as connection:
        received = b""
        while received.count(b"HTTP/1.1 200 OK") < 2:
            received += connection.recv(65536)
    assert b"connection: close" not in received.lower()


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/abort_requests", "/v1/completions"])
def test_a_client_that_leaves_within_its_body_is_not_answered_and_no_failure(guarded, path):
    connect(guarded, post(path, KEY, "Content-Length: 100") + b'{"prompt": ').close()
    guarded.wait_until(lambda: any(f"POST {path} - " in line for line in guarded.log))


# --- JSON ---


def test_bodies_of_too_many_values_are_not_decoded(server):
    raw = b'{"prompt": "x", "max_tokens": 1, "metadata": {"a": [' + b"[]," * 5_000_000 + b"1]}}"
    start = time.monotonic()
    response = server.request("POST", "/v1/completions", raw)
    assert (response.status, response.error["code"]) == (400, "body_too_complex")
    assert time.monotonic() - start < 5
    check_json(b"," * 2**18, CONFIG)
    with pytest.raises(ApiError):
        check_json(b"," * (2**18 + 1), CONFIG)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_nesting_has_a_limit(server, opening):
    def nested(depth):
        closing = "]" if opening == "[" else "}"
        inner = opening * depth + "1" + closing * depth
        return ('{"prompt": "x", "max_tokens": 1, "metadata": {"a": ' + inner + "}}").encode()

    assert server.request("POST", "/v1/completions", nested(62)).status == 200
    response = server.request("POST", "/v1/completions", nested(63))
    assert (response.status, response.error["code"]) == (400, "body_too_complex")
    assert "64 levels" in response.error["message"]


def test_brackets_in_texts_are_no_nesting():
    check_depth({"prompt": "[" * 1000, "stop": ["{"] * 100}, b"[" * 1101)


# --- cost ---


def test_the_cost_of_a_call_counts_everything_it_is_multiplied_by():
    assert estimate_cost([10], SamplingParams(max_tokens=5), 1000) == 15
    assert estimate_cost([10, 20], SamplingParams(max_tokens=5), 1000) == 40
    assert estimate_cost([10, 20], SamplingParams(max_tokens=5, n=3, logprobs=4), 1000) == 40 * 3 * 5
    scored = SamplingParams(max_tokens=0, n=3, prompt_logprobs=4)
    assert estimate_cost([10, 20], scored, 1000) == 30 * 3 + 30 * 4 * 3, "shown with each"
    assert estimate_cost([10, 20], SamplingParams(), 1000) == 2000, "what fits into the context, if it does not say"


def test_what_costs_too_much_is_refused_with_the_numbers():
    with running_server(server={"max_request_cost": 1000}) as server:
        assert server.complete(prompt="x" * 10, max_tokens=15, n=10, logprobs=3).status == 200
        response = server.complete(prompt="x" * 10, max_tokens=16, n=10, logprobs=3)
        assert (response.status, response.error["code"], response.error["param"]) == (400, "request_too_large", "n")
        assert all(text in response.error["message"] for text in ("1040", "1000", "--max-request-cost"))
        assert server.complete(prompt=["x", "y"], stream=True).error["param"] == "max_tokens"
        assert server.complete(prompt="x" * 3000, max_tokens=1).status == 200, "one plain sequence may have the context"


def test_a_call_of_many_prompt_tokens_is_refused_before_they_are_copied():
    config = SchedulerConfig(max_model_len=10_000, num_blocks=10_000, block_size=16)
    check_call([2**13], SamplingParams(n=128, max_tokens=1), config, 2**30)
    with pytest.raises(RequestError, match=str(MAX_PROMPT_TOKENS)):
        check_call([2**13 + 1], SamplingParams(n=128, max_tokens=1), config, 2**30)


def test_a_call_that_no_queue_can_take_is_told_so_and_not_to_come_back():
    scheduling = {"max_num_queued_tokens": 100, "max_num_queued_reqs": 3}
    with running_server({"max_num_seqs": 2, "scheduling": scheduling}) as server:
        assert server.complete(prompt=["x" * 50, "y" * 50], max_tokens=1).status == 200
        assert server.complete(prompt="x" * 200, max_tokens=1, n=5).status == 200
        for body in ({"prompt": ["x" * 50, "y" * 51]}, {"prompt": list("abcdef")}, {"prompt": "x", "n": 6}):
            response = server.complete(**body, max_tokens=1)
            assert (response.status, response.error["code"]) == (400, "request_too_large")
            assert "max_num_queued" in response.error["message"]


# --- text ---


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_of_a_million_characters_is_refused_unread(server, stream):
    text = "once upon a time " * 60_000
    for response in (
        server.complete(prompt=text, stream=stream),
        server.complete(prompt=["x", text], stream=stream),
        server.chat(messages=[{"role": "user", "content": text}], stream=stream),
    ):
        assert (response.status, response.error["code"]) == (400, "context_length_exceeded")
        assert "at least" in response.error["message"]
        assert all(number in response.error["message"] for number in ("1020", "512"))


@pytest.mark.parametrize("stream", [False, True])
def test_to_be_cut_a_text_must_be_tokenised_so_it_has_a_bound_too(server, stream):
    text = "once upon a time " * 60_000
    for response in (
        server.complete(prompt=text, stream=stream, truncate_prompt_tokens=10),
        server.chat(messages=[{"role": "user", "content": text}], stream=stream, truncate_prompt_tokens=10),
    ):
        assert (response.status, response.error["code"]) == (400, "context_length_exceeded")
        assert "truncate_prompt_tokens" in response.error["message"]
    assert server.complete(prompt="x" * 1000, stream=stream, truncate_prompt_tokens=10, max_tokens=1).status == 200


def test_clients_that_leave_while_their_text_is_long_hold_nothing():
    """Bodies are given back, and threads are free again: 100 of 2 MB come, of which nobody waits for the answer."""
    with running_server(server={"max_body_bytes": 4 * 2**20}) as server:
        body = json.dumps({"prompt": ["word " * 700] * 500, "max_tokens": 1}).encode()
        head = post("/v1/completions", f"Content-Length: {len(body)}")
        for _ in range(100):
            connect(server, head + body).close()
            connect(server, head + body[: len(body) // 2]).close()
        server.wait_until(lambda: server.complete(prompt="x" * 3000, max_tokens=1).status == 200)
        response = server.complete(prompt="x" * 20_000, max_tokens=1)
        assert response.status == 400, "there is a thread for it"
        server.wait_quiet()


# --- keep-alive ---


def raw_stream(server, **body) -> str:
    return server.complete(prompt="x", stream=True, **body).body.decode()


def test_streams_without_news_get_comments_between_their_events():
    with running_server({"step_s": 0.7}, {"sse_keep_alive_interval": 0.2}) as server:
        blocks = raw_stream(server, max_tokens=3).split("\n\n")
        assert blocks.pop() == ""
        assert blocks.count(": keep-alive") >= 3
        assert all(block == ": keep-alive" or block.startswith("data: ") for block in blocks)
        assert blocks[-1] == "data: [DONE]"


@pytest.mark.parametrize("interval_s", [0, 30])
def test_no_comments_where_there_is_news_or_none_are_wanted(interval_s):
    with running_server({"step_s": 0.3}, {"sse_keep_alive_interval": interval_s}) as server:
        assert ":" not in raw_stream(server, max_tokens=3).replace("data:", "").replace('":', "")


def test_a_queued_stream_is_kept_alive_and_the_sdk_does_not_mind():
    openai = pytest.importorskip("openai", reason="the SDK is a development dependency")
    with running_server({"step_s": 0.05, "max_num_seqs": 1}, {"sse_keep_alive_interval": 0.1}) as server:
        first = Call(server, prompt="x", max_tokens=20)
        server.wait_until(lambda: server.metric("num_requests_running") == 1)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        chunks = list(client.completions.create(model="scripted", prompt="y", max_tokens=3, stream=True))
        assert len("".join(chunk.choices[0].text for chunk in chunks)) == 3
        assert first.result().status == 200


# --- all at once ---


@pytest.mark.anyio
async def test_health_answers_and_streams_go_on_under_abuse():
    """64 MB bodies, million-character prompts and endless templates, again and again, beside 20 streams."""
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}"
    options = {"trust_request_chat_template": True, "chat_template_timeout_s": 0.5}
    with running_server({"step_s": 0.01}, options) as server:
        probes: list[float] = []
        is_over = False

        async def probe() -> None:
            while not is_over:
                start = time.monotonic()
                assert (await asyncio.to_thread(server.get, "/health")).status == 200
                probes.append(time.monotonic() - start)
                await asyncio.sleep(0.02)

        async def abuse() -> list[int]:
            calls = [
                lambda: server.request("POST", "/v1/completions", b"x" * (64 * 2**20)),
                lambda: server.complete(prompt="a b " * 250_000),
                lambda: server.chat(chat_template=loops),
            ]
            return [r.status for r in await asyncio.gather(*(asyncio.to_thread(call) for call in calls * 2))]

        probing = asyncio.create_task(probe())
        streams = [Call(server, prompt=f"s{i}", max_tokens=200, stream=True) for i in range(20)]
        statuses = await abuse()
        for stream in streams:
            response = await asyncio.to_thread(stream.result, 60.0)
            assert response.events[-1]["choices"][0]["finish_reason"] == "length"
        is_over = True
        await probing
        assert sorted(statuses) == [400, 400, 400, 400, 413, 413]
        print(f"/health: {len(probes)} probes, the slowest {max(probes) * 1e3:.0f} ms")
