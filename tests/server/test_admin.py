"""Pause, resume, reset, abort, explain: over HTTP, with requests under way."""

from __future__ import annotations

import http.client
import json
import threading
import time
from contextlib import contextmanager

import pytest
from serving import Call, running_server


@pytest.fixture
def admin():
    with running_server({"step_s": 0.01, "max_num_seqs": 2}, {"enable_admin_api": True}) as server:
        yield server
        assert server.process.poll() is None


def post(server, path, **body):
    return server.request("POST", path, body or None)


def test_without_the_flag_there_is_nothing(server):
    for path in ("/pause", "/resume", "/reset_prefix_cache", "/abort_requests"):
        assert post(server, path).status == 404
    assert server.get("/explain/x").status == 404


def test_a_pause_that_keeps_everything_still(admin):
    call = Call(admin, prompt="x", max_tokens=100, stream=True)
    admin.wait_until(lambda: admin.metric("num_requests_running") == 1)
    assert post(admin, "/pause?mode=keep").json == {"status": "paused"}
    ready = admin.get("/ready")
    assert (ready.status, ready.json["code"]) == (503, "paused")
    assert admin.get("/server_info").json["paused"] == "keep"
    before = admin.metric("generation_tokens_total")
    queued = Call(admin, prompt="y", max_tokens=1)
    time.sleep(0.3)
    assert admin.metric("generation_tokens_total") == before < 100
    assert queued.is_alive()
    assert admin.get("/health").status == 200
    assert post(admin, "/resume").json == {"status": "resumed"}
    assert sum(len(event["choices"][0]["text"]) for event in call.result().events) == 100
    assert queued.result().status == 200
    assert admin.get("/ready").status == 200


def test_a_pause_that_aborts_tells_the_clients(admin):
    calls = [Call(admin, prompt="x", max_tokens=500, stream=i > 0) for i in range(3)]
    admin.wait_until(lambda: admin.metric("num_requests_running") == 2 and admin.metric("num_requests_waiting") == 1)
    post(admin, "/pause")
    assert calls[0].result().json["choices"][0]["finish_reason"] == "abort"
    assert [call.result().events[-1]["choices"][0]["finish_reason"] for call in calls[1:]] == ["abort"] * 2
    # A call ends a moment after its last byte.
    admin.wait_until(lambda: admin.metric("calls_ended_total", outcome="aborted") == 3)
    post(admin, "/resume")
    assert admin.complete(prompt="x", max_tokens=1).status == 200


def test_a_mode_that_does_not_exist_pauses_nothing(admin):
    answer = post(admin, "/pause?mode=coffee")
    assert (answer.status, answer.error["param"]) == (400, "mode")
    assert answer.error["message"] == "mode: expected one of abort, wait, keep"
    assert admin.get("/ready").status == 200


def test_a_pause_that_comes_while_a_resume_is_under_way_is_the_last_word():
    """Both are answered after the same long step."""
    with running_server({"step_s": 0.5}, {"enable_admin_api": True}) as server:
        Call(server, prompt="x", max_tokens=100)
        server.wait_until(lambda: server.metric("num_requests_running") == 1)
        assert post(server, "/pause?mode=wait").status == 200
        resuming = threading.Thread(target=post, args=(server, "/resume"))
        resuming.start()
        time.sleep(0.1)
        assert post(server, "/pause?mode=wait").status == 200
        resuming.join()
        assert server.get("/ready").json["code"] == "paused"
        assert server.get("/server_info").json["paused"] == "wait"
        assert post(server, "/resume").status == 200
        assert server.get("/ready").status == 200


def test_resetting_the_cache(admin):
    def num_cached():
        usage = admin.complete(prompt="a prompt of two blocks, perhaps three", max_tokens=1).json["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [num_cached(), num_cached()] == [0, 32]
    assert post(admin, "/reset_prefix_cache").json == {"status": "reset"}
    assert [num_cached(), num_cached()] == [0, 32]


@contextmanager
def stream_of(server, **body):
    """The response whose body is a stream, read no further than its header."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
    data = json.dumps(body | {"stream": True})
    connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
    yield connection.getresponse()
    connection.close()


def test_one_request_is_aborted_and_explained_by_its_answers_id(admin):
    with stream_of(admin, prompt="xyz", n=2, max_tokens=2000) as stream:
        identity = json.loads(stream.readline().removeprefix(b"data: "))["id"]
        other = Call(admin, prompt="y", max_tokens=60)

        explained = admin.get(f"/explain/{identity}").json
        assert [sequence["state"] for sequence in explained["sequences"]] == ["running", "running"]
        assert all(sequence["num_computed"] >= 3 for sequence in explained["sequences"])
        assert "running" in explained["texts"][0]

        aborted = post(admin, "/abort_requests", request_ids=[identity, "cmpl-unknown"])
        assert aborted.json == {"num_aborted": 2}
        rest = stream.read().decode()
        assert rest.count('"finish_reason":"abort"') == 2
        assert rest.endswith("data: [DONE]\n\n")
    assert other.result().json["choices"][0]["finish_reason"] == "length"
    admin.wait_quiet()
    gone = admin.get(f"/explain/{identity}")
    assert (gone.status, gone.error["code"]) == (404, "request_not_found")
    assert post(admin, "/abort_requests", request_ids=[identity]).json == {"num_aborted": 0}


def test_everything_is_aborted_only_when_it_is_said(admin):
    calls = [Call(admin, prompt="x", max_tokens=500) for _ in range(4)]
    admin.wait_until(lambda: admin.metric("num_requests_waiting") == 2)
    for body in ({}, {"abort_all": False}, {"abort_all": True, "request_ids": []}):
        assert post(admin, "/abort_requests", **body).status == 400
    assert post(admin, "/abort_requests", abort_all=True).json == {"num_aborted": 4}
    assert [call.result().json["choices"][0]["finish_reason"] for call in calls] == ["abort"] * 4
    admin.wait_quiet()


def test_who_waits_is_told_for_what_and_can_be_aborted_before_it_begins(admin):
    for _ in range(2):
        Call(admin, prompt="x", max_tokens=1000)
    admin.wait_until(lambda: admin.metric("num_requests_running") == 2)
    with stream_of(admin, prompt="waits", max_tokens=1) as stream:
        call_id = stream.headers["X-Noria-Call-Id"]  # the answer's own id comes with its first token
        admin.wait_until(lambda: admin.metric("num_requests_waiting") == 1)
        [explained] = admin.get(f"/explain/{call_id}").json["sequences"]
        assert (explained["state"], explained["position"], explained["limit"]) == ("waiting", 0, "max_num_seqs")
        assert post(admin, "/abort_requests", request_ids=[call_id]).json == {"num_aborted": 1}
        assert b'"finish_reason":"abort"' in stream.read()
    admin.wait_until(lambda: admin.metric("num_requests_waiting") == 0)


def test_before_the_engine_is_up_it_is_told_to_come_back():
    with running_server({"load_s": 2.0}, {"enable_admin_api": True}, wait=False) as server:
        assert post(server, "/pause").error["code"] == "loading"
        assert server.get("/explain/x").error["code"] == "loading"
