"""What outrageous requests cost others, and memory under load: the figures are there, and are of what they say."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from serving import running_server

from noria.bench.disturb import Disturbance, _beside, make_request, measure_disturbance
from noria.bench.serve import Load
from noria.bench.soak import measure_soak, private_mb
from noria.bench.workload import WorkloadRequest
from noria.cli.app import run
from noria.errors import OptionError

WORKLOAD = [WorkloadRequest("ab", 30)] * 4


def test_a_workload_is_sent_alone_and_disturbed_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = tmp_path / "w.jsonl"
    workload.write_text('{"prompt": "ab", "max_tokens": 30}\n' * 4)
    arguments = ["--workload", str(workload), "--disturbance", "body", "--pairs", "2", "--pause-s", "0.05"]
    with running_server({"step_s": 0.01}) as server:
        assert run(["bench", "disturb", server.url, *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["disturbance"], result["pairs"], result["failed"]) == ("body", 2, 0)
    assert set(result["answers"]) == {"413 body_too_large"}
    for side in ("alone", "disturbed"):
        gap, health = result[side]["itl_p99_ms"], result[side]["health_max_ms"]
        assert 10 <= gap["min"] <= gap["median"] <= gap["max"]
        assert 0 < health["min"] <= health["max"]
    assert result["ratio"]["itl_p99_ms"]["min"] > 0
    assert min(result["pooled_itl_p99_ms"]) >= 10


@pytest.mark.parametrize(
    ("disturbance", "answer"),
    [
        (Disturbance.NONE, None),
        (Disturbance.PROMPT, "400 context_length_exceeded"),
        (Disturbance.TRUNCATED, "400 context_length_exceeded"),
        (Disturbance.TEMPLATE, "400 unsupported_parameter"),
    ],
)
def test_what_came_of_disturbing_requests_is_told(disturbance: Disturbance, answer: str | None) -> None:
    with running_server({"step_s": 0.01}) as server:
        result = measure_disturbance(Load(url=server.url), WORKLOAD, disturbance, num_pairs=1, pause_s=0.01)
    assert set(result["answers"]) == ({answer} if answer else set())
    assert result["failed"] == 0


def test_a_server_that_is_not_healthy_is_no_quick_one() -> None:
    """Its engine gives no sign of life for longer than it may."""
    with running_server({"step_s": 0.3}, {"health_stall_s": 0.1}) as server:
        result = measure_disturbance(Load(url=server.url), WORKLOAD[:1], Disturbance.NONE, num_pairs=1, pause_s=0)
    assert result["alone"]["health_max_ms"]["max"] == float("inf")


def test_requests_are_what_they_are_called() -> None:
    path, body = make_request(Disturbance.BODY)
    assert (path, len(body)) == ("/v1/completions", 64 * 2**20)
    assert len(json.loads(make_request(Disturbance.PROMPT)[1])["prompt"]) == 10**6
    assert make_request(Disturbance.TEMPLATE)[0] == "/v1/chat/completions"
    with pytest.raises(OptionError, match="--pairs"):
        measure_disturbance(Load(url=""), WORKLOAD, Disturbance.BODY, num_pairs=0, pause_s=0)


def test_a_soak_tells_memory_after_each_round() -> None:
    result = measure_soak(num_streams=30, num_tokens=5, num_rounds=2, num_short=200)
    assert (result["failed_streams"], result["failed_short"], result["errors"]) == (0, 0, [])
    assert (len(result["rounds_mb"]), len(result["short_mb"])) == (2, 10)
    assert all(20 < size < 1000 for size in (result["start_mb"], *result["rounds_mb"], *result["short_mb"]))


def test_a_soak_says_how_many_requests_it_has_sent_and_sends_some() -> None:
    result = measure_soak(num_streams=1, num_tokens=1, num_rounds=1, num_short=19)
    assert (result["short"], result["failed_short"]) == (10, 0)
    for number in (9, 1, -10):
        with pytest.raises(OptionError, match="--short"):
            measure_soak(num_streams=1, num_tokens=1, num_rounds=1, num_short=number)


@contextmanager
def speaking_no_http() -> Iterator[str]:
    """The address of a server that answers everything with the same wrong line."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):  # the listener is closed
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(b"no such protocol\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_what_is_no_answer_in_http_is_told_like_any_other() -> None:
    with speaking_no_http() as url, _beside(url, Disturbance.TEMPLATE, 0.01) as (latencies_s, answered):
        time.sleep(0.5)
    assert len(latencies_s) > 3
    assert set(latencies_s) == {float("inf")}
    assert set(answered) <= {"BadStatusLine", "ConnectionResetError", "BrokenPipeError"}
    assert "BadStatusLine" in answered


def test_private_memory_is_that_of_the_process() -> None:
    before = private_mb(os.getpid())
    held = bytearray(os.urandom(50_000_000))
    assert 45 < private_mb(os.getpid()) - before < 60
    del held


FLAT = 0.1
"""Memory may differ by so much of itself between two looks: what is free within it is not always given back."""


@pytest.mark.full
def test_memory_is_flat_over_three_rounds_of_2000_streams_and_100_000_requests() -> None:
    result = measure_soak(num_streams=2000, num_tokens=100, num_rounds=3, num_short=100_000)
    print(result)
    assert (result["failed_streams"], result["failed_short"]) == (0, 0)
    for sizes in (result["rounds_mb"], [result["short_warm_mb"], *result["short_mb"]]):
        assert max(sizes) <= min(sizes) * (1 + FLAT)
