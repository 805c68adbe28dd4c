"""Sliding windows and full attention over one KV pool: a tiny random Gemma 3, served by each executor.

What is compared is equality, with transformers and of one way to come by an answer with another. Prompts are shorter
and longer than the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers

from models.support import WINDOW, random_prompts, tiny_model, transformers_greedy
from noria.assembly import join_core
from noria.bench.determinism import Ledger, RecordingExecutor
from noria.config import EngineOptions
from noria.engine.core import EngineCore
from noria.engine.messages import EngineRequest
from noria.files.model import ModelFiles
from noria.files.sources import open_model
from noria.kv_layout import KVLayout
from noria.ops.native import NativeExecutor, why_unavailable
from noria.ops.reference import TorchExecutor
from noria.runner.executor import Executor
from noria.sampling import SamplingParams

NUM_NEW_TOKENS = 24
LENGTHS = [3, WINDOW - 1, 47, 100, 180]
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "torch": (TorchExecutor, {"dtype": "float32"}),
    "native float32": (NativeExecutor, {"dtype": "float32"}),
    "native": (NativeExecutor, {"dtype": "bfloat16"}),
}


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return tiny_model("gemma3")


@dataclass
class Loaded:
    """A model on an executor, which one engine after the other takes over."""

    files: ModelFiles
    executor: Executor
    dtype: str
    is_exact: bool
    """Whether equal tokens give equal bits however they are computed."""

    def engine(self, executor: Executor | None = None, **options: Any) -> EngineCore:
        defaults = {"dtype": self.dtype, "max_num_batched_tokens": 64, "max_num_seqs": 8, "num_kv_blocks": 400}
        return join_core(self.files, executor or self.executor, EngineOptions.from_names(defaults | options))


@pytest.fixture(scope="module", params=KINDS)
def loaded(request: pytest.FixtureRequest, model: transformers.PreTrainedModel, tmp_path_factory: Any) -> Loaded:
    if request.param != "torch" and (reason := why_unavailable()):
        pytest.skip(reason)
    path: Path = tmp_path_factory.mktemp("gemma")
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(path)
    make, options = KINDS[request.param]
    files = open_model(path)
    return Loaded(files, make(files, threads=1, **options), options["dtype"], make is NativeExecutor)


def answers(core: EngineCore, prompts: list[list[int]], name: str = "r") -> list[tuple[int, ...]]:
    """Greedy answers to prompts that arrive together; invariants are checked after each step."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    said: dict[str, tuple[int, ...]] = {f"{name}{i}": () for i in range(len(prompts))}
    for request_id, prompt in zip(said, prompts, strict=True):
        core.add_request(EngineRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling))
    while core.has_work:
        for event in core.step():
            said[event.request_id] += event.token_ids
            assert event.error is None
        core.scheduler.check()
    return list(said.values())


def num_cached(core: EngineCore) -> int:
    """Tokens that the last request found, from the first plan that has it."""
    return max(a.num_computed_tokens for record in core.records for a in record.plan.admitted)


def test_cold_warm_chunked_batched_and_preempted_runs_say_the_same(
    loaded: Loaded, model: transformers.PreTrainedModel
) -> None:
    prompts = random_prompts(LENGTHS)
    ledger = Ledger()

    def engine(seed: int | None = None, **options: Any) -> EngineCore:
        return loaded.engine(RecordingExecutor(loaded.executor, ledger, seed), **options)

    core = engine()
    expected = [answers(core, [prompt], f"cold{i}-")[0] for i, prompt in enumerate(prompts)]
    if loaded.dtype == "float32":
        assert expected == [tuple(transformers_greedy(model, prompt, NUM_NEW_TOKENS)) for prompt in prompts]
    ledger.is_first_case = False
    assert [answers(core, [prompt], f"warm{i}-")[0] for i, prompt in enumerate(prompts)] == expected
    assert num_cached(core) == (LENGTHS[-1] - 1) // 16 * 16
    for options in ({"max_num_batched_tokens": 7}, {"max_num_batched_tokens": 16}, {"seed": 3}):
        assert answers(engine(**options), prompts) == expected
    layout = KVLayout(16, loaded.executor.kv_windows, 64)
    few = layout.most_blocks(LENGTHS[-1] + NUM_NEW_TOKENS) + layout.num_groups
    core = engine(num_kv_blocks=few, reserve_full_sequence=False, adaptive_watermark=False)
    assert answers(core, prompts) == expected
    assert sum(len(record.plan.preempted) for record in core.records) > 0
    assert ledger.num_compared > 500
    if loaded.is_exact:
        assert ledger.num_different == 0


def test_what_a_long_answer_holds_stays_far_below_full_attention(loaded: Loaded) -> None:
    core = loaded.engine(max_model_len=512)
    [prompt] = random_prompts([440])
    answers(core, [prompt])
    windows = loaded.executor.kv_windows
    layout = KVLayout(16, windows, 64)
    held = [record.kv.num_held for record in core.records if record.num_running]
    assert max(held) <= layout.most_blocks(440 + NUM_NEW_TOKENS)
    everywhere = len(windows) * layout.num_columns(440 + NUM_NEW_TOKENS)
    assert held[-1] <= everywhere / 2
    assert windows.count(WINDOW) == 3
    assert windows.count(None) == 1
    # One group keeps all, the others what a window of 24 tokens touches.
    assert held[-1] <= layout.num_columns(440 + NUM_NEW_TOKENS) + 3 * 3


def test_the_same_prompt_four_times_with_other_traffic_between(loaded: Loaded) -> None:
    """The second answer finds the prompt; the third as well, for what others need is taken from the middle of prompts
    first; then so much goes by that nothing is left for the fourth."""
    core = loaded.engine(num_kv_blocks=120)
    [prompt] = random_prompts([150])
    others = random_prompts([130, 90, 60, 110, 140, 100], seed=5)
    given, found = [], []
    for i in range(4):
        given += answers(core, [prompt], f"same{i}-")
        found.append(
            max(a.num_computed_tokens for r in core.records for a in r.plan.admitted if f"same{i}" in a.request_id)
        )
        answers(core, others[:1] if i == 1 else others if i == 2 else [], f"other{i}-")
    assert len(set(given)) == 1
    assert found == [0, 144, 144, 0]
    stats = core.records[-1].kv
    assert stats.num_held == 0
    assert stats.num_cached_idle + stats.num_blank == 120
