"""The throughput benchmark: its arithmetic on made-up timelines, and its loop over an engine without a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.bench.throughput import Run, run_workload, summarise, warm_up
from noria.bench.timeline import Timeline, percentile
from noria.bench.workload import WorkloadRequest
from noria.fakes import ManualClock
from support.fakes import alphabet

KEYS = [
    *("label", "ok", "failed", "short", "wall_s", "prompt_tokens", "gen_tokens", "gen_tok_s", "total_tok_s"),
    *("ttft_p50", "ttft_p99", "tpot_p50_ms", "tpot_p99_ms", "itl_p99_ms", "errors"),
]


def test_a_summary_of_known_times() -> None:
    three = Timeline(
        WorkloadRequest("a", 3), num_prompt_tokens=10, num_generated=3, start_s=1.0, token_times_s=[1.5, 1.6, 1.9]
    )
    one = Timeline(
        WorkloadRequest("b", 2),
        num_prompt_tokens=5,
        num_generated=1,
        start_s=1.0,
        token_times_s=[2.0],
        num_cached_tokens=4,
    )
    refused = Timeline(WorkloadRequest("", 2), error="empty")
    summary = summarise(Run(timelines=[three, one, refused], wall_s=2.0, num_steps=7, num_preemptions=1), "x")
    assert list(summary)[: len(KEYS)] == KEYS
    assert summary == {
        "label": "x",
        "ok": 2,
        "failed": 1,
        "short": 1,
        "wall_s": 2.0,
        "prompt_tokens": 15,
        "gen_tokens": 4,
        "gen_tok_s": 2.0,
        "total_tok_s": 9.5,
        "ttft_p50": 0.5,
        "ttft_p99": 1.0,
        "tpot_p50_ms": 200.0,
        "tpot_p99_ms": 200.0,
        "itl_p99_ms": 300.0,
        "errors": ["empty"],
        "cached_tokens": 4,
        "steps": 7,
        "preemptions": 1,
    }


def test_nothing_but_failures_has_no_latencies() -> None:
    summary = summarise(
        Run(timelines=[Timeline(WorkloadRequest("", 2), error="empty")], wall_s=1, num_steps=0, num_preemptions=0), "x"
    )
    assert (summary["ok"], summary["ttft_p50"], summary["itl_p99_ms"]) == (0, None, None)


def test_all_at_once() -> None:
    assembled = alphabet()
    requests = [WorkloadRequest("abc", 5), WorkloadRequest("", 5), WorkloadRequest((100, 101), 7)]
    run = run_workload(assembled, requests)
    assert [len(timeline.token_times_s) for timeline in run.timelines] == [5, 0, 7]
    assert [timeline.num_prompt_tokens for timeline in run.timelines] == [3, 0, 2]
    assert run.timelines[1].error is not None
    assert run.num_steps == 7


def test_end_of_sequence_is_ignored() -> None:
    run = run_workload(alphabet(), [WorkloadRequest("y", 9)])
    assert len(run.timelines[0].token_times_s) == 9


def test_arrivals_are_honoured_on_request() -> None:
    clock = ManualClock()
    requests = [WorkloadRequest("a", 2, arrival_s=5.0), WorkloadRequest("b", 2, arrival_s=1.0)]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(seconds)

    run = run_workload(alphabet(), requests, honour_arrivals=True, clock=clock, sleep=sleep)
    assert slept == [1.0, 4.0]
    assert [timeline.start_s for timeline in run.timelines] == [clock() - 0.0, clock() - 4.0]


def test_preemptions_are_counted() -> None:
    run = run_workload(alphabet(num_blocks=16), [WorkloadRequest("abcdef", 40)] * 3)
    assert run.num_preemptions > 0
    assert [len(timeline.token_times_s) for timeline in run.timelines] == [40] * 3


def test_warming_up_leaves_the_engine_idle() -> None:
    assembled = alphabet()
    warm_up(assembled)
    assert len(assembled.core.records) > 0
    assert not assembled.client.has_work


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_is_one_of_the_values(values: list[float], percent: float) -> None:
    assert percentile(values, percent) in values
    assert percentile(values, 0) == min(values)
    assert percentile(values, 100) == max(values)


def test_a_percentile_of_nothing() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0, 1.0, 2.0], 50) == pytest.approx(2.0)
