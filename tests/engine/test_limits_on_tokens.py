"""What requests may ask of single tokens, from scheduler to sampler: biases, masks, least lengths, scores of
prompts. Each answer must be the request's own, whatever the budget, the memory, the cache and the neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from noria.core.events import FinishReason
from noria.engine.client import InProcessClient
from noria.engine.messages import EngineRequest
from noria.errors import ContextLengthError, RequestError
from noria.fakes.executor import HashExecutor
from noria.runner import scoring
from noria.runner.executor import Float32Array, ForwardBatch
from noria.runner.logprobs import token_logprobs
from noria.sampling import SamplingParams
from support.hash_engine import BLOCK, EOS, MAX_LEN, VOCAB, Answer, Engine, Recorder, prompt

LONG = {"max_tokens": 20, "ignore_eos": True}
REQUESTS: list[tuple[list[int], SamplingParams]] = [
    (prompt(0, 9), SamplingParams(seed=1, logit_bias={3: 2.5, 60: -100, 7: 4}, logprobs=2, **LONG)),
    (prompt(1, 23), SamplingParams(temperature=0, allowed_token_ids=(1, 2, 3, 40, 63), logprobs=0, **LONG)),
    (prompt(2, 4), SamplingParams(seed=3, bad_words=((9,), (11, 12), (1, 2, 3)), top_k=9, prompt_logprobs=3, **LONG)),
    (prompt(3, 30), SamplingParams(seed=4, min_tokens=12, max_tokens=30, stop_token_ids=tuple(range(40)))),
    (prompt(4, 33), SamplingParams(temperature=0, prompt_logprobs=20, logprobs=1, **LONG)),
    (prompt(5, 40), SamplingParams(max_tokens=0, prompt_logprobs=0)),
    (prompt(6, 17), SamplingParams(seed=7, repetition_penalty=1.3, logit_bias={8: 9.0}, prompt_logprobs=1, **LONG)),
    (prompt(7, 12), SamplingParams(max_tokens=0)),
    (prompt(8, 12), SamplingParams(seed=9, **LONG)),
]


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    """What each request says alone, cold, and uncut."""
    answers = [Engine().run(request)[0] for request in REQUESTS]
    assert len({tuple(answer.token_ids) for answer in answers}) == len(answers) - 1, "two generate nothing"
    return answers


@pytest.mark.parametrize("budget", [9, 10, 17, 64, 512])
@pytest.mark.parametrize("num_blocks", [20, 200])
def test_the_same_answers_in_any_chunks_and_through_preemptions(
    expected: list[Answer], budget: int, num_blocks: int
) -> None:
    engine = Engine(
        max_num_batched_tokens=budget, num_blocks=num_blocks, reserve_full_sequence=False, adaptive_watermark=False
    )
    assert engine.run(*REQUESTS) == expected
    assert (engine.num_preemptions > 0) == (num_blocks == 20)
    assert engine.run(*REQUESTS) == expected, "and with a warm cache"


def test_the_same_answers_whatever_the_portions(expected: list[Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    for most in (1, 7):
        monkeypatch.setattr(scoring, "LOGITS_BYTES", most * 4 * VOCAB)
        engine = Engine(max_num_batched_tokens=64)
        assert engine.run(*REQUESTS) == expected
        assert isinstance(engine.executor, Recorder)
        # Of each row one may be wanted beyond the portion, and one to sample from.
        assert max(engine.executor.num_logits) <= most + 2 * len(REQUESTS)
        alone = Engine(max_num_batched_tokens=64)
        assert alone.run(REQUESTS[4]) == [expected[4]]
        assert isinstance(alone.executor, Recorder)
        assert max(alone.executor.num_logits) <= most + 1


def test_prompts_are_judged_by_the_logits_before_each_token(expected: list[Answer]) -> None:
    class Keeper(HashExecutor):
        logits: Float32Array

        def forward(self, batch: ForwardBatch) -> Float32Array:
            self.logits = super().forward(batch)
            return self.logits

    for (ids, sampling), answer in zip(REQUESTS, expected, strict=True):
        if sampling.prompt_logprobs is None:
            assert answer.prompt_logprobs == []
            continue
        judged = []
        for end in range(1, len(ids)):
            engine = Engine(keeper := Keeper(VOCAB))
            engine.run((ids[:end], SamplingParams(max_tokens=1)))
            judged.append(token_logprobs(keeper.logits[0], ids[end], sampling.prompt_logprobs))
        assert answer.prompt_logprobs == judged


def test_a_prompt_that_is_scored_takes_nothing_from_the_cache_but_fills_it() -> None:
    engine = Engine()
    ids = prompt(1, 33)
    first = engine.run((ids, SamplingParams(max_tokens=1, temperature=0)))
    for _ in range(2):
        num_tokens = engine.executor.num_tokens
        [scored] = engine.run((ids, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)))
        assert engine.executor.num_tokens == num_tokens + 33
        assert len(scored.prompt_logprobs) == 32
        assert scored.token_ids == first[0].token_ids
    num_tokens = engine.executor.num_tokens
    engine.run((ids, SamplingParams(max_tokens=1)))
    assert engine.executor.num_tokens == num_tokens + 1
    fresh = Engine()
    fresh.run((ids, SamplingParams(max_tokens=0, prompt_logprobs=0)))
    fresh.run((ids, SamplingParams(max_tokens=1)))
    assert fresh.executor.num_tokens == 33 + 1


def test_of_the_sequences_of_a_request_the_first_scores_the_prompt() -> None:
    engine = Engine()
    client = InProcessClient(engine.core)
    sampling = SamplingParams(n=3, max_tokens=2, prompt_logprobs=0)
    for i in range(3):
        parent_id = "r0" if i else None
        client.submit(
            EngineRequest(
                request_id=f"r{i}",
                prompt_token_ids=tuple(prompt(1, 13)),
                sampling=sampling,
                index=i,
                parent_id=parent_id,
            )
        )
    counts = dict.fromkeys(("r0", "r1", "r2"), 0)
    while client.has_work:
        for event in client.poll():
            counts[event.request_id] += len(event.prompt_logprobs)
    assert counts == {"r0": 12, "r1": 0, "r2": 0}
    assert engine.executor.num_tokens == 13 + 2 * 1 + 3, "the others share its blocks"


def test_nothing_is_generated_with_max_tokens_0(expected: list[Answer]) -> None:
    for answer in (expected[5], expected[7]):
        assert answer.token_ids == []
        assert answer.finish_reason is FinishReason.LENGTH
    engine = Engine()
    [whole] = engine.run((prompt(1, MAX_LEN), SamplingParams(max_tokens=0, prompt_logprobs=0)))
    assert len(whole.prompt_logprobs) == MAX_LEN - 1, "a scored prompt may fill the context"
    [short] = engine.run(([3], SamplingParams(max_tokens=0, prompt_logprobs=0)))
    assert short == Answer(finish_reason=FinishReason.LENGTH)
    with pytest.raises(ContextLengthError):
        engine.run((prompt(1, MAX_LEN + 1), SamplingParams(max_tokens=0)))
    with pytest.raises(ContextLengthError):
        engine.run((prompt(1, MAX_LEN), SamplingParams(max_tokens=None)))


def test_a_great_bias_decides_and_changes_no_reported_probability() -> None:
    engine = Engine()
    for sampling in (
        SamplingParams(temperature=0, logit_bias={9: 100.0}, max_tokens=4, logprobs=3),
        SamplingParams(seed=1, logit_bias={9: 100.0}, repetition_penalty=1.5, max_tokens=4, logprobs=3),
    ):
        [biased] = engine.run((prompt(1, 6), sampling))
        assert biased.token_ids == [9] * 4
        assert all(position.rank > 1 for position in biased.logprobs)


def test_no_token_outside_those_that_are_allowed(expected: list[Answer]) -> None:
    assert set(expected[1].token_ids) <= {1, 2, 3, 40, 63}
    assert len(set(expected[1].token_ids)) > 1


def test_bad_words_end_before_their_last_token(expected: list[Answer]) -> None:
    def has(word: tuple[int, ...], output: list[int]) -> bool:
        return any(tuple(output[i : i + len(word)]) == word for i in range(len(output)))

    output = expected[2].token_ids
    assert not any(has(word, output) for word in ((9,), (11, 12), (1, 2, 3)))
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [said] = Engine().run((prompt(1, 6), free))
    # Whatever it says, it cannot say once it is forbidden; and its beginning it can.
    for length in (1, 2, 3, 4):
        word = tuple(said.token_ids[2 : 2 + length])
        [other] = Engine().run((prompt(1, 6), SamplingParams(temperature=0, bad_words=(word,), max_tokens=12)))
        assert other.token_ids[: 1 + length] == said.token_ids[: 1 + length]
        assert other.token_ids[1 + length] != said.token_ids[1 + length]
    [unheard] = Engine().run(
        (
            prompt(1, 6),
            SamplingParams(
                temperature=0, max_tokens=12, ignore_eos=True, bad_words=((prompt(1, 6)[-1], said.token_ids[0]),)
            ),
        )
    )
    assert unheard == said, "the prompt is not part of a bad word"


def test_nothing_ends_the_sequence_before_its_least_length(expected: list[Answer]) -> None:
    answer = expected[3]
    stops = set(range(40))
    assert len(answer.token_ids) > 12
    assert not stops & set(answer.token_ids[:12])
    assert answer.token_ids[-1] in stops
    assert answer.finish_reason is FinishReason.STOP
    always_eos = SamplingParams(temperature=0, logit_bias={EOS: 100}, min_tokens=3, max_tokens=9)
    [ended] = Engine().run((prompt(1, 6), always_eos))
    assert len(ended.token_ids) == 4
    assert ended.token_ids[-1] == EOS


def test_a_row_whose_mask_leaves_nothing_fails_alone() -> None:
    nothing = SamplingParams(allowed_token_ids=(EOS,), min_tokens=2, max_tokens=9, prompt_logprobs=0)
    words = SamplingParams(allowed_token_ids=(7, 8), bad_words=((7, 7), (7, 8), (8,)), max_tokens=9)
    usual = SamplingParams(seed=5, max_tokens=6, ignore_eos=True)
    [alone] = Engine().run((prompt(2, 8), usual))
    first, second, third = Engine().run((prompt(1, 8), nothing), (prompt(2, 8), usual), (prompt(3, 8), words))
    assert second == alone
    for failed in (first, third):
        assert failed.finish_reason is FinishReason.ERROR
        assert failed.error == "allowed_token_ids, bad_words and min_tokens together allow no next token"
        assert failed.error_code == "refused", "the request asked for it"
    assert third.token_ids == [7]
    [single] = Engine().run((prompt(1, 8), nothing))
    assert single.finish_reason is FinishReason.ERROR, "also when it is alone in its step"


def test_unusable_logits_of_a_prompt_fail_its_request_alone() -> None:
    class Broken(HashExecutor):
        """What it says behind position 3 of a prompt that begins with 7 is no number."""

        def forward(self, batch: ForwardBatch) -> Float32Array:
            logits = super().forward(batch)
            for i, token in enumerate(batch.logit_tokens):
                row = int(np.searchsorted(batch.query_start, token, side="right")) - 1
                if batch.positions[token] == 3 and self._kv[batch.block_table[row, 0] * BLOCK, 0] == 7:
                    logits[i] = np.nan
            return logits

    scored = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1)
    good, bad = Engine(Broken(VOCAB)).run((prompt(2, 9), scored), (prompt(1, 9), scored))
    assert [good] == Engine().run((prompt(2, 9), scored))
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.error == "the model returned unusable logits (NaN or infinite) for request r1"
    assert bad.token_ids == []


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"stop_token_ids": (3, VOCAB)}, "stop_token_ids"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (VOCAB,)}, "allowed_token_ids"),
        ({"bad_words": ((1, 2), (VOCAB, 1))}, "bad_words"),
        ({"min_tokens": MAX_LEN}, "min_tokens"),
    ],
)
def test_what_the_model_does_not_have_is_refused_by_name(sampling: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        Engine().run((prompt(1, 4), SamplingParams(**sampling)))
    assert caught.value.param == param
