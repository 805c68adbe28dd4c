"""The benchmarks of scheduler and KV memory: what they report is what they say."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from noria.bench import kv
from noria.bench import scheduler as bench_scheduler
from noria.bench.traces import TraceRequest, read_trace
from noria.cli.app import run
from noria.errors import OptionError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,37,4
2023-11-16 18:15:50.9951690,39,10
2023-11-16 18:15:51.2224670,87,5
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 0, "input_length": 700, "output_length": 4, "hash_ids": [0, 3]}
"""


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return path


def test_lengths_come_from_an_azure_trace(azure: Path) -> None:
    requests = read_trace(azure, limit=2)
    assert [(len(r.prompt), r.num_output_tokens) for r in requests] == [(37, 4), (39, 10)]
    assert not set(requests[0].prompt) & set(requests[1].prompt)
    assert [len(r.prompt) for r in read_trace(azure, limit=9, scale=10)] == [4, 4, 9]


def test_equal_blocks_of_a_mooncake_trace_are_equal_tokens(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(MOONCAKE)
    first, second = read_trace(path, limit=9)
    assert (len(first.prompt), len(second.prompt), second.num_output_tokens) == (1030, 700, 4)
    assert first.prompt[:512] == second.prompt[:512]
    assert not set(first.prompt[512:]) & set(second.prompt[512:])


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,y,z\n"])
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(OptionError, match=r"trace\.csv"):
        read_trace(path, limit=3)


def test_waste_is_empty_slots_over_filled_ones() -> None:
    """One request of 5 + 1 tokens in blocks of 8: five of eight slots are filled for one step, then it is over."""
    ledger = kv.serve_trace([TraceRequest(list(range(5)), 1)], pool_tokens=64, block_size=8, max_num_seqs=4)
    assert ledger.waste == pytest.approx(3 / 5)
    ledger = kv.serve_trace([TraceRequest(list(range(8)), 1)], pool_tokens=64, block_size=8, max_num_seqs=4)
    assert ledger.waste == 0


def test_time_is_weighed() -> None:
    """Two steps: 4 tokens in 20 ms with 0 of 4 slots empty, then 1 token in 15.5 ms with 3 of 8."""
    ledger = kv.serve_trace([TraceRequest(list(range(4)), 2)], pool_tokens=64, block_size=4, max_num_seqs=4)
    assert ledger.seconds == pytest.approx(0.0355)
    assert ledger.empty == pytest.approx(3 * 0.0155)
    assert ledger.held == pytest.approx(4 * 0.020 + 8 * 0.0155)


def test_reserving_the_maximum_wastes_more_than_any_block_size() -> None:
    requests = [TraceRequest(list(range(1000 * i, 1000 * i + 20 + 13 * i)), 5 + i) for i in range(12)]
    result = kv.measure_kv(requests, block_sizes=(4, 16), max_num_seqs=4, pool_share=0.5)
    waste = result["waste"]
    assert isinstance(waste, dict)
    assert 0 < waste["4"] < waste["16"]
    reserved = result["waste_max_length"]
    assert isinstance(reserved, float)
    assert reserved > 2 * waste["16"]


def test_the_command_prints_one_json_line(azure: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "kv", "--trace", str(azure), "--block-size", "8", "--block-size", "16"]) == 0
    result = msgspec.json.decode(capsys.readouterr().out)
    assert (result["trace"], result["requests"]) == ("azure.csv", 3)
    assert list(result["waste"]) == ["8", "16"]


def test_the_scheduler_benchmark_has_the_promised_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_scheduler, "NUM_QUEUED", 50)
    result = bench_scheduler.measure_scheduler(num_rounds=1, num_steps=4)
    for key in ("us_per_request_step_256", "us_per_request_step_1024", "us_per_add"):
        value = result[key]
        assert isinstance(value, float)
        assert value > 0


def test_the_steps_that_are_measured_are_those_of_steady_decode() -> None:
    decoding = bench_scheduler._Decoding(20, "fcfs")
    decoding.queue(10)
    decoding.us_per_request_step(33)
    plan = decoding.scheduler.records[-1].plan
    assert set(plan.num_scheduled_tokens.values()) == {1}
    assert (len(plan.num_scheduled_tokens), len(decoding.scheduler.waiting)) == (20, 10)
