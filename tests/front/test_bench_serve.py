"""What a server says about itself beside a load: the time its engine computed, and its processes' processor time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from serving import running_server

from noria.bench.server_times import ServerTimes, parse_server_times, read_server_times, summarise_server_times
from noria.cli.app import run


def test_the_engines_time_is_told_beside_the_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = tmp_path / "w.jsonl"
    workload.write_text('{"prompt": "ab", "max_tokens": 20}\n' * 4)
    with running_server({"step_s": 0.01}) as server:
        assert run(["bench", "serve", server.url, "--workload", str(workload)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], result["gen_tokens"]) == (4, 80)
    assert 0.2 <= result["engine_steps_s"] <= result["wall_s"] + 0.01
    assert result["engine_waited_s"] == pytest.approx(max(0, result["wall_s"] - result["engine_steps_s"]), abs=0.01)
    if sys.platform == "linux":
        assert result["front_cpu_s"] >= 0
        assert result["engine_cpu_s"] >= 0


def test_other_servers_say_nothing() -> None:
    assert parse_server_times("# TYPE up gauge\nup 1\n") is None
    assert read_server_times("http://127.0.0.1:1") is None
    assert set(summarise_server_times(None, None, 1.0).values()) == {None}


def test_differences_of_two_readings() -> None:
    before, after = ServerTimes(1.0, 0.5, None), ServerTimes(3.5, 1.0, 2.0)
    assert summarise_server_times(before, after, 4.0) == {
        "engine_steps_s": 2.5,
        "engine_waited_s": 1.5,
        "front_cpu_s": 0.5,
        "engine_cpu_s": None,
    }
