"""Two commands in turn, and a single stream: what they report is what they say."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import noria.assembly
from noria.bench.compare import compare_commands
from noria.bench.floor import StepShape
from noria.bench.latency import run_streams, summarise_latency
from noria.bench.machine import MachineState, MachineWatch
from noria.bench.timeline import Timeline
from noria.bench.watched import LoggedStep, StepLog
from noria.bench.workload import WorkloadRequest
from noria.cli.app import run
from noria.errors import NoriaError, OptionError
from support.fakes import alphabet


def nothing(threads: int) -> MachineState:
    return MachineState()


def test_commands_take_turns_and_ratios_are_those_of_pairs() -> None:
    results = {"a": iter([10, 40, 30]), "b": iter([5, 10, 30])}
    order: list[str] = []

    def run_command(command: str) -> dict[str, Any]:
        order.append(command)
        return {"label": command, "speed": next(results[command]), "only_" + command: 1}

    def measure(threads: int) -> MachineState:
        order.append("machine")
        return MachineState(read_gb_s=1.0)

    result = compare_commands("a", "b", num_pairs=3, run=run_command, measure=measure)
    assert order == ["machine", "a", "b"] * 3
    assert result["ours"] == {"speed": {"median": 30, "min": 10, "max": 40}}
    assert result["peer"] == {"speed": {"median": 10, "min": 5, "max": 30}}
    assert result["ratio"] == {"speed": {"median": 2.0, "min": 1.0, "max": 4.0}}
    assert len(result["machine"]["before_each_pair"]) == 3


def test_a_field_that_is_no_number_is_named() -> None:
    def run_command(command: str) -> dict[str, Any]:
        return {"speed": 1 if command == "a" else None}

    with pytest.raises(OptionError, match='--field speed: "b" did not report'):
        compare_commands("a", "b", num_pairs=1, fields=["speed"], run=run_command, measure=nothing)
    with pytest.raises(OptionError, match="--runs"):
        compare_commands("a", "b", num_pairs=0, run=run_command, measure=nothing)


def test_a_misspelt_field_costs_one_pair() -> None:
    ran: list[str] = []

    def run_command(command: str) -> dict[str, Any]:
        ran.append(command)
        return {"speed": 1}

    with pytest.raises(OptionError, match="--field sped"):
        compare_commands("a", "b", num_pairs=5, fields=["sped"], run=run_command, measure=nothing)
    assert ran == ["a", "b"]


def test_without_fields_those_are_compared_that_are_always_there() -> None:
    results = iter([{"speed": 1, "wall_s": 2}] * 3 + [{"speed": 1, "wall_s": None}])
    result = compare_commands("a", "b", num_pairs=2, run=lambda command: next(results), measure=nothing)
    assert list(result["ratio"]) == list(result["ours"]) == list(result["peer"]) == ["speed"]


def test_nothing_in_common_is_an_error() -> None:
    with pytest.raises(NoriaError, match='"a" and "b" reported no number'):
        compare_commands("a", "b", num_pairs=1, run=lambda command: {command: 1, "label": "x"}, measure=nothing)
    results = iter([{"speed": 1}, {"speed": 1}, {"speed": 1}, {"wall_s": 1}])
    with pytest.raises(NoriaError, match='"a" and "b" reported no number'):
        compare_commands("a", "b", num_pairs=2, run=lambda command: next(results), measure=nothing)


def test_small_figures_keep_their_digits() -> None:
    values = {"a": 1.234567891e-7, "b": 3e3}
    result = compare_commands("a", "b", num_pairs=1, run=lambda command: {"s": values[command]}, measure=nothing)
    assert result["ours"]["s"]["median"] == 1.23457e-7
    assert result["ratio"]["s"]["max"] == 4.11523e-11


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("print('[1]')", "no JSON object"),
        ("print('x')", "no JSON"),
        ("", "no JSON"),
    ],
)
def test_a_command_that_fails_is_named(code: str, message: str) -> None:
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"
    with pytest.raises(NoriaError, match=message):
        compare_commands(command, command, num_pairs=1, measure=nothing)


def test_the_compare_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The line that counts is the last; earlier ones are the command's own business."""
    line = json.dumps({"speed": 2.5, "wall_s": 1})
    command = f"echo starting; echo '{line}'"
    assert run(["bench", "compare", "--runs", "2", "--ours", command, "--peer", command, "--field", "speed"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ratio"] == {"speed": {"median": 1.0, "min": 1.0, "max": 1.0}}
    assert len(result["machine"]["before_each_pair"]) == 2


def test_latencies_of_known_times() -> None:
    one = Timeline(WorkloadRequest("a", 3), num_prompt_tokens=8, num_generated=3, start_s=1.0)
    one.token_times_s = [1.5, 1.6, 1.9]
    machine = MachineWatch(1, measure=nothing)
    result = summarise_latency([one], StepLog(), machine)
    assert (result["ms_per_token"], result["ms_per_token_p99"], result["ms_per_token_mean"]) == (200, 300, 200)
    assert (result["ttft_ms"], result["floor_ms_per_token"], result["floor_ratio"]) == (500, None, None)


class KnownFloors(StepLog):
    """Of a prompt's step and three decoded tokens."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [StepShape((8,), (8,), num_logits=1)]
        shapes += [StepShape.decode(1, context_len) for context_len in (9, 10, 11)]
        self.steps = [LoggedStep(shape, 0.5, {}) for shape in shapes]

    def floors(self, machine: MachineWatch, peak_tflops: float | None = None) -> list[dict[str, float]]:
        return [{"linears": 7.0}, *({"linears": 0.1, "attention": kv_s} for kv_s in (0.01, 0.02, 0.06))]


def test_the_floor_of_a_token_is_the_median_of_steps_that_decode() -> None:
    one = Timeline(WorkloadRequest("a", 4), num_prompt_tokens=8, num_generated=4, start_s=1.0)
    one.token_times_s = [1.5, 1.8, 2.1, 2.4]
    result = summarise_latency([one], KnownFloors(), MachineWatch(1, measure=nothing))
    assert (result["floor_ms_per_token"], result["floor_ratio"]) == (120, 2.5)


def test_streams_run_one_after_the_other() -> None:
    timelines = run_streams(alphabet(), prompt_tokens=5, new_tokens=4, num_runs=3)
    assert [(t.num_prompt_tokens, t.num_generated, t.num_cached_tokens) for t in timelines] == [(5, 4, 0)] * 3
    with pytest.raises(OptionError, match="--new-tokens"):
        run_streams(alphabet(), prompt_tokens=5, new_tokens=1, num_runs=3)
    with pytest.raises(OptionError, match="100 prompt tokens"):
        run_streams(alphabet(), prompt_tokens=100, new_tokens=4, num_runs=1)


def test_the_latency_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noria.assembly, "build_engine", lambda model, options, **wrap: alphabet())
    assert run(["bench", "latency", "--prompt-tokens", "6", "--new-tokens", "5", "--runs", "2"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["runs"], result["prompt_tokens"], result["new_tokens"]) == (2, 6, 5)
    assert 0 < result["ms_per_token"] <= result["ms_per_token_p99"]
    assert "before" in result["machine"]
