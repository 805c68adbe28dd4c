"""How big the KV pool is, and why: a pure sizing rule (`free_memory_bytes` is offered here too).

Called by `noria.assembly` once at start-up, after the weights are loaded; nothing is allocated here. The rule: the
smaller of half of the free memory and `max_num_seqs` full-length sequences, unless the options name a size.
`max_model_len` is then lowered to what the pool can hold, so that a request that is accepted fits when it is alone.
What a sequence takes is `KVLayout`'s to say, here and in the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from noria.config import EngineOptions
from noria.errors import OptionError
from noria.kv_layout import KVLayout
from noria.runner.free_memory import free_memory_bytes

__all__ = ["KvPoolSize", "format_bytes", "free_memory_bytes", "longest_wanted", "size_kv_pool"]


@dataclass(frozen=True, slots=True)
class KvPoolSize:
    """The pool that was settled on. `num_blocks` does not count the null block; `explanation` is one line."""

    num_blocks: int
    max_model_len: int
    explanation: str
    is_beyond_memory: bool = False
    """It was asked for, and is more than what is free now."""


def size_kv_pool(
    options: EngineOptions,
    *,
    model_max_len: int,
    kv_bytes_per_token: int,
    free_bytes: int,
    kv_windows: tuple[int | None, ...] = (None,),
) -> KvPoolSize:
    """The KV pool for a model whose context is `model_max_len` tokens, `kv_bytes_per_token` for each in a block.

    `kv_windows`: of its groups of layers; there is a block for each. `free_bytes` is what is free after the weights.
    Raises `OptionError` when options exclude each other, when an explicit `max_model_len` is more than the model
    supports, or when there is no room for one block of each group.
    """
    wanted_len = longest_wanted(options, model_max_len)
    block_bytes = options.block_size * kv_bytes_per_token
    layout = KVLayout(options.block_size, kv_windows, options.max_num_batched_tokens)
    num_blocks, reason = _num_blocks(options, layout, wanted_len, block_bytes, free_bytes)
    max_model_len = layout.longest(num_blocks, wanted_len)
    if num_blocks > 0 and not max_model_len:
        raise OptionError(
            f"the KV pool of {num_blocks} blocks has no room for a token in each of the model's {layout.num_groups} "
            f"groups of layers; raise num_kv_blocks or kv_cache_memory_bytes"
        )
    if num_blocks < 1:
        raise OptionError(
            f"the KV pool has no room for a single block: {reason} is less than the {format_bytes(2 * block_bytes)} of "
            f"one block of {options.block_size} tokens and the null block; lower block_size, free memory, "
            f"or raise kv_cache_memory_bytes"
        )
    return KvPoolSize(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        explanation=_explain(options, layout, num_blocks, max_model_len, wanted_len, block_bytes, free_bytes, reason),
        is_beyond_memory=(num_blocks + 1) * block_bytes > free_bytes,
    )


def longest_wanted(options: EngineOptions, model_max_len: int) -> int:
    """The length of sequences that is asked for, or the model's. Raises `OptionError` if it is beyond the model's."""
    if options.max_model_len is None:
        return model_max_len
    if options.max_model_len > model_max_len:
        raise OptionError(
            f"max_model_len {options.max_model_len} is more than the {model_max_len} tokens that the model supports; "
            f"leave it out or set at most {model_max_len}"
        )
    return options.max_model_len


def _num_blocks(
    options: EngineOptions, layout: KVLayout, wanted_len: int, block_bytes: int, free_bytes: int
) -> tuple[int, str]:
    """Number of blocks without the null block (whose bytes count too), and where the number comes from."""
    if options.num_kv_blocks is not None:
        return options.num_kv_blocks, "num_kv_blocks"
    if options.kv_cache_memory_bytes is not None:
        size = options.kv_cache_memory_bytes
        return size // block_bytes - 1, f"kv_cache_memory_bytes of {format_bytes(size)}"
    half = free_bytes // 2
    affordable = half // block_bytes - 1
    useful = options.max_num_seqs * layout.most_blocks(wanted_len)
    if useful <= affordable:
        return useful, f"{options.max_num_seqs} full-length sequences (max_num_seqs)"
    return affordable, f"half of the {format_bytes(free_bytes)} that are free"


def _explain(
    options: EngineOptions,
    layout: KVLayout,
    num_blocks: int,
    max_model_len: int,
    wanted_len: int,
    block_bytes: int,
    free_bytes: int,
    reason: str,
) -> str:
    pool_bytes = (num_blocks + 1) * block_bytes
    full_length = num_blocks // layout.most_blocks(max_model_len)
    tokens = f" = {num_blocks * options.block_size:,} tokens"
    if layout.num_groups > 1:
        num_full = layout.windows.count(None)
        windows = ", ".join(f"{window:,}" for window in dict.fromkeys(layout.windows) if window is not None)
        tokens = (
            f" of one of {layout.num_groups} groups of layers ({num_full} with full attention, "
            f"{layout.num_groups - num_full} with a window of {windows} tokens)"
        )
    parts = [
        f"KV pool: {num_blocks:,} blocks x {options.block_size} tokens{tokens}, {format_bytes(pool_bytes)}, "
        f"from {reason}",
        f"room for {full_length:,} full-length sequence{'s' if full_length != 1 else ''} of {max_model_len:,} tokens",
    ]
    if max_model_len < wanted_len:
        origin = "as asked" if options.max_model_len is not None else "the model's"
        parts.append(
            f"max_model_len lowered from {wanted_len:,} ({origin}) to {max_model_len:,}, all that the pool holds"
        )
    if pool_bytes > free_bytes:
        parts.append(f"this is more than the {format_bytes(free_bytes)} that are free")
    return "; ".join(parts)


def format_bytes(num_bytes: int) -> str:
    """For people: GiB, MiB, KiB or B, three significant digits."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{num_bytes} B"
