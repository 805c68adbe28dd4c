"""Tokens against a naive sampler, rows against their neighbours, ties, and the edges of every parameter."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from noria.runner.executor import UNUSABLE
from noria.runner.exponential import token_weights, weight_scale
from noria.runner.filters import largest, nucleus, pick
from noria.runner.sampler import NumpySampler
from noria.sampling import SamplingParams
from runner import oracle
from runner.building import admitted, params_of, rows_of, sample, sampling_batch

VOCAB = 24
# Multiples of 1/4 make many exact ties, and are exact in both float32 and float64.
LOGITS = st.lists(st.integers(-24, 24), min_size=VOCAB, max_size=VOCAB).map(
    lambda values: np.array(values, dtype=np.float32) / 4
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(0.05, 2.0)),
    top_k=st.integers(-1, VOCAB + 2),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    repetition_penalty=st.sampled_from((1.0, 1.0, 2.0, 0.5)),
    presence_penalty=st.sampled_from((0.0, 0.0, 1.25, -0.5)),
    frequency_penalty=st.sampled_from((0.0, 0.0, 0.75, -0.25)),
)
# float32 weights are within about 1e-5 of their float64 values (the exponent reaches 240); nearer to a border than
# that, the two samplers may rightly differ.
MARGIN = 5e-5


@settings(max_examples=250, deadline=None)
@given(LOGITS, TOKENS, TOKENS, SAMPLING, st.integers(0, 2**64 - 1))
def test_same_token_as_the_naive_sampler(
    logits: np.ndarray, prompt: list[int], output: list[int], sampling: SamplingParams, seed: int
) -> None:
    scores = oracle.penalise(logits.tolist(), prompt, output, sampling)
    if sampling.is_greedy:
        expected = scores.index(max(scores))
    else:
        choice = oracle.choose(scores, sampling)
        expected, distance = choice.pick(oracle.uniform(seed, len(output), 3))
        assume(choice.margin > MARGIN)
        assume(distance > MARGIN)
    row = msgspec.structs.replace(admitted(seed=seed, index=3), sampling=sampling)
    before = logits.copy()
    found = sample(logits[None], [row], [(prompt, output)])
    assert found.token_ids.tolist() == [expected]
    assert (logits == before).all(), "the raw logits are still needed for logprobs"


KINDS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 300, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "top_p": 0.9},
)


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    """All kinds of rows side by side, on a vocabulary long enough for every narrowing pass, in two orders."""
    rng = np.random.default_rng(5)
    rows = [admitted(f"r{i}", seed=i, index=i % 2, **KINDS[i % len(KINDS)]) for i in range(24)]
    # Large sigma: peaked rows; small: rows where top-p keeps thousands. A non-multiple of any group size.
    logits = (rng.normal(0, 1, (24, 5003)) * rng.choice([0.5, 3.0], (24, 1))).astype(np.float32)
    tokens = [(rng.integers(0, 5003, 20).tolist(), rng.integers(0, 5003, 10 + i).tolist()) for i in range(24)]
    batch, sampler = sampling_batch(params_of(*rows), tokens), NumpySampler()

    together = sampler.sample(logits, batch).token_ids.tolist()
    alone = [sampler.sample(logits[i : i + 1], rows_of(batch, [i])).token_ids.item() for i in range(24)]
    order = rng.permutation(24).tolist()
    shuffled = sampler.sample(logits[order], rows_of(batch, order)).token_ids.tolist()
    assert together == alone
    assert shuffled == [together[i] for i in order]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9000), st.sampled_from((1, 40, 10**6)), st.data())
def test_largest_is_a_sorted_prefix_with_low_ids_first(
    seed: int, size: int, distinct: int, data: st.DataObject
) -> None:
    values = np.random.default_rng(seed).integers(0, distinct, size).astype(np.float32)
    count = data.draw(st.one_of(st.integers(1, min(size, 300)), st.integers(1, size)))
    order = np.lexsort((np.arange(size), -values))
    assert largest(values, count).tolist() == sorted(order[:count].tolist())


@pytest.mark.parametrize("size", [4096, 5003, 49_152])
@pytest.mark.parametrize("count", [1, 2, 5, 50, 256, 257, 4000])
def test_largest_of_a_long_row_without_ties(size: int, count: int) -> None:
    values = np.random.default_rng(count).permutation(size).astype(np.float32)
    assert largest(values, count).tolist() == np.flatnonzero(values >= size - count).tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9000), st.floats(0.1, 6.0), st.floats(0.001, 0.9999))
def test_nucleus_is_the_shortest_prefix_that_reaches_top_p(seed: int, size: int, spread: float, top_p: float) -> None:
    weights = np.exp(-spread * np.random.default_rng(seed).exponential(1.0, size)).astype(np.float32)
    order = np.lexsort((np.arange(size), -weights))
    sums = np.cumsum(weights[order], dtype=np.float64)
    kept = nucleus(weights, top_p)
    assert kept.tolist() == sorted(order[: len(kept)].tolist())
    wanted, slack = top_p * sums[-1], 1e-9 * sums[-1]
    assert sums[len(kept) - 1] >= wanted - slack
    assert len(kept) == 1 or sums[len(kept) - 2] < wanted + slack


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9000), st.floats(0.0, 1.0), st.sampled_from((0.1, 5.0, 60.0)))
def test_pick_takes_the_first_whose_running_sum_exceeds(seed: int, size: int, empty: float, spread: float) -> None:
    rng = np.random.default_rng(seed)
    weights = np.rint(2.0**39 * np.exp(-spread * rng.exponential(1.0, size))).astype(np.float32)
    weights[rng.random(size) < empty] = 0
    weights[rng.integers(size)] = 2.0**39
    running = np.cumsum(weights, dtype=np.float64)
    borders = running[rng.integers(0, size, 20)] / running[-1]  # a number that sits on a border belongs to the next
    for u in [0.0, 1 - 2.0**-53, *rng.random(20), *borders[borders < 1]]:
        place = pick(weights, float(u))
        assert running[place] > u * running[-1]
        assert place == 0 or running[place - 1] <= u * running[-1]


@pytest.mark.parametrize("temperature", [1e-5, 0.3, 1.0, 2.0])
def test_weights_are_whole_and_close_to_the_exponential(temperature: float) -> None:
    scores = -np.random.default_rng(2).exponential(5.0, 100_000).astype(np.float32) * np.float32(temperature)
    scores[:3] = 0, -np.inf, -3e38
    scale = weight_scale(len(scores))
    weights = token_weights(scores, 0.0, temperature, 0.0, scale)
    assert (weights == np.rint(weights)).all()
    assert weights[:3].tolist() == [scale, 0, 0]
    with np.errstate(over="ignore"):
        exact = np.exp((scores / np.float32(temperature)).astype(np.float64)) * scale
    assert (np.abs(weights - exact) <= 0.5 + 2 * 2.0**-23 * exact).all()


def test_sums_of_weights_are_exact_in_any_order() -> None:
    for size in (1, 2, 255, 256, 49_152):
        weights = token_weights(np.zeros(size, dtype=np.float32), 0.0, 1.0, 0.0, weight_scale(size))
        assert weights.sum(dtype=np.float64) + 1 <= 2.0**53
    rng = np.random.default_rng(3)
    weights = token_weights(-rng.exponential(4.0, 49_152).astype(np.float32), 0.0, 1.0, 0.0, weight_scale(49_152))
    exact = sum(map(int, weights.tolist()))
    for _ in range(20):
        assert int(np.cumsum(rng.permutation(weights), dtype=np.float64)[-1]) == exact


def test_greedy_takes_the_lowest_id_on_ties_and_ignores_filters() -> None:
    logits = np.array([[0.0, 3.0, 1.0, 3.0]], dtype=np.float32)
    row = admitted(temperature=9e-6, top_k=1, top_p=0.1, min_p=1.0)
    assert sample(logits, [row]).token_ids.tolist() == [1]


@pytest.mark.parametrize("kind", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_the_tightest_filter_leaves_the_best_token(kind: dict[str, float]) -> None:
    logits = np.tile(np.array([0.0, 2.0, 5.0, 4.9], dtype=np.float32), (50, 1))
    rows = [admitted(seed=seed, temperature=2.0, **kind) for seed in range(50)]
    assert sample(logits, rows).token_ids.tolist() == [2] * 50


def test_parameters_at_their_bounds_neither_warn_nor_leave_the_vocabulary() -> None:
    rows = [
        admitted(top_k=2**63 - 1, seed=2**200 + 5),
        admitted(seed=-1, temperature=1e-5),
        admitted(repetition_penalty=5e-324, temperature=2.0),
        admitted(repetition_penalty=100.0, presence_penalty=-2.0, frequency_penalty=-2.0, temperature=1e-5),
        admitted(top_p=5e-324, min_p=5e-324),
        admitted(top_p=1 - 2.0**-53),
    ]
    logits = np.tile(np.array([3e38, -3e38, 0.0, 1e-30, -np.inf], dtype=np.float32), (len(rows), 1))
    found = sample(logits, rows, [([0, 1], [2, 3, 4])] * len(rows))
    assert all(0 <= token_id < 4 for token_id in found.token_ids.tolist())


def test_a_masked_token_is_never_drawn() -> None:
    logits = np.tile(np.array([-np.inf, 0.0, -np.inf, 0.0], dtype=np.float32), (200, 1))
    found = sample(logits, [admitted(seed=seed, top_k=3) for seed in range(200)])
    assert set(found.token_ids.tolist()) == {1, 3}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"repetition_penalty": 2.0, "top_p": 0.5}])
def test_unusable_logits_cost_their_row_alone(bad: float, sampling: dict[str, float]) -> None:
    logits = np.zeros((3, 4), dtype=np.float32)
    logits[1, 2] = bad
    found = sample(logits, [admitted(logprobs=2, **sampling)] * 3)
    assert found.token_ids[1] == UNUSABLE
    assert found.token_ids[0] == found.token_ids[2] != UNUSABLE
    assert sorted(found.logprobs) == [0, 2]


def test_a_row_of_nothing_but_minus_infinity_is_unusable() -> None:
    found = sample(np.full((1, 4), -np.inf, dtype=np.float32), [admitted()])
    assert found.token_ids.tolist() == [UNUSABLE]
