"""The pool's size, the length it allows, and the sentence that explains both."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.config import EngineOptions
from noria.errors import OptionError
from noria.runner.kv_memory import KvPoolSize, format_bytes, size_kv_pool

GIB = 2**30
TOKEN_BYTES = 1024  # so a block of 16 tokens takes 16 KiB


def size(free_bytes: int = 8 * GIB, model_max_len: int = 2048, **options: int) -> KvPoolSize:
    return size_kv_pool(
        EngineOptions(**options), model_max_len=model_max_len, kv_bytes_per_token=TOKEN_BYTES, free_bytes=free_bytes
    )


def test_ample_memory_gives_max_num_seqs_full_sequences() -> None:
    pool = size(free_bytes=8 * GIB)
    assert (pool.num_blocks, pool.max_model_len) == (64 * 128, 2048)
    assert pool.explanation == (
        "KV pool: 8,192 blocks x 16 tokens = 131,072 tokens, 128 MiB, from 64 full-length sequences (max_num_seqs); "
        "room for 64 full-length sequences of 2,048 tokens"
    )


def test_scarce_memory_gives_half_of_it_with_the_null_block_counted() -> None:
    pool = size(free_bytes=64 * 2**20)
    assert (pool.num_blocks, pool.max_model_len) == (2048 - 1, 2048)
    assert pool.explanation == (
        "KV pool: 2,047 blocks x 16 tokens = 32,752 tokens, 32.0 MiB, from half of the 64.0 MiB that are free; "
        "room for 15 full-length sequences of 2,048 tokens"
    )


def test_a_pool_shorter_than_the_model_lowers_max_model_len_and_says_so() -> None:
    pool = size(free_bytes=2 * 2**20)
    assert (pool.num_blocks, pool.max_model_len) == (63, 1008)
    assert pool.explanation.endswith(
        "room for 1 full-length sequence of 1,008 tokens; "
        "max_model_len lowered from 2,048 (the model's) to 1,008, all that the pool holds"
    )


@pytest.mark.parametrize("sizing", [{"num_kv_blocks": 10}, {"kv_cache_memory_bytes": 11 * 16 * 1024 + 100}])
def test_an_explicit_size_is_obeyed_and_clamps_an_explicit_length(sizing: dict[str, int]) -> None:
    pool = size(max_model_len=500, **sizing)
    assert (pool.num_blocks, pool.max_model_len) == (10, 160)
    assert next(iter(sizing)) in pool.explanation
    assert "max_model_len lowered from 500 (as asked) to 160" in pool.explanation


def test_an_explicit_size_beyond_free_memory_is_obeyed_with_a_warning() -> None:
    pool = size(free_bytes=2**20, num_kv_blocks=1000)
    assert pool.num_blocks == 1000
    assert "more than the 1.00 MiB that are free" in pool.explanation


def test_both_sizes_at_once_are_refused() -> None:
    with pytest.raises(OptionError, match=r"num_kv_blocks and kv_cache_memory_bytes .* set one"):
        size(num_kv_blocks=10, kv_cache_memory_bytes=GIB)


def test_more_context_than_the_model_has_is_refused_with_both_numbers() -> None:
    with pytest.raises(OptionError, match="4096 is more than the 2048"):
        size(max_model_len=4096)


@pytest.mark.parametrize("options", [{"free_bytes": 0}, {"free_bytes": 40_000}, {"kv_cache_memory_bytes": 16 * 1024}])
def test_no_room_for_one_block_is_refused_with_the_fix(options: dict[str, int]) -> None:
    with pytest.raises(OptionError, match=r"less than the 32\.0 KiB of one block.*raise kv_cache_memory_bytes"):
        size(**options)


@given(
    free_bytes=st.integers(2**18, 2**36),
    model_max_len=st.integers(1, 200_000),
    block_size=st.integers(1, 64),
    max_num_seqs=st.integers(1, 300),
)
def test_the_default_stays_within_its_rule(
    free_bytes: int, model_max_len: int, block_size: int, max_num_seqs: int
) -> None:
    pool = size(free_bytes, model_max_len, block_size=block_size, max_num_seqs=max_num_seqs)
    block_bytes = block_size * TOKEN_BYTES
    full = max_num_seqs * -(-model_max_len // block_size)
    assert (pool.num_blocks + 1) * block_bytes <= free_bytes // 2 or pool.num_blocks == full
    assert pool.num_blocks <= full
    # As large as the rule allows: one more block breaks one of its two limits.
    assert pool.num_blocks == full or (pool.num_blocks + 2) * block_bytes > free_bytes // 2
    assert 1 <= pool.max_model_len <= min(model_max_len, pool.num_blocks * block_size)
    assert "\n" not in pool.explanation


def test_bytes_for_people() -> None:
    sizes = (0, 1023, 1024, 5 * 2**20, 123 * 2**20, 3 * GIB // 2, 200 * GIB)
    assert list(map(format_bytes, sizes)) == [
        "0 B", "1023 B", "1.00 KiB", "5.00 MiB", "123 MiB", "1.50 GiB", "200 GiB",
    ]  # fmt: skip


def hybrid(options: dict[str, Any], windows: tuple[int | None, ...], model_max_len: int = 4096) -> KvPoolSize:
    return size_kv_pool(
        EngineOptions(**options),
        model_max_len=model_max_len,
        kv_bytes_per_token=1000,
        free_bytes=2**34,
        kv_windows=windows,
    )


def test_full_length_sequences_take_less_with_windows() -> None:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    everywhere, hybrid_pool = hybrid(options, (None, None)), hybrid(options, (None, 128))
    assert everywhere.num_blocks == 4 * 2 * 256
    assert hybrid_pool.num_blocks == 4 * (256 + 13)  # 127 + 64 tokens lie in 12 blocks and, for their edges, one more
    assert "room for 4 full-length sequences" in hybrid_pool.explanation
    assert "2 groups of layers (1 with full attention, 1 with a window of 128 tokens)" in hybrid_pool.explanation


def test_the_longest_sequence_is_what_fits_with_its_windows() -> None:
    options = {"num_kv_blocks": 100, "max_num_batched_tokens": 64}
    assert hybrid(options, (None, 128)).max_model_len == (100 - 13) * 16
    assert hybrid(options, (128,)).max_model_len == 4096, "a model of windows only needs no more for longer sequences"
    with pytest.raises(OptionError, match="a token in each of the model's 3 groups"):
        hybrid({"num_kv_blocks": 2}, (None, 128, 128))
