"""The native executor under the whole engine: transformers' answers in float32, the same bits in every situation."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from noria import SamplingParams
from noria.llm import LLM
from noria.ops.native import NativeExecutor, why_unavailable
from support.engines import Judged, LLMFactory, llm_factory, num_preemptions

if reason := why_unavailable():
    pytest.skip(reason, allow_module_level=True)

NUM_NEW_TOKENS = 16
Answers = list[tuple[list[int], object]]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def native_llm(request: pytest.FixtureRequest, default_model_path: Path) -> LLMFactory:
    return llm_factory(default_model_path, request.param, NativeExecutor)


def answers(llm: LLM, prompts: list[list[int]], **sampling: object) -> Answers:
    """Token ids and log-probabilities, to be compared bit for bit."""
    params = SamplingParams(max_tokens=NUM_NEW_TOKENS, ignore_eos=True, logprobs=3, **sampling)
    results = llm.generate(prompts, params)
    assert all(result.error is None for result in results)
    return [(result.outputs[0].token_ids, result.outputs[0].logprobs) for result in results]


def crowd(judged: Judged) -> list[list[int]]:
    return (judged.prompts + judged.neighbours)[:32]


def test_float32_answers_are_transformers(default_model_path: Path, judged: Judged) -> None:
    llm = llm_factory(default_model_path, "float32", NativeExecutor)()
    params = SamplingParams(temperature=0.0, max_tokens=len(judged.answers[0]), ignore_eos=True)
    results = llm.generate(judged.prompts, params)
    assert [result.outputs[0].token_ids for result in results] == judged.answers


def test_an_answer_is_the_same_bits_whatever_happens_around_it(native_llm: LLMFactory, judged: Judged) -> None:
    """24 prompts: alone and cold; warm; among others under three budgets; with preemptions; with other options."""
    prompts = crowd(judged)[:24]
    sampling: dict[str, object] = {"temperature": 0.8, "seed": 7, "top_p": 0.95}
    alone: Answers = []
    for prompt in prompts:
        alone += answers(native_llm(max_num_seqs=1, enable_prefix_caching=False), [prompt], **sampling)
    warm = native_llm()
    cases = {
        "together, cold": answers(warm, prompts, **sampling),
        "together, warm": answers(warm, prompts, **sampling),
        "in the other order": answers(native_llm(), prompts[::-1], **sampling)[::-1],
    }
    for budget, share in itertools.product((16, 100), (0.3, 1.0)):
        llm = native_llm(max_num_batched_tokens=budget, max_prefill_share=share)
        cases[f"budget {budget}, share {share}"] = answers(llm, prompts, **sampling)
    longest = max(map(len, prompts)) + NUM_NEW_TOKENS
    tight = native_llm(num_kv_blocks=-(-longest // 16) + 4, adaptive_watermark=False)
    cases["preempted"] = answers(tight, prompts, **sampling)
    assert num_preemptions(tight.assembled) > 0
    cases["blocks of 32"] = answers(native_llm(block_size=32), prompts, **sampling)
    for name, found in cases.items():
        assert found == alone, name


def test_nothing_imports_torch_where_the_native_executor_runs(default_model_path: Path) -> None:
    code = (
        "import sys, noria\n"
        f"llm = noria.LLM({str(default_model_path)!r}, num_kv_blocks=64)\n"
        "[result] = llm.generate('The capital of France is', noria.SamplingParams(temperature=0, max_tokens=8))\n"
        "print(result.outputs[0].text)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert "Paris" in finished.stdout
