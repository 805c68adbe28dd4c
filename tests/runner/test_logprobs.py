"""Log-probabilities against float64, rank and order on ties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.runner.logprobs import token_logprobs


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=40), st.integers(0, 20), st.data())
def test_equals_a_float64_log_softmax(values: list[float], num_top: int, data: st.DataObject) -> None:
    token_id = data.draw(st.integers(0, len(values) - 1))
    found = token_logprobs(np.array(values, dtype=np.float32), token_id, num_top)
    log_total = max(values) + math.log(math.fsum(math.exp(v - max(values)) for v in values))
    assert found.token_id == token_id
    assert found.logprob == pytest.approx(values[token_id] - log_total, abs=2e-6)
    assert found.rank == 1 + sum(v > values[token_id] for v in values)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:num_top]
    assert [i for i, _ in found.top] == order
    assert [p for _, p in found.top] == pytest.approx([values[i] - log_total for i in order], abs=2e-6)


def test_a_long_vocabulary_with_ties_lists_the_lower_ids() -> None:
    scores = np.zeros(50_000, dtype=np.float32)
    scores[[40_000, 7, 300]] = 2.0
    found = token_logprobs(scores, 300, 5)
    assert [token_id for token_id, _ in found.top] == [7, 300, 40_000, 0, 1]
    assert found.rank == 1
    assert found.logprob == pytest.approx(2 - math.log(3 * math.exp(2) + 49_997), abs=1e-6)
    assert token_logprobs(scores, 0, 0).rank == 4
