"""What a caller sees, with a real model: text, stop strings, several sequences, seeds, refusals."""

from __future__ import annotations

import pytest

from noria import SamplingParams
from noria.core.events import FinishReason
from noria.llm import LLM
from support.engines import LLMFactory

QUESTION = "The capital of France is"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def llm(new_llm: LLMFactory) -> LLM:
    return new_llm()


def test_it_knows_paris(llm: LLM) -> None:
    [answer] = llm.generate(QUESTION, GREEDY)
    assert "Paris" in answer.text
    assert answer.outputs[0].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    assert answer.num_completion_tokens == len(answer.outputs[0].token_ids)


def test_a_stop_string_cuts_text_tokens_and_logprobs_alike(llm: LLM) -> None:
    [whole] = llm.generate(QUESTION, GREEDY)
    stop = whole.text[8:11]  # somewhere in the middle, and not on a token's edge by design
    [cut] = llm.generate(QUESTION, SamplingParams(temperature=0.0, max_tokens=24, stop=(stop,), logprobs=2))
    output = cut.outputs[0]
    assert output.text == whole.text[: whole.text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
    assert output.token_ids == whole.outputs[0].token_ids[: len(output.token_ids)]
    assert stop in llm.tokenizer.decode(output.token_ids)
    assert stop not in llm.tokenizer.decode(output.token_ids[:-1])
    assert output.logprobs is not None
    assert [position.token_id for position in output.logprobs] == output.token_ids
    assert all(len(position.top) == 2 for position in output.logprobs)
    assert not llm.assembled.core.scheduler.has_unfinished


def test_n_sequences_of_one_seed(llm: LLM) -> None:
    sampling = SamplingParams(n=4, seed=7, temperature=1.0, max_tokens=12)
    [first] = llm.generate(QUESTION, sampling)
    crowded = llm.generate(["Once upon a time", QUESTION, "1, 2, 3,"], sampling)[1]
    assert [output.index for output in first.outputs] == [0, 1, 2, 3]
    assert len({output.text for output in first.outputs}) > 1
    assert [output.token_ids for output in crowded.outputs] == [output.token_ids for output in first.outputs]


def test_requests_without_a_seed_differ(llm: LLM) -> None:
    [one], [two] = (llm.generate(QUESTION, SamplingParams(temperature=1.5, max_tokens=16)) for _ in range(2))
    assert one.outputs[0].token_ids != two.outputs[0].token_ids


def test_chat_answers(llm: LLM) -> None:
    [answer] = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    assert "Paris" in answer.text
    assert answer.outputs[0].finish_reason is FinishReason.STOP


def test_a_stream_is_the_same_text_in_pieces(llm: LLM) -> None:
    [whole] = llm.generate(QUESTION, GREEDY)
    pieces = list(llm.stream(QUESTION, GREEDY))
    assert len(pieces) > 3
    assert "".join(pieces) == whole.text
