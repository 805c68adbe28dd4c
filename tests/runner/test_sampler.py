"""Tokens against a naive sampler, rows against their neighbours, ties, and the edges of every parameter."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from noria.errors import EngineError
from noria.runner.filters import largest, nucleus, pick
from noria.runner.penalties import TokenCounts, has_penalties
from noria.runner.sampler import sample
from noria.sampling import SamplingParams
from runner import oracle
from runner.building import admitted, params_of

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


def counts_of(prompt: list[int], output: list[int], sampling: SamplingParams) -> TokenCounts | None:
    return TokenCounts(np.array(prompt + output, dtype=np.int32), len(prompt)) if has_penalties(sampling) else None


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
    counts = counts_of(prompt, output, sampling)
    found = sample(logits[None], params_of(row), np.array([len(output)]), [counts], ["r"])
    assert found == [expected]
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
    positions = rng.integers(0, 1000, 24)
    tokens = [rng.integers(0, 5003, 50).astype(np.int32) for _ in rows]
    counts = [TokenCounts(t, 20) if has_penalties(r.sampling) else None for t, r in zip(tokens, rows, strict=True)]
    params = params_of(*rows)
    names = [r.request_id for r in rows]

    together = sample(logits, params, positions, counts, names)
    alone = [
        sample(logits[i : i + 1], params[i : i + 1], positions[i : i + 1], [counts[i]], [names[i]])[0]
        for i in range(24)
    ]
    order = rng.permutation(24)
    shuffled = sample(logits[order], params[order], positions[order], [counts[i] for i in order], names)
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
@given(st.integers(0, 2**32 - 1), st.integers(4096, 9000), st.floats(0.0, 1.0), st.sampled_from((0.1, 5.0, 60.0)))
def test_pick_by_blocks_equals_one_running_sum(seed: int, size: int, empty: float, spread: float) -> None:
    rng = np.random.default_rng(seed)
    weights = np.exp(-spread * rng.exponential(1.0, size)).astype(np.float32)
    weights[rng.random(size) < empty] = 0
    weights[rng.integers(size)] = 1
    running = np.cumsum(weights, dtype=np.float64)
    borders = running[rng.integers(0, size, 20)] / running[-1]  # numbers that sit on a border exercise the fallback
    for u in [0.0, 1 - 2.0**-53, *rng.random(20), *borders[borders < 1]]:
        place = pick(weights, float(u))
        assert running[place] > u * running[-1]
        assert place == 0 or running[place - 1] <= u * running[-1]


def test_greedy_takes_the_lowest_id_on_ties_and_ignores_filters() -> None:
    logits = np.array([[0.0, 3.0, 1.0, 3.0]], dtype=np.float32)
    params = params_of(admitted(temperature=9e-6, top_k=1, top_p=0.1, min_p=1.0))
    assert sample(logits, params, np.array([0]), [None], ["r"]) == [1]


@pytest.mark.parametrize("kind", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_the_tightest_filter_leaves_the_best_token(kind: dict[str, float]) -> None:
    logits = np.tile(np.array([0.0, 2.0, 5.0, 4.9], dtype=np.float32), (50, 1))
    params = params_of(*(admitted(seed=seed, temperature=2.0, **kind) for seed in range(50)))
    assert sample(logits, params, np.zeros(50, dtype=int), [None] * 50, ["r"] * 50) == [2] * 50


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
    tokens = np.arange(5, dtype=np.int32)
    counts = [TokenCounts(tokens, 2) if has_penalties(row.sampling) else None for row in rows]
    found = sample(logits, params_of(*rows), np.zeros(len(rows), dtype=int), counts, ["r"] * len(rows))
    assert all(0 <= token_id < 4 for token_id in found)


def test_a_masked_token_is_never_drawn() -> None:
    logits = np.tile(np.array([-np.inf, 0.0, -np.inf, 0.0], dtype=np.float32), (200, 1))
    params = params_of(*(admitted(seed=seed, top_k=3) for seed in range(200)))
    found = sample(logits, params, np.zeros(200, dtype=int), [None] * 200, ["r"] * 200)
    assert set(found) == {1, 3}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_are_refused_with_the_request_named(bad: float, temperature: float) -> None:
    logits = np.zeros((3, 4), dtype=np.float32)
    logits[1, 2] = bad
    params = params_of(*(admitted(temperature=temperature) for _ in range(3)))
    with pytest.raises(EngineError, match=r"unusable logits .* request b$"):
        sample(logits, params, np.zeros(3, dtype=int), [None] * 3, ["a", "b", "c"])


def test_a_row_of_nothing_but_minus_infinity_is_refused() -> None:
    with pytest.raises(EngineError, match=r"request a$"):
        sample(np.full((1, 4), -np.inf, dtype=np.float32), params_of(admitted()), np.array([0]), [None], ["a"])


def test_penalty_counts_grow_past_their_first_room_and_equal_a_rebuild() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 400, 900).astype(np.int32)
    grown = TokenCounts(tokens[:100], 60)
    for token_id in tokens[100:].tolist():
        grown.add_output([token_id])
    rebuilt = TokenCounts(tokens, 60)
    assert grown.token_ids.tolist() == rebuilt.token_ids.tolist()
    assert grown.output_counts.tolist() == rebuilt.output_counts.tolist()
    assert grown.output_counts.sum() == 840
