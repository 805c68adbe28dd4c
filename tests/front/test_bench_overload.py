"""The overload benchmark: against a real server over a scripted engine, against servers that misbehave, and its
arithmetic on made-up calls."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from serving import running_server

from noria.bench.overload import Overload, run_overload
from noria.bench.overload_report import Call, summarise_overload
from noria.cli.app import run
from noria.errors import OptionError

KEYS = [
    *("clients", "pool_tokens", "duration_s", "wall_s", "sent", "finished", "short", "aborted", "refused", "failed"),
    *("broken", "hung", "errors", "gen_tokens", "window_s", "window_tokens", "window_waiting", "worst_window_share"),
    *("max_silence_s", "ordinary", "giant", "urgent", "left_running", "left_waiting", "left_kv_usage"),
]


def small_load(url: str = "http://127.0.0.1:1", **changes: Any) -> Overload:
    settings: dict[str, Any] = {
        "url": url,
        "model": None,
        "pool_tokens": 1024,
        "working_set": 2.0,
        "duration_s": 2.0,
        "drain_s": 20.0,
        "window_s": 0.5,
        "prompt_tokens": (16, 128),
        "output_tokens": (16, 64),
        "token_ids": (97, 122),
        "giant_every_s": 0.6,
        "giant_tokens": 400,
        "burst_every_s": 0.5,
        "abort_share": 0.2,
        "priority": False,
        "seed": 1,
    }
    return Overload(**settings | changes)


def assert_all_counted(result: dict[str, Any]) -> None:
    ends = sum(result[name] for name in ("finished", "aborted", "failed", "broken", "hung"))
    assert result["sent"] == ends + sum(result["refused"].values())
    assert result["sent"] == sum(result[kind]["sent"] for kind in ("ordinary", "giant", "urgent"))


def test_a_server_that_lives_through_it() -> None:
    """Its engine looks at all its invariants after every step, and would end the server."""
    with running_server({"checked": True, "num_blocks": 64, "max_model_len": 512}) as server:
        result = run_overload(small_load(server.url))
        assert list(result) == KEYS
        assert_all_counted(result)
        assert server.metric("request_success_total", finished_reason="length") >= result["finished"]
        assert server.metric("num_preemptions_total") > 0
    assert result["errors"] == []
    assert (result["refused"], result["failed"], result["broken"], result["hung"], result["short"]) == ({}, 0, 0, 0, 0)
    assert result["clients"] == 18
    assert result["finished"] > 0
    assert result["aborted"] > 0
    assert (result["giant"]["sent"], result["urgent"]["sent"]) == (3, 24)
    assert result["giant"]["ttft_p50"] > 0
    assert len(result["window_tokens"]) == len(result["window_waiting"]) == 4
    assert 0 < sum(result["window_tokens"]) <= result["gen_tokens"]
    assert 0 < result["max_silence_s"] < 20
    assert (result["left_running"], result["left_waiting"], result["left_kv_usage"]) == (0, 0, 0)


def test_refusals_are_counted_by_status_and_do_not_become_a_flood() -> None:
    with running_server({"num_blocks": 64, "max_model_len": 32}) as server:
        result = run_overload(small_load(server.url, prompt_tokens=(64, 64), giant_every_s=0, burst_every_s=0))
    assert_all_counted(result)
    assert result["refused"] == {"400": result["sent"]}
    assert result["clients"] <= result["sent"] <= 5 * result["clients"]
    assert result["worst_window_share"] is None
    assert "400" in result["errors"][0]


class ManyAtOnce(ThreadingHTTPServer):
    request_queue_size = 256  # with the usual 5, some of a burst of connections wait a second


CHUNK = b'data: {"choices": [{"index": 0, "text": "x", "finish_reason": null}]}\n\n'
LAST_CHUNK = b'data: {"choices": [{"index": 0, "text": "y", "finish_reason": "length"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}\n\n'
DONE = b"data: [DONE]\n\n"


@contextmanager
def made_up_server(answer: Callable[[int], list[bytes | None]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Answers the n-th completion request with `answer(n)`, in which None means: never. Yields the URL and the bodies
    that came."""
    bodies: list[dict[str, Any]] = []
    numbers = itertools.count(1)
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_models = self.path == "/v1/models"
            self.send_response(200 if is_models else 404)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "m"}]}' if is_models else b"")

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            parts = answer(next(numbers))
            self.send_response(200)
            self.end_headers()
            for part in parts:
                if part is None:
                    is_over.wait(30)
                    return
                self.wfile.write(part)
                self.wfile.flush()
                is_over.wait(0.02)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ManyAtOnce(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", bodies
        finally:
            is_over.set()
            server.shutdown()
            thread.join()


def test_streams_that_are_never_answered_have_hung() -> None:
    def answer(number: int) -> list[bytes | None]:
        return {2: [None], 5: [CHUNK, None]}.get(number, [CHUNK, LAST_CHUNK, USAGE, DONE])

    with made_up_server(answer) as (url, _):
        result = run_overload(small_load(url, duration_s=0.6, drain_s=1.0, abort_share=0))
    assert_all_counted(result)
    assert result["hung"] == 2
    assert result["finished"] == result["sent"] - 2
    assert 1.3 < result["max_silence_s"] < 3
    assert 1.6 <= result["wall_s"] < 3
    assert (result["left_running"], result["left_waiting"], result["left_kv_usage"]) == (None, None, None)


def test_streams_that_just_end_and_streams_with_an_error() -> None:
    def answer(number: int) -> list[bytes | None]:
        return {
            1: [CHUNK, CHUNK],
            2: [CHUNK, DONE],
            3: [LAST_CHUNK],
            4: [CHUNK, b'data: {"error": {"message": "it broke"}}\n\n', DONE],
            5: [b"data: {\n\n"],
        }.get(number, [CHUNK, LAST_CHUNK, USAGE, DONE])

    with made_up_server(answer) as (url, _):
        result = run_overload(small_load(url, duration_s=0.3, abort_share=0))
    assert_all_counted(result)
    assert (result["broken"], result["failed"], result["hung"]) == (4, 1, 0)
    assert any("it broke" in error for error in result["errors"])


def test_what_is_sent_depends_on_the_seed_and_says_a_priority_only_when_asked_to() -> None:
    def sent(**changes: Any) -> list[dict[str, Any]]:
        with made_up_server(lambda number: [LAST_CHUNK, DONE]) as (url, bodies):
            load = small_load(url, pool_tokens=112, working_set=1, duration_s=0.2, burst_every_s=0.1, **changes)
            assert load.num_clients == 1
            assert run_overload(load)["urgent"]["sent"] == 8
        return bodies

    first, again, other = sent(), sent(priority=True), sent(seed=2)
    assert first[0]["prompt"] == again[0]["prompt"] != other[0]["prompt"]
    assert not any("priority" in body for body in first)
    assert sorted(body["priority"] for body in again)[:9] == [-10] * 8 + [0]


def test_a_server_that_is_gone_costs_failures_only() -> None:
    result = run_overload(small_load(model="m", duration_s=0.3, giant_every_s=0))
    assert result["sent"] == result["failed"] > 0
    assert_all_counted(result)


def test_the_figures_of_known_calls() -> None:
    calls = [
        # 8 tokens in 4 chunks; then a wait over the first window
        Call("ordinary", 8, None, 0.0, [1.0, 2.0, 3.0, 11.0], 11.0, 8, "finished"),
        Call("ordinary", 9, None, 0.5, [10.5], 10.6, None, "broken", 200, "the stream ended"),
        Call("giant", 4, None, 10.52, [19.0, 19.5], 19.5, 2, "finished"),
        Call("urgent", 4, None, 15.0, [], 50.0, None, "hung"),
        Call("urgent", 4, None, 15.0, [], 15.5, None, "refused", 503, "503 busy"),
    ]
    result = summarise_overload(calls, duration_s=35.0, window_s=10.0)
    assert (result["sent"], result["finished"], result["broken"], result["hung"]) == (5, 2, 1, 1)
    assert (result["short"], result["refused"], result["gen_tokens"]) == (1, {"503": 1}, 11)
    assert result["errors"] == ["the stream ended", "503 busy"]
    assert result["window_tokens"] == [6, 5, 0]
    assert result["window_waiting"] == [True, True, True]
    assert result["worst_window_share"] == 0.0
    assert (result["max_silence_s"], result["wall_s"]) == (35.0, 50.0)
    assert result["ordinary"] == {"sent": 2, "ttft_p50": 1.0, "ttft_p99": 10.0, "gap_p50_ms": 1e3, "gap_p99_ms": 8e3}
    assert result["urgent"]["ttft_p50"] is None


def test_windows_in_which_nobody_waited_are_not_compared() -> None:
    calls = [
        Call("ordinary", 2, None, 0.0, [10.0, 12.0], 20.0, 2, "finished"),
        Call("ordinary", 2, None, 20.0, [30.1, 30.2, 30.3, 30.4], 31.0, 4, "finished"),
        Call("ordinary", 2, None, 30.12, [40.0], 40.0, 1, "finished"),
    ]
    result = summarise_overload(calls, duration_s=40.0, window_s=10.0)
    assert result["window_tokens"] == [0, 2, 0, 4]
    assert result["window_waiting"] == [True, False, True, True]


@pytest.mark.parametrize(
    "changes",
    [
        {"pool_tokens": 0},
        {"duration_s": 0},
        {"drain_s": -1},
        {"prompt_tokens": (9, 3)},
        {"output_tokens": (0, 3)},
        {"abort_share": 1.5},
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(changes))):
        small_load(**changes)


def test_the_command_prints_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    with made_up_server(lambda number: [CHUNK, LAST_CHUNK, USAGE, DONE]) as (url, _):
        settings = ["--pool-tokens", "1000", "--duration-s", "0.2", "--prompt-tokens", "1", "9", "--label", "here"]
        assert run(["bench", "overload", url.removeprefix("http://"), *settings]) == 0
    out, err = capsys.readouterr()
    assert list(json.loads(out)) == ["label", *KEYS, "machine"]
    assert "wait for their first token" in err
