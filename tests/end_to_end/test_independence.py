"""An answer is a function of its request alone: not of chunking, neighbours, the prefix cache or preemption."""

from __future__ import annotations

from pathlib import Path

import pytest

from noria import SamplingParams
from noria.llm import LLM
from support.engines import Judged, LLMFactory, llm_factory, num_preemptions

NUM_NEW_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    results = llm.generate(prompts, GREEDY)
    assert all(result.error is None for result in results)
    return [result.outputs[0].token_ids for result in results]


def crowd(judged: Judged) -> list[list[int]]:
    """32 prompts: those that were judged, and others around them."""
    prompts = judged.prompts + judged.neighbours
    assert len(prompts) >= 32
    return prompts[:32]


@pytest.fixture(scope="module")
def expected(judged: Judged) -> list[list[int]]:
    return [answer[:NUM_NEW_TOKENS] for answer in judged.answers]


def test_alone_cold_and_warm(new_llm: LLMFactory, judged: Judged, expected: list[list[int]]) -> None:
    llm = new_llm()
    for prompt, answer in zip(judged.prompts, expected, strict=True):
        [cold] = llm.generate(prompt, GREEDY)
        [warm] = llm.generate(prompt, GREEDY)
        assert cold.outputs[0].token_ids == warm.outputs[0].token_ids == answer
        assert warm.num_cached_tokens == (len(prompt) - 1) // 16 * 16


@pytest.mark.parametrize("budget", [16, 64, 512])
def test_token_budgets_among_31_others(
    new_llm: LLMFactory, judged: Judged, expected: list[list[int]], budget: int
) -> None:
    llm = new_llm(max_num_batched_tokens=budget)
    assert answers(llm, crowd(judged))[: len(expected)] == expected
    assert max(record.plan.num_tokens for record in llm.assembled.core.records) == budget


def test_preemption(new_llm: LLMFactory, judged: Judged, expected: list[list[int]]) -> None:
    longest = max(len(prompt) for prompt in judged.prompts) + NUM_NEW_TOKENS
    llm = new_llm(num_kv_blocks=-(-longest // 16) + 4)
    assert answers(llm, crowd(judged))[: len(expected)] == expected
    assert num_preemptions(llm.assembled) > 0
    llm.assembled.core.scheduler.check()


def test_equal_prompts_are_computed_once(new_llm: LLMFactory, judged: Judged) -> None:
    """32 prompts of 512 tokens that arrive together cost one prefill, and one block each for the last token."""
    prompt = (judged.prompts[-1] * 512)[:512]
    llm = new_llm()
    one_token = SamplingParams(temperature=0.0, max_tokens=1)
    results = llm.generate([prompt] * 32, one_token)
    assert len({result.outputs[0].token_ids[0] for result in results}) == 1
    # With one token each, all that is computed are prompt tokens.
    assert sum(record.plan.num_tokens for record in llm.assembled.core.records) <= 512 + 31 * 16


@pytest.mark.full
def test_bfloat16_share_that_stays_equal(default_model_path: Path, judged: Judged) -> None:
    """Reported, not held to a value: in bfloat16 the sums of a row depend on how many rows torch multiplies."""
    new_llm = llm_factory(default_model_path, "bfloat16")
    prompts = crowd(judged)
    alone = [answers(new_llm(), [prompt])[0] for prompt in prompts]
    for name, options in {
        "budget 16": {"max_num_batched_tokens": 16},
        "budget 64": {"max_num_batched_tokens": 64},
        "budget 512": {"max_num_batched_tokens": 512},
    }.items():
        together = answers(new_llm(**options), prompts)
        share = sum(a == b for a, b in zip(alone, together, strict=True)) / len(prompts)
        print(f"\nbfloat16, {name}, among 31 others: {share:.0%} of {len(prompts)} answers equal those given alone")
        assert share > 0
