"""Faults that users of other servers ran into with seeds and least lengths: `docs/field_reports.md`, F."""

from __future__ import annotations

from typing import Any

import pytest

from noria.core.events import FinishReason
from noria.sampling import SamplingParams
from support.hash_engine import Engine, prompt

DRAWN: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.02, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 2.0, "logit_bias": {3: 1.5}, "allowed_token_ids": tuple(range(48))},
)


def drawn(i: int, seed: int | None) -> tuple[list[int], SamplingParams]:
    sampling = SamplingParams(seed=seed, max_tokens=12, ignore_eos=True, logprobs=1, **DRAWN[i % len(DRAWN)])
    return prompt(i, 3 + 2 * i), sampling


@pytest.mark.parametrize("kind", range(len(DRAWN)))
@pytest.mark.parametrize("neighbour_seed", [None, 42, 7, -1], ids=["none", "the same", "another", "negative"])
def test_f1_a_seeded_answer_does_not_depend_on_the_seeds_of_its_neighbours(
    kind: int, neighbour_seed: int | None
) -> None:
    """Also when the neighbour comes first, and so draws first in every step."""
    seeded, neighbour = drawn(kind, 42), drawn(kind + 1, neighbour_seed)
    [alone] = Engine().run(seeded)
    assert len(set(alone.token_ids)) > 3, "else the comparison would say little"
    assert Engine().run(seeded, neighbour)[0] == alone
    assert Engine().run(neighbour, seeded)[1] == alone


@pytest.mark.parametrize("kind", range(len(DRAWN)))
def test_f3_a_seed_gives_the_same_answer_each_time_alone_and_in_a_crowd(kind: int) -> None:
    """Five times by one engine, which draws for others meanwhile; with the seed or the prompt changed, another."""
    engine = Engine()
    answers = []
    for turn in range(5):
        crowd = [drawn(i, None) for i in range(8)] if turn % 2 else []
        answers.append(engine.run(*crowd[:4], drawn(kind, 42), *crowd[4:])[len(crowd[:4])])
    assert answers == [answers[0]] * 5
    others = [engine.run(drawn(kind, seed))[0].token_ids for seed in (43, None, None)]
    assert len({tuple(ids) for ids in [answers[0].token_ids, *others]}) == 4


@pytest.mark.parametrize("wanted", [5, 9, 17])
@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5])
@pytest.mark.parametrize("num_neighbours", [0, 3])
def test_f6_every_token_that_ends_an_answer_waits_for_its_least_length(
    wanted: int, min_tokens: int, num_neighbours: int
) -> None:
    """Two ends of sequence and a stop token of the request's own; the model wants one of them at once."""
    sampling = SamplingParams(
        temperature=0, logit_bias={wanted: 100}, stop_token_ids=(17,), min_tokens=min_tokens, max_tokens=9
    )
    neighbours = [drawn(i, i) for i in range(num_neighbours)]
    answer, *_ = Engine(eos_token_ids=(5, 9)).run((prompt(1, 6), sampling), *neighbours)
    assert len(answer.token_ids) == min_tokens + 1
    assert not {5, 9, 17} & set(answer.token_ids[:-1])
    assert (answer.token_ids[-1], answer.finish_reason) == (wanted, FinishReason.STOP)
