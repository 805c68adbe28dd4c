"""The determinism benchmark: it finds nothing where there is nothing, and sees faults of the kinds it is there for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import running_server

from models.support import PagedDriver, random_prompts, tiny_model
from noria.bench import determinism
from noria.bench.determinism import Matrix, measure_determinism
from noria.bench.probe import Answer, compare_answers, probe_server
from noria.bench.watched import ExecutorWrapper
from noria.cli.app import run
from noria.config import EngineOptions
from noria.errors import NoriaError, OptionError
from noria.fakes.executor import HashExecutor
from noria.fakes.tokenizer import ByteTokenizer
from noria.files.huggingface import HuggingFaceModel
from noria.files.model import ModelFiles
from noria.ops.executors import create_executor
from noria.ops.native import why_unavailable
from noria.runner.executor import Executor, Float32Array, ForwardBatch

needs_native = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
HYBRIDS: list[tuple[str, dict[str, Any]]] = [("gemma3", {}), ("mistral", {})]
LIKE_GEMMA = {"num_hidden_layers": 18, "sliding_window": 512, "max_position_embeddings": 1024}
SMALL = Matrix(num_sequences=8, num_new_tokens=6, longest_prompt=70, budgets=(16, 100))
Fault = Callable[[ForwardBatch, Float32Array], Float32Array]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A tiny Llama, or the architecture that the test is parametrised with, and how it differs."""
    architecture, overrides = getattr(request, "param", ("llama", {}))
    tiny_model(architecture, **overrides).save_pretrained(tmp_path)
    # It has none, and everything here is token ids.
    monkeypatch.setattr(HuggingFaceModel, "tokenizer", None)
    monkeypatch.setattr(determinism, "load_tokenizer", lambda files: ByteTokenizer())
    return str(tmp_path)


class Faulty(ExecutorWrapper):
    def __init__(self, executor: Executor, fault: Fault) -> None:
        super().__init__(executor)
        self._fault = fault

    def forward(self, batch: ForwardBatch) -> Float32Array:
        return self._fault(batch, super().forward(batch).copy())


def with_fault(fault: Fault) -> Callable[[ModelFiles, EngineOptions], Executor]:
    return lambda files, options: Faulty(create_executor(files, options), fault)


def nudged(logits: Float32Array) -> Float32Array:
    """The last bit of each row's first logit is another."""
    logits[:, :1].view(np.int32)[...] ^= 1
    return logits


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_native_executor_gives_the_same_bits(model: str, dtype: str) -> None:
    result = measure_determinism(model, SMALL, dtype=dtype)
    assert (result["cases"], result["different"], result["different_by_case"]) == (48, 0, {})
    assert result["compared"] > 47 * 8 * 6


@needs_native
@pytest.mark.parametrize("model", HYBRIDS, indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_so_it_does_with_windows_in_some_layers_or_in_all(model: str, dtype: str) -> None:
    """They are of 24 tokens, and prompts go up to 70."""
    result = measure_determinism(model, SMALL, dtype=dtype)
    assert (result["cases"], result["different"], result["different_by_case"]) == (48, 0, {})
    assert result["compared"] > 47 * 8 * 6


@needs_native
@pytest.mark.parametrize("model", [("gemma3", LIKE_GEMMA)], indirect=True)
def test_something_is_found_in_a_small_pool_with_windows(model: str) -> None:
    """As many groups of layers, and as large a window, as Gemma 3 270M has."""
    matrix = Matrix(num_sequences=4, num_new_tokens=4, longest_prompt=600, budgets=(16,), threads=(1,))
    result = measure_determinism(model, matrix, dtype="float32")
    assert (result["cases"], result["different"]) == (12, 0)


@needs_native
@pytest.mark.parametrize("model", HYBRIDS, indirect=True)
def test_with_windows_one_bit_is_seen_as_well(model: str) -> None:
    def fault(batch: ForwardBatch, logits: Float32Array) -> Float32Array:
        """Where windows have moved past something, unless it was in the same step."""
        return nudged(logits) if len(batch.token_ids) < 40 and (batch.context_len > 48).any() else logits

    matrix = Matrix(num_sequences=8, num_new_tokens=6, longest_prompt=70, budgets=(16, 100), threads=(1,))
    result = measure_determinism(model, matrix, dtype="float32", make_executor=with_fault(fault))
    assert 0 < result["different"] < result["compared"]


@pytest.mark.parametrize("model", HYBRIDS[1:], indirect=True)
@pytest.mark.parametrize(("longest_prompt", "is_told"), [(20, True), (60, False)])
def test_windows_that_nothing_is_longer_than_are_told(
    model: str, longest_prompt: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(files: ModelFiles, options: EngineOptions) -> Executor:
        raise NoriaError("enough")

    with pytest.raises(NoriaError, match="enough"):
        measure_determinism(
            model, Matrix(longest_prompt=longest_prompt, num_new_tokens=4), dtype="float32", make_executor=stop
        )
    assert ("no sequence is longer than the model's window of 24 tokens" in caplog.text) == is_told


@pytest.mark.parametrize("windows", [(None,), (1,), (2,), (16,), (40, None), (3, 17)])
def test_logits_are_filed_under_all_the_tokens_before(windows: tuple[int | None, ...]) -> None:
    """By the model of the tests, whose logits are a hash of what its windows see: other tokens, other digests."""
    ledger = determinism.Ledger()
    executor = determinism.RecordingExecutor(HashExecutor(kv_windows=windows), ledger, seed=4)
    seen = {}
    for i, prompt in enumerate(random_prompts([50, 50, 33, 1], vocab_size=64)):
        for chunk in (50, 7, 16):
            ledger.first.clear()
            PagedDriver(executor, num_blocks=8, block_size=16).logits([prompt], [chunk])
            assert len(ledger.first) == len(prompt)
            assert seen.setdefault(i, dict(ledger.first)) == ledger.first
    if max(window or 99 for window in windows) > 1:
        assert not set(seen[0]) & set(seen[1])


@needs_native
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda batch, logits: nudged(logits) if len(batch.token_ids) > 8 else logits, "budget"),
        (lambda batch, logits: nudged(logits) if len(batch.context_len) > 1 else logits, "batched"),
        (lambda batch, logits: nudged(logits) if batch.block_table[0, 0] > 30 else logits, "shuffled"),
    ],
    ids=["many rows", "neighbours", "block ids"],
)
def test_one_bit_that_depends_on_surroundings_is_seen(model: str, fault: Fault, words: str) -> None:
    matrix = Matrix(num_sequences=8, num_new_tokens=6, longest_prompt=70, budgets=(16, 100), threads=(1,))
    result = measure_determinism(model, matrix, dtype="float32", make_executor=with_fault(fault))
    assert result["different"] > 0
    assert any(words in case for case in result["different_by_case"])


@needs_native
def test_a_fault_of_one_number_of_threads_is_seen(model: str) -> None:
    def make(files: ModelFiles, options: EngineOptions) -> Executor:
        executor = create_executor(files, options)
        return executor if options.threads == 1 else Faulty(executor, lambda batch, logits: nudged(logits))

    result = measure_determinism(model, SMALL, dtype="float32", make_executor=make)
    assert all(case.endswith("2 threads") for case in result["different_by_case"])
    assert len(result["different_by_case"]) == 24


@needs_native
def test_a_case_that_does_not_happen_is_no_proof(model: str) -> None:
    with pytest.raises(NoriaError, match="nothing was preempted"):
        measure_determinism(model, Matrix(num_sequences=1, num_new_tokens=2, longest_prompt=40), dtype="float32")


@pytest.mark.parametrize("name", ["num_sequences", "num_new_tokens", "longest_prompt"])
def test_a_matrix_that_is_too_small_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=name.removeprefix("num_").replace("_", "-")):
        Matrix(**{name: 0})


@needs_native
def test_the_command_fails_where_something_differs(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["bench", "determinism", model, "--sequences", "8", "--new-tokens", "16", "--longest-prompt", "60"]
    assert run([*arguments, "--threads", "1", "--dtype", "float32"]) == 0
    assert json.loads(capsys.readouterr().out)["different"] == 0
    make = with_fault(lambda batch, logits: nudged(logits) if len(batch.context_len) > 1 else logits)
    monkeypatch.setitem(measure_determinism.__kwdefaults__, "make_executor", make)
    assert run([*arguments, "--threads", "1", "--dtype", "float32"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["different"] > 0
    assert "comparisons differ" in err


def test_answers_are_compared_by_text_and_by_log_probability() -> None:
    alone = [Answer("a", (-0.5, -1.0)), Answer("b", (-0.25,))]
    same: dict[str, Any] = {"again": list(alone)}
    assert compare_answers(alone, same)["different"] == 0
    other = {"again": [Answer("a", (-0.5, -1.25)), Answer("c", (-0.25,))]}
    result = compare_answers(alone, same | {"together": other["again"]})
    assert (result["compared"], result["different"], result["different_texts"]) == (4, 2, 1)
    assert result["greatest_logprob_difference"] == 0.25
    assert result["different_by_round"]["together"] == {"texts": 1, "logprobs": 1}


def test_a_server_is_probed() -> None:
    with running_server({"max_model_len": 1024, "num_blocks": 512}) as server:
        result = probe_server(server.url, model=None, num_prompts=4, max_tokens=5)
    assert (result["compared"], result["different"]) == (12, 0)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(NoriaError, match="nothing answers at http://127"):
        probe_server("http://127.0.0.1:1", model=None, num_prompts=2, max_tokens=1)
