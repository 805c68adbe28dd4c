"""Start, drain, death: what clients and supervisors see."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from serving import Call, parse_events, running_server


def test_a_server_that_loads_says_so_and_asks_to_come_back():
    with running_server({"load_s": 2.0}, wait=False) as server:
        health = server.get("/health")
        assert (health.status, health.json["phase"]) == (503, "loading")
        refused = server.complete(prompt="x")
        assert refused.status == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.error["code"] == "loading"
        assert server.complete(prompt="x", stream=True).status == 503
        assert server.get("/metrics").status == 200
        assert server.get("/v1/models").status == 200
        server.wait_until(server.is_healthy)
        assert server.complete(prompt="x", max_tokens=1).status == 200


def test_a_taken_port_is_said_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "noria.cli", "serve", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert done.returncode != 0
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_drains():
    """Those that run finish, and those that wait too; new ones are refused, and then it ends with 0."""
    with running_server({"step_s": 0.02, "max_num_seqs": 4}) as server:
        streams = [Call(server, prompt="x", max_tokens=100, stream=True) for _ in range(3)]
        whole = Call(server, prompt="y", max_tokens=60)
        server.wait_until(lambda: server.metric("num_requests_running") == 4)
        queued = [Call(server, prompt="z", max_tokens=20, stream=True), Call(server, prompt="z", max_tokens=20)]
        server.wait_until(lambda: server.metric("num_requests_waiting") == 2)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: server.get("/health").json["phase"] == "draining")
        assert server.get("/health").status == 503
        assert (server.get("/ready").status, server.get("/ready").json["code"]) == (503, "draining")
        refused = server.complete(prompt="z")
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert "retry-after" in refused.headers
        for stream in streams:
            assert sum(len(e["choices"][0]["text"]) for e in stream.result().events) == 100
        assert whole.result().json["usage"]["completion_tokens"] == 60
        assert sum(len(e["choices"][0]["text"]) for e in queued[0].result().events) == 20
        assert queued[1].result().json["usage"]["completion_tokens"] == 20
        assert server.process.wait(10) == 0


def test_sigterm_without_work_ends_at_once():
    with running_server() as server:
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert time.monotonic() - start < 3


def test_the_drain_has_a_limit_and_what_it_cuts_is_told():
    with running_server({"step_s": 0.02}, {"drain_s": 0.5}) as server:
        streamed = Call(server, prompt="x", max_tokens=4000, stream=True)
        whole = Call(server, prompt="y", max_tokens=4000)
        server.wait_until(lambda: server.metric("num_requests_running") == 2)
        server.process.send_signal(signal.SIGTERM)
        assert "shut down" in streamed.result().events[-1]["error"]["message"]
        assert whole.result().status == 500
        assert server.process.wait(10) == 0


def test_sigterm_while_loading_ends_at_once_and_is_no_failure():
    with running_server({"load_s": 20.0}, wait=False) as server:
        server.wait_until(lambda: any("engine process" in line for line in server.log))
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert time.monotonic() - start < 3
    assert not any("noria:" in line for line in server.log)


def test_a_second_signal_ends_now():
    with running_server({"step_s": 0.02}) as server:
        Call(server, prompt="x", max_tokens=4000, stream=True)
        server.wait_until(lambda: server.metric("num_requests_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: server.get("/health").json["phase"] == "draining")
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 130
        assert time.monotonic() - start < 2
        assert not any("the engine process ended" in line for line in server.log), "a wanted stop is no crash"


@pytest.mark.parametrize("access_log", [True, False])
def test_the_access_log_is_there_when_it_is_asked_for(access_log):
    with running_server(server={"access_log": access_log}) as server:
        assert server.get("/version").status == 200
        time.sleep(0.2)
        assert any("noria.access: GET /version 200" in line for line in server.log) == access_log


def test_a_killed_engine_is_told_to_everybody_and_the_server_ends():
    """Three streams running and two calls queued: all five hear of it within a second."""
    with running_server({"step_s": 0.05, "max_num_seqs": 3}) as server:
        streams = [Call(server, prompt="x", max_tokens=2000, stream=True) for _ in range(3)]
        server.wait_until(lambda: server.metric("num_requests_running") == 3)
        queued = [Call(server, prompt="y", max_tokens=2000) for _ in range(2)]
        server.wait_until(lambda: server.metric("num_requests_waiting") == 2)
        killed_s = time.monotonic()
        os.kill(server.engine_pid, signal.SIGKILL)
        for call in streams:
            events = parse_events(call.result().body)
            assert events[-1]["error"]["code"] == "engine_error"
            assert all("choices" in event for event in events[:-1])
        for call in queued:
            assert call.result().status == 500
            assert call.result().error["code"] == "engine_error"
        assert all(call.ended_s - killed_s < 1.0 for call in streams + queued)
        assert server.process.wait(10) == 1


def test_a_stopped_engine_turns_health_red_and_green_again():
    with running_server({"step_s": 0.02}, {"health_stall_s": 1.5}) as server:
        stream = Call(server, prompt="x", max_tokens=300, stream=True)
        server.wait_until(lambda: server.metric("num_requests_running") == 1)
        pid = server.engine_pid
        os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        assert server.is_healthy()
        server.wait_until(lambda: not server.is_healthy(), 5.0)
        assert time.monotonic() - stopped_s < 1.5 + 1.0
        assert "has not advanced" in server.get("/health").json["reason"]
        os.kill(pid, signal.SIGCONT)
        server.wait_until(server.is_healthy, 3.0)
        assert sum(len(e["choices"][0]["text"]) for e in stream.result().events) == 300


def test_an_idle_server_stays_healthy_beyond_its_limit():
    with running_server(server={"health_stall_s": 2.0}) as server:
        for _ in range(7):
            assert server.is_healthy()
            time.sleep(0.5)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_engine_is_left_behind(number):
    with running_server() as server:
        pid = server.engine_pid
        server.process.send_signal(number)
        server.process.wait(10)
        server.wait_until(lambda: not is_running(pid), 5.0)


def is_running(pid: int) -> bool:
    """A zombie, which somebody else has yet to reap, does not run."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except FileNotFoundError:
        return False


def test_a_short_request_overtakes_a_long_one():
    with running_server({"step_s": 0.01}) as server:
        long = Call(server, prompt="x", max_tokens=400)
        server.wait_until(lambda: server.metric("num_requests_running") == 1)
        short = Call(server, prompt="y", max_tokens=5)
        assert short.result().json["usage"]["completion_tokens"] == 5
        assert long.is_alive()
        assert long.result().json["usage"]["completion_tokens"] == 400
