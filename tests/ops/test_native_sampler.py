"""The native sampler against the one in numpy: the same tokens and the same log-probabilities, to the last bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.core.plan import Admitted
from noria.ops.native import why_unavailable
from noria.ops.native_sampler import NativeSampler
from noria.runner.executor import NOTHING_ALLOWED, UNUSABLE, Float32Array, StepConstraints
from noria.runner.sampler import NumpySampler
from runner.building import admitted, no_biases, params_of, rows_of, sample, sampling_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

if (why_not := why_unavailable()) is not None:
    pytest.skip(why_not, allow_module_level=True)

from noria.ops import _native

SAMPLER = NativeSampler(_native.ExecutorF32(3, False))

SAMPLING = st.fixed_dictionaries(
    {
        "temperature": st.one_of(st.sampled_from((0.0, 9e-6, 1e-5, 1.0, 2.0)), st.floats(1e-5, 2.0)),
        "top_k": st.one_of(st.sampled_from((-1, 0, 1, 2, 50, 256, 257, 2**40)), st.integers(1, 6000)),
        "top_p": st.one_of(st.sampled_from((1.0, 5e-324, 1 - 2.0**-53, 0.5)), st.floats(1e-6, 1.0)),
        "min_p": st.one_of(st.sampled_from((0.0, 1.0, 5e-324)), st.floats(0.0, 1.0), st.floats(0.0, 1e-6)),
        "repetition_penalty": st.sampled_from((1.0, 1.0, 1.3, 0.5, 5e-324, 100.0)),
        "presence_penalty": st.sampled_from((0.0, 0.0, 0.7, -2.0)),
        "frequency_penalty": st.sampled_from((0.0, 0.0, 0.3, -2.0)),
        "seed": st.integers(0, 2**64 - 1),
        "index": st.integers(0, 2**32 - 1),
        "logprobs": st.sampled_from((None, 0, 1, 20)),
    }
)


def random_logits(rng: np.random.Generator, kind: str, size: int) -> Float32Array:
    match kind:
        case "flat":
            values = rng.normal(0, 0.3, size)
        case "peaked":
            values = rng.normal(0, 4, size)
        case "ties":
            values = rng.integers(-3, 3, size) / 4 * rng.choice([-1.0, 1.0], size)  # zeros of both signs too
        case "equal":
            values = np.full(size, rng.choice([0.0, -0.0, 7.5, -3e38]))
        case "masked":
            values = np.where(rng.random(size) < 0.9, -np.inf, rng.normal(0, 2, size))
            values[rng.integers(size)] = 0
        case "huge":
            values = rng.choice([3e38, -3e38, 1e-45, 0.0, 50.0, -np.inf], size)
            values[rng.integers(size)] = 3e38
        case "unusable":
            values = rng.normal(0, 1, size)
            values[rng.integers(size)] = rng.choice([np.nan, np.inf])
        case _:
            values = np.full(size, -np.inf)
    return values.astype(np.float32)


KINDS = ("flat", "peaked", "ties", "equal", "masked", "huge", "unusable", "empty")


def assert_equal(
    logits: Float32Array, rows: list[Admitted], tokens: Sequence[Any], constraints: StepConstraints | None = None
) -> None:
    before = logits.copy()
    found = sample(logits, rows, tokens, SAMPLER, constraints)
    expected = sample(logits, rows, tokens, None, constraints)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.logprobs == expected.logprobs  # == of floats: no tolerance
    np.testing.assert_array_equal(logits, before)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), SAMPLING), min_size=1, max_size=5),
    st.sampled_from((1, 2, 15, 16, 17, 33, 1000, 1024, 4095, 4096, 5003, 9000)),
    st.integers(0, 2**32 - 1),
)
def test_the_reference_to_the_last_bit(kinds: list[tuple[str, dict[str, Any]]], size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = np.stack([random_logits(rng, kind, size) for kind, _ in kinds])
    tokens = [(rng.integers(0, size, rng.integers(1, 9)).tolist(), rng.integers(0, size, 6).tolist()) for _ in kinds]
    assert_equal(logits, [admitted(**sampling) for _, sampling in kinds], tokens)


@pytest.mark.parametrize("kind", ["flat", "peaked", "ties"])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
        {"top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.02},
        {"top_k": 3000, "top_p": 0.7},
        {"temperature": 0.0, "frequency_penalty": 0.5},
    ],
)
def test_many_rows_of_a_whole_vocabulary(kind: str, sampling: dict[str, Any]) -> None:
    rng = np.random.default_rng(17)
    logits = np.stack([random_logits(rng, kind, 49_152) for _ in range(40)])
    rows = [admitted(seed=seed, logprobs=seed % 3 * 10 if seed % 2 else None, **sampling) for seed in range(40)]
    tokens = [(rng.integers(0, 49_152, 700).tolist(), rng.integers(0, 49_152, seed).tolist()) for seed in range(40)]
    assert_equal(logits, rows, tokens)


def random_constraints(rng: np.random.Generator, num_rows: int, size: int, share: float) -> StepConstraints:
    """Masks of which one may allow nothing, and biases for some of the rows."""
    bits = np.zeros((num_rows, -(-size // 32) * 32), dtype=np.uint8)
    bits[:, :size] = rng.random((num_rows, size)) < share
    counts = rng.integers(0, min(size, 20) + 1, num_rows) * rng.integers(0, 2, num_rows)
    biased_ids = [rng.choice(size, count, replace=False) for count in counts]
    return StepConstraints(
        masks=np.packbits(bits, axis=1, bitorder="little").view(np.uint32),
        mask_of_row=rng.integers(-1, num_rows, num_rows).astype(np.int32),
        bias_start=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        bias_ids=np.concatenate(biased_ids).astype(np.int32),
        biases=rng.uniform(-100, 100, counts.sum()).astype(np.float32),
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), SAMPLING), min_size=1, max_size=5),
    st.sampled_from((1, 2, 15, 31, 32, 33, 1000, 5003)),
    st.sampled_from((0.0, 0.001, 0.5, 1.0)),
    st.integers(0, 2**32 - 1),
)
def test_the_reference_to_the_last_bit_with_biases_and_masks(
    kinds: list[tuple[str, dict[str, Any]]], size: int, share: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = np.stack([random_logits(rng, kind, size) for kind, _ in kinds])
    tokens = [(rng.integers(0, size, 3).tolist(), rng.integers(0, size, 6).tolist()) for _ in kinds]
    constraints = random_constraints(rng, len(kinds), size, share)
    assert_equal(logits, [admitted(**sampling) for _, sampling in kinds], tokens, constraints)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6), st.sampled_from((1, 33, 5003)), st.integers(0, 999))
def test_given_tokens_have_the_log_probabilities_of_the_reference(kinds: list[str], size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = np.stack([random_logits(rng, kind, size) for kind in kinds])
    token_ids = rng.integers(0, size, len(kinds)).astype(np.int32)
    num_top = rng.integers(0, 21, len(kinds)).astype(np.int32)
    found = SAMPLER.score(logits, token_ids, num_top)
    assert found == NumpySampler().score(logits, token_ids, num_top)
    assert [score is None for score in found] == [kind in ("unusable", "empty") for kind in kinds]


def test_a_mask_does_not_change_the_reported_probabilities() -> None:
    logits = np.array([[0.0, 3.0, 1.0]], dtype=np.float32)
    constraints = no_biases(np.array([[0b101]], dtype=np.uint32), [0])
    for sampler in (SAMPLER, None):
        found = sample(logits, [admitted(temperature=0, logprobs=3)], None, sampler, constraints)
        assert found.token_ids.tolist() == [2]
        assert found.logprobs[0].rank == 2
        assert [token_id for token_id, _ in found.logprobs[0].top] == [1, 2, 0]


def test_a_mask_that_allows_nothing_costs_its_row_alone() -> None:
    constraints = no_biases(np.array([[0b111], [0]], dtype=np.uint32), [0, 1])
    for sampler in (SAMPLER, None):
        rows = [admitted(logprobs=1), admitted(logprobs=1)]
        found = sample(np.zeros((2, 3), dtype=np.float32), rows, None, sampler, constraints)
        assert found.token_ids[0] >= 0
        assert found.token_ids[1] == NOTHING_ALLOWED
        assert list(found.logprobs) == [0]


def test_neighbours_and_threads_change_nothing() -> None:
    rng = np.random.default_rng(8)
    logits = np.stack([random_logits(rng, KINDS[i % 7], 5003) for i in range(28)])
    rows = [admitted(seed=i, top_p=0.9, repetition_penalty=1 + i % 2 / 4, logprobs=3) for i in range(28)]
    tokens = [(rng.integers(0, 5003, 30).tolist(), rng.integers(0, 5003, 9).tolist()) for _ in rows]
    batch = sampling_batch(params_of(*rows), tokens)
    together = SAMPLER.sample(logits, batch)
    for threads in (1, 2, 5):
        other = NativeSampler(_native.ExecutorF32(threads, False)).sample(logits, batch)
        assert other.token_ids.tolist() == together.token_ids.tolist()
        assert other.logprobs == together.logprobs
    for i in range(28):
        alone = SAMPLER.sample(logits[i : i + 1], rows_of(batch, [i]))
        assert alone.token_ids[0] == together.token_ids[i]
        assert (together.token_ids[i] == UNUSABLE) == (i % 7 == 6)
        assert alone.logprobs.get(0) == together.logprobs.get(i)


def bad(**changes: Any) -> dict[str, Any]:
    """Arguments of a native call that would be good without the changes."""
    return {
        "logits": np.zeros((2, 40), dtype=np.float32),
        "params": params_of(admitted(logprobs=2), admitted(repetition_penalty=2.0)).view(np.uint8).reshape(2, -1),
        "token_ids": np.zeros((3, 5), dtype=np.int32),
        "table_rows": np.array([0, 2]),
        "num_tokens": np.array([1, 5], dtype=np.int32),
        "num_prompt_tokens": np.array([1, 3], dtype=np.int32),
        "chosen": np.zeros(2, dtype=np.int32),
        "logprobs": np.zeros(2),
        "ranks": np.zeros(2, dtype=np.int32),
        "top_ids": np.zeros((2, 2), dtype=np.int32),
        "top_logprobs": np.zeros((2, 2)),
        "masks": np.full((1, 2), 2**32 - 1, dtype=np.uint32),
        "mask_of_row": np.array([0, -1], dtype=np.int32),
        "bias_start": np.array([0, 1, 3], dtype=np.int32),
        "bias_ids": np.array([39, 0, 5], dtype=np.int32),
        "biases": np.ones(3, dtype=np.float32),
    } | changes


def test_good_arguments_are_taken() -> None:
    SAMPLER._native.sample(**bad())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.full((3, 5), 40, dtype=np.int32)}, "token id is outside"),
        ({"token_ids": np.full((3, 5), -1, dtype=np.int32)}, "token id is outside"),
        ({"table_rows": np.array([0, 3])}, "outside the table"),
        ({"table_rows": np.array([-1, 0])}, "outside the table"),
        ({"num_tokens": np.array([1, 6], dtype=np.int32)}, "more tokens than the table"),
        ({"num_tokens": np.array([1, 2], dtype=np.int32)}, "fewer than its prompt"),
        ({"num_prompt_tokens": np.array([1, -1], dtype=np.int32)}, "fewer than its prompt"),
        ({"mask_of_row": np.array([1, 0], dtype=np.int32)}, "mask is not there"),
        ({"mask_of_row": np.array([0, -2], dtype=np.int32)}, "mask is not there"),
        ({"masks": np.zeros((1, 1), dtype=np.uint32)}, "one bit for each token"),
        ({"masks": None}, "one bit for each token"),
        ({"top_ids": np.zeros((2, 1), dtype=np.int32)}, "as many probable tokens"),
        ({"logprobs": np.zeros(1)}, "one entry for each row"),
        ({"ranks": np.zeros(1, dtype=np.int32)}, "one entry for each row"),
        ({"mask_of_row": np.zeros(1, dtype=np.int32)}, "one entry for each row"),
        ({"top_ids": np.zeros((2, 1), dtype=np.int32), "top_logprobs": np.zeros((2, 1))}, "more probable tokens than"),
        ({"chosen": np.zeros(1, dtype=np.int32)}, "one entry for each row"),
        ({"bias_ids": np.array([0, 40, 5], dtype=np.int32)}, "a bias is for a token outside"),
        ({"bias_ids": np.array([0, -1, 5], dtype=np.int32)}, "a bias is for a token outside"),
        ({"bias_start": np.array([0, 4, 3], dtype=np.int32)}, "biases must follow"),
        ({"bias_start": np.array([0, 1, 4], dtype=np.int32)}, "biases and rows do not add up"),
        ({"bias_start": np.array([1, 1, 3], dtype=np.int32)}, "biases and rows do not add up"),
        ({"bias_start": np.array([0, 3], dtype=np.int32)}, "biases begin and end for each row"),
        ({"biases": np.ones(2, dtype=np.float32)}, "each has a token"),
        ({"bias_ids": None}, "each has a token"),
        ({"chosen": np.array([0, 40], dtype=np.int32), "chosen_is_given": True}, "given token is outside"),
        ({"chosen": np.array([-1, 0], dtype=np.int32), "chosen_is_given": True}, "given token is outside"),
        ({"params": np.zeros((2, 8), dtype=np.uint8)}, "another size"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SAMPLER._native.sample(**bad(**changes))
