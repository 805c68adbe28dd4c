"""Drawn frequencies against the processed probabilities: 100,000 draws for each filter and for combinations.

Seeds are fixed, so a test here passes always or never. When it was written, the odds that a right sampler would
fail were 1e-4 for each of the cases below: about one in a thousand for the file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from noria.runner.executor import SamplingBatch
from noria.runner.penalties import has_penalties
from noria.runner.sampler import NumpySampler
from runner import oracle
from runner.building import admitted, params_of

NUM_DRAWS = 100_000
VOCAB = 32
PROMPT, OUTPUT = [3, 5, 7, 7], [5, 9, 9, 9]
LOGITS = np.random.default_rng(11).normal(0, 1.5, VOCAB).astype(np.float32)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "penalties": {"repetition_penalty": 1.7, "presence_penalty": 0.8, "frequency_penalty": -0.6},
    "top_k and top_p, hot": {"temperature": 1.7, "top_k": 12, "top_p": 0.9},
    "everything": {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.97,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.3,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_match_the_probabilities(name: str) -> None:
    row = admitted(**CASES[name])
    expected = np.array(
        oracle.choose(oracle.penalise(LOGITS.tolist(), PROMPT, OUTPUT, row.sampling), row.sampling).probabilities
    )
    params = np.repeat(params_of(row), NUM_DRAWS)
    # Draws differ in all that a uniform depends on, seeds, positions and sequence indexes; the position is part of what
    # penalties count, so there it stays.
    draws = np.arange(NUM_DRAWS)
    positions = np.where(has_penalties(params), len(OUTPUT), draws % 500)
    params["seed"] = np.where(has_penalties(params), draws // 2, draws // 1000)
    params["index"] = np.where(has_penalties(params), draws % 2, draws // 500 % 2)
    known = np.zeros((1, 1000), dtype=np.int32)
    known[0, : len(PROMPT + OUTPUT)] = PROMPT + OUTPUT
    batch = SamplingBatch(
        params=params,
        token_ids=known,
        rows=np.zeros(NUM_DRAWS, dtype=np.intp),
        num_tokens=(len(PROMPT) + positions).astype(np.int32),
        num_prompt_tokens=np.full(NUM_DRAWS, len(PROMPT), dtype=np.int32),
    )
    tokens = NumpySampler().sample(np.broadcast_to(LOGITS, (NUM_DRAWS, VOCAB)), batch).token_ids

    drawn = np.bincount(tokens, minlength=VOCAB)
    assert not drawn[expected == 0].any(), "a token was drawn that the filters exclude"
    common = expected * NUM_DRAWS >= 5  # chi-square wants cells that are not nearly empty: the rest share one
    cells = np.append(drawn[common], drawn[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * NUM_DRAWS
    cells, wanted = cells[wanted > 0], wanted[wanted > 0]
    assert stats.chisquare(cells, wanted).pvalue > 1e-4
