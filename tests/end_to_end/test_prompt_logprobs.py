"""Log-probabilities of prompts against transformers, and the same bits whatever the step budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noria import SamplingParams
from noria.core.plan import TokenLogprobs
from noria.llm import LLM
from noria.ops.native import NativeExecutor, why_unavailable
from support.engines import LLMFactory, llm_factory
from support.reference import Reference

SCORED = SamplingParams(max_tokens=0, prompt_logprobs=5)


def scores(llm: LLM, prompts: list[list[int]]) -> list[list[TokenLogprobs]]:
    results = llm.generate(prompts, SCORED)
    found = []
    for result in results:
        assert result.error is None
        assert result.outputs[0].token_ids == []
        assert result.prompt_logprobs is not None
        first, *others = result.prompt_logprobs
        assert first is None
        found.append([position for position in others if position is not None])
    return found


def assert_equal_to_transformers(found: list[list[TokenLogprobs]], prompts: list[list[int]], reference: Any) -> None:
    for prompt, positions in zip(prompts, found, strict=True):
        logits = reference.logits(prompt).numpy().astype(np.float64)[:-1]
        expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        assert [position.token_id for position in positions] == prompt[1:]
        own = [position.logprob for position in positions]
        np.testing.assert_allclose(own, expected[np.arange(len(own)), prompt[1:]], atol=1e-3)
        top = [[value for _, value in position.top] for position in positions]
        np.testing.assert_allclose(top, -np.sort(-expected, axis=1)[:, :5], atol=1e-3)


def test_scores_of_prompts_are_those_of_transformers(default_model_hf_directory: Path, new_llm: LLMFactory) -> None:
    reference = Reference(default_model_hf_directory)
    prompts = reference.prompts()
    assert_equal_to_transformers(scores(new_llm(), prompts), prompts, reference)


def test_native_scores_are_those_of_transformers_and_the_same_bits_in_any_chunks(
    default_model_path: Path, default_model_hf_directory: Path
) -> None:
    if (why_not := why_unavailable()) is not None:
        pytest.skip(why_not)
    reference = Reference(default_model_hf_directory)
    prompts = reference.prompts()
    native_llm = llm_factory(default_model_path, "float32", NativeExecutor)
    found = scores(native_llm(), prompts)
    assert_equal_to_transformers(found, prompts, reference)
    warm = native_llm(max_num_batched_tokens=16)
    assert scores(warm, prompts) == found
    assert scores(warm, prompts) == found, "the cache holds them all, and is not used"
