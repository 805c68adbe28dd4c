"""Greedy float32 answers equal transformers', token for token, from GGUF and from a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from noria import SamplingParams
from noria.llm import LLM
from support.engines import NUM_JUDGED_TOKENS, Judged, LLMFactory, judge, llm_factory
from support.prompts import TEXTS
from support.reference import Reference

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_JUDGED_TOKENS, ignore_eos=True)


def assert_equals_reference(llm: LLM, judged: Judged) -> None:
    results = llm.generate(judged.prompts, GREEDY)
    for prompt, expected, result in zip(judged.prompts, judged.answers, results, strict=True):
        assert result.error is None
        assert result.outputs[0].token_ids == expected, f"a prompt of {len(prompt)} tokens"
    assert llm.assembled.scheduler_config.max_num_seqs > len(results)  # all of them ran together


def test_prompts_are_of_all_lengths(judged: Judged) -> None:
    lengths = [len(prompt) for prompt in judged.prompts]
    assert len(lengths) >= 12
    assert min(lengths) == 1
    assert 600 <= max(lengths) <= 800


def test_gguf(new_llm: LLMFactory, judged: Judged) -> None:
    assert_equals_reference(new_llm(), judged)


def test_hugging_face_directory(default_model_hf_directory: Path, judged: Judged) -> None:
    with LLM(str(default_model_hf_directory), dtype="float32") as llm:
        assert_equals_reference(llm, judged)
        from_text = llm.generate(list(TEXTS[:3]), GREEDY)
        assert [result.prompt_token_ids for result in from_text] == judged.prompts[:3]
        assert [result.outputs[0].token_ids for result in from_text] == judged.answers[:3]


def test_a_draft_does_not_change_what_the_judge_says(default_model_hf_directory: Path, judged: Judged) -> None:
    reference = Reference(default_model_hf_directory)
    prompt, answer = judged.prompts[1], judged.answers[1][:12]
    wrong = [*answer[:5], answer[5] + 1, *answer[6:]]
    assert reference.greedy(prompt, 12) == reference.greedy(prompt, 12, wrong) == answer


@pytest.mark.full
def test_qwen(qwen_path: Path, qwen_hf_directory: Path) -> None:
    llm = llm_factory(qwen_path, "float32")()
    judged = judge(qwen_hf_directory, llm)
    assert_equals_reference(llm, judged)
    assert_equals_reference(llm_factory(qwen_hf_directory, "float32")(), judged)
