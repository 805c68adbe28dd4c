"""The machine's state beside a result, floors, and what is measured on the native executor."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from models.support import pack, tiny_model
from noria.bench import machine as bench_machine
from noria.bench.floor import StepCosts, StepShape, Work
from noria.bench.kernels import time_kernels
from noria.bench.machine import (
    MachineState,
    MachineWatch,
    cpu_name,
    last_cache_bytes,
    measure_machine,
    read_buffer_bytes,
)
from noria.bench.watched import StepLog
from noria.cli.app import run
from noria.errors import OptionError
from noria.files.sources import open_model
from noria.ops.base import AttentionSpec
from noria.ops.lowering import Buffer, Lowered, Operation
from noria.ops.native import NativeExecutor, why_unavailable

needs_native = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


def watch(*bandwidths: float | None, peak: float | None = 1.0) -> MachineWatch:
    """One whose measurements are made up."""
    states = iter([MachineState(read_gb_s=b, bfloat16_tflops=peak, float32_tflops=peak) for b in bandwidths])
    return MachineWatch(2, measure=lambda threads: next(states))


def small_program(gate: str = "silu_mul", window: int | None = None) -> Lowered:
    """A gate-and-up product, one into the residual stream, attention, and a head."""
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, window=window)
    rows, wide = Buffer("rows", 0, 10), Buffer("slabs", 0, 20)
    return Lowered(
        [
            Operation(kind="norm", input=rows, output=Buffer("slabs", 1, 10)),
            Operation(kind="product", input=Buffer("slabs", 1, 10), output=wide, epilogue=gate),
            Operation(kind="product", input=wide, output=rows, epilogue="add"),
            Operation(kind="attention", input=Buffer("slabs", 2, 64), output=Buffer("rows", 1, 64), attention=spec),
            Operation(kind="product", input=Buffer("slabs", 1, 10), output=Buffer("rows", 2, 50), on_logit_rows=True),
        ]
    )


TWO_ROWS = StepShape((1, 2), (2, 3), num_logits=2)
"""3 tokens, 7 pairs, KV of 5 tokens."""


@pytest.mark.parametrize("gate", ["silu_mul", "gelu_mul"])
def test_work_is_counted_from_the_program(gate: str) -> None:
    costs = StepCosts(small_program(gate), itemsize=2)
    work = costs.work(TWO_ROWS)
    assert work["linears"] == Work(2 * (10 * 40 + 20 * 10) * 3, (10 * 40 + 20 * 10) * 2)
    assert work["logits"] == Work(2 * 500 * 2, 500 * 2)
    assert work["attention"] == Work(4 * 64 * 7, 2 * 32 * 2 * 5)
    assert costs.weight_bytes == (600 + 500) * 2
    assert costs.work(StepShape((1, 2), (2, 3), num_logits=0))["logits"] == Work(0, 0)


def test_a_floor_is_the_greater_of_computing_and_reading_by_kind() -> None:
    costs = StepCosts(small_program(), itemsize=2)
    shapes = [TWO_ROWS, StepShape.decode(1, 4)]
    assert costs.floor_s(shapes, peak_flops=1.0, bytes_per_s=1e9)["linears"] == 3600 + 1200
    assert costs.floor_s(shapes, peak_flops=1e9, bytes_per_s=1.0) == {
        "linears": 2 * 1200,
        "logits": 2 * 1000,
        "attention": 128 * (5 + 4),
    }


def test_a_step_is_measured_by_its_rows_and_contexts() -> None:
    rows = [(range(20), 17, [5, 6]), (range(17), 16, [5, 7]), (range(4), 0, [8])]
    shape = StepShape.of(pack([(list(known), done, blocks) for known, done, blocks in rows], 16, wanted="last"), 16)
    assert (shape.num_tokens, shape.num_logits) == (3 + 1 + 4, 3)
    num_kv_tokens = 20 + 17 + 4 - 16  # block 5 is shared
    assert shape.attended(None) == ((18 + 19 + 20) + 17 + (1 + 2 + 3 + 4), num_kv_tokens)


@pytest.mark.parametrize("window", [1, 2, 3, 18, 19, 20, 100])
def test_a_layer_with_a_window_computes_and_reads_no_more_than_that(window: int) -> None:
    shape = StepShape((3, 1, 4), (20, 17, 4), num_logits=3)
    seen = [
        [set(range(max(position - window + 1, 0), position + 1)) for position in range(end - num_queries, end)]
        for num_queries, end in zip(shape.query_lens, shape.context_lens, strict=True)
    ]
    num_pairs = sum(len(keys) for row in seen for keys in row)
    assert shape.attended(window) == (num_pairs, sum(len(set[int]().union(*row)) for row in seen))
    work = StepCosts(small_program(window=window), itemsize=2).work(shape)["attention"]
    assert work.flops == 4 * 64 * num_pairs


def test_a_watch_measures_before_and_after_and_takes_the_greater() -> None:
    machine = watch(10.0, 20.0)
    assert machine.read_gb_s == 10.0
    report = machine.report()
    assert (machine.read_gb_s, machine.peak_tflops("bfloat16")) == (20.0, 1.0)
    assert (report["before"], report["after"]) == (machine.before, machine.after)
    machine.finish()  # again: nothing is left to measure, and nothing is measured


def test_the_peak_is_the_best_of_kernel_and_instruction() -> None:
    state = MachineState(bfloat16_tflops=0.9, bfloat16_register_tflops=1.1, float32_tflops=0.5)
    assert (state.peak_tflops("bfloat16"), state.peak_tflops("float32")) == (1.1, 0.5)
    assert MachineState().peak_tflops("bfloat16") is None


@needs_native
def test_everything_is_measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    state = measure_machine(2)
    assert state.read_gb_s is not None
    assert 0.1 < state.read_gb_s < 10_000
    assert state.read_buffer_mib == read_buffer_bytes(last_cache_bytes()) / 2**20
    for value in (state.bfloat16_tflops, state.bfloat16_register_tflops, state.float32_tflops):
        assert value is not None
        assert 0.001 < value < 1000
    if bench_machine.num_cores() > 1:
        assert state.round_trip_ns is not None
        assert 1 < state.round_trip_ns < 1e7


def test_without_native_code_there_is_nothing_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_machine, "why_unavailable", lambda: "not built")
    assert measure_machine(2) == MachineState()
    log = StepLog()
    machine = MachineWatch()
    assert log.summary(1.0, machine) == {"floor_s": None, "floor_ratio": None}
    assert machine.report()["after"] == MachineState()


def test_what_is_read_is_eight_times_the_last_cache_within_limits(tmp_path: Path) -> None:
    assert last_cache_bytes(tmp_path) == 0
    for number, size in enumerate(["48K", "32K", "1024K", "98304K"]):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(f"{size}\n")
    assert last_cache_bytes(tmp_path) == 96 * 2**20
    assert [read_buffer_bytes(mib * 2**20) / 2**20 for mib in (0, 96, 500)] == [256, 768, 1024]


def test_the_processor_is_named(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some CPU 3000\n")
    assert cpu_name(info) == "Some CPU 3000"
    assert cpu_name(tmp_path / "absent")


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> NativeExecutor:
    if reason := why_unavailable():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(directory)
    return NativeExecutor(open_model(directory), dtype="float32", threads=2)


def test_the_steps_of_a_run_are_logged_with_their_floors(executor: NativeExecutor) -> None:
    log = StepLog(times_operations=True)
    watched = log.wrap(executor)
    watched.allocate_kv(8, 16)
    batch = pack([([1, 2, 3, 4], 0, [2])], 16, wanted="last")
    expected = executor.forward(batch).copy()
    assert np.array_equal(watched.forward(batch), expected)
    watched.forward(pack([([1, 2, 3, 4, 5], 4, [2])], 16, wanted="last"))
    assert [step.shape.num_tokens for step in log.steps] == [4, 1]
    costs = StepCosts(executor.program, executor.itemsize)
    weights_a_second, peak = costs.weight_bytes / 1e9, 1e6  # so slow and so fast that reading counts alone
    summary = log.summary(4.0, watch(weights_a_second, weights_a_second, peak=peak))
    kv_s = sum(costs.work(step.shape)["attention"].num_bytes for step in log.steps) / costs.weight_bytes
    assert kv_s > 0.01
    assert summary["floor_s"] == pytest.approx(2 + kv_s, rel=1e-5)
    assert summary["floor_ratio"] == pytest.approx(4 / (2 + kv_s), abs=1e-3)
    assert summary["floor_by_kind_s"]["attention"] == pytest.approx(kv_s, rel=1e-5)
    floors = log.floors(watch(10.0))
    assert log.summary(2.0, watch(10.0, 10.0))["floor_s"] == pytest.approx(
        sum(sum(floor.values()) for floor in floors), rel=1e-5
    )
    assert set(summary["by_kind_s"]) == {"linears", "logits", "attention", "rotary_kv", "norm", "other"}
    assert log.floors(watch(10.0), peak_tflops=1e-9)[0]["linears"] > 1e6 * floors[0]["linears"]


def test_kernels_are_timed_over_rows_of_their_own(executor: NativeExecutor) -> None:
    times = time_kernels(executor, batches=[1, 3], context_len=40, prefill_tokens=70, num_repetitions=2)
    assert [(step.name, step.num_rows) for step in times] == [("decode 1", 1), ("decode 3", 3), ("prefill 70", 1)]
    assert [step.shape.attended(None)[1] for step in times] == [40, 3 * 40, 70]
    assert all(step.total_s > 0 and step.by_kind_s["linears"] > 0 for step in times)
    with pytest.raises(OptionError, match="--context"):
        time_kernels(executor, batches=[1], context_len=0, prefill_tokens=70, num_repetitions=2)


@needs_native
def test_the_kernels_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    sizes = ["--batch", "1", "--batch", "2", "--context", "20", "--prefill-tokens", "33", "--repetitions", "1"]
    assert run(["bench", "kernels", str(tmp_path), *sizes, "--peak-tflops", "2"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in result["steps"]] == ["decode 1", "decode 2", "prefill 33"]
    assert result["steps"][0]["floor_ratio"] > 0
    assert result["machine"]["before"]["read_gb_s"] > 0
    assert run(["bench", "kernels", str(tmp_path), "--executor", "torch"]) == 2
    assert "only the native executor" in capsys.readouterr().err
