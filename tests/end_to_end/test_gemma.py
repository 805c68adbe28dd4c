"""Gemma 3 270M with its real weights on the native executor: one answer, bit for bit, whatever happens around it.

Its window is of 512 tokens; prompts are shorter, longer and of about that length. `test_windows.py` does the like with
a tiny random model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noria import SamplingParams
from noria.kv_layout import KVLayout
from noria.llm import LLM
from noria.ops.native import NativeExecutor, why_unavailable
from support.engines import LLMFactory, llm_factory

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
if reason := why_unavailable():
    pytest.skip(reason, allow_module_level=True)

WINDOW, BLOCK_SIZE, NUM_GROUPS = 512, 16, 6
NUM_NEW_TOKENS = 16
LENGTHS = (20, 100, 511, 513, 1000, 2000)
BUDGETS = (130, 500, 513)  # the first chunk of a prompt ends before the window, and another lies across its edge
LONGEST = LENGTHS[-1] + NUM_NEW_TOKENS
Answer = tuple[list[int], object]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def new_llm(request: pytest.FixtureRequest, gemma_path: Path) -> LLMFactory:
    build = llm_factory(gemma_path, request.param, NativeExecutor)

    def with_defaults(**options: Any) -> LLM:
        return build(**{"max_model_len": 2304, "num_kv_blocks": 2500, "max_num_batched_tokens": 2048} | options)

    return with_defaults


def prompts_of(lengths: Sequence[int], seed: int) -> list[list[int]]:
    numbers = np.random.default_rng(seed)
    return [[2, *numbers.integers(1_000, 200_000, length - 1).tolist()] for length in lengths]


def answers(llm: LLM, prompts: list[list[int]], num_tokens: int = NUM_NEW_TOKENS) -> tuple[list[Answer], list[int]]:
    """Token ids and log-probabilities, to be compared bit for bit; and how many prompt tokens each found."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=3)
    results = llm.generate(prompts, sampling, progress=False)
    assert all(result.error is None for result in results)
    llm.assembled.core.scheduler.check()
    given = [(result.outputs[0].token_ids, result.outputs[0].logprobs) for result in results]
    return given, [result.num_cached_tokens for result in results]


def layout_of(llm: LLM) -> KVLayout:
    layout = llm.assembled.scheduler_config.kv_layout
    assert sorted(layout.windows, key=bool) == [None] + [WINDOW] * (NUM_GROUPS - 1)
    return layout


def test_cold_warm_chunked_and_preempted_runs_are_equal_bit_for_bit(new_llm: LLMFactory) -> None:
    prompts = prompts_of(LENGTHS, seed=5)
    llm = new_llm()
    cold: list[Answer] = []
    for prompt in prompts:  # alone, each in one step
        given, found = answers(llm, [prompt])
        assert found == [0]
        cold += given
    assert len({tuple(tokens) for tokens, _ in cold}) == len(prompts)

    for prompt, expected in zip(prompts, cold, strict=True):
        given, found = answers(llm, [prompt])
        assert found == [(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE]
        assert given == [expected], f"a warm prompt of {len(prompt)} tokens"

    for budget in BUDGETS:
        llm = new_llm(max_num_batched_tokens=budget)
        assert answers(llm, prompts) == (cold, [0] * len(prompts)), f"chunks of up to {budget} tokens"
        assert max(record.plan.num_tokens for record in llm.assembled.core.records) == budget

    # Room for the longest and a little more. Newcomers leave nothing free, so that somebody must give way.
    few = KVLayout(BLOCK_SIZE, layout_of(llm).windows, 256).most_blocks(LONGEST) + 10 * NUM_GROUPS
    options = {"reserve_full_sequence": False, "adaptive_watermark": False, "max_num_batched_tokens": 256}
    llm = new_llm(num_kv_blocks=few, max_model_len=LONGEST, **options)
    given, _ = answers(llm, prompts)
    assert given == cold
    lost = [p.num_tokens_lost for record in llm.assembled.core.records for p in record.plan.preemptions]
    print(f"\n{few} blocks: {len(lost)} preemptions, of {lost} tokens")
    assert max(lost, default=0) > WINDOW, "nobody was preempted whose windows had moved on"


def test_kv_held_while_decoding_is_at_most_half_of_full_attention(new_llm: LLMFactory) -> None:
    """Blocks are of one size, so their numbers compare as bytes do: by the pool's own account, and with full attention
    in as many groups of layers."""
    for budget in (512, 2048):
        llm = new_llm(max_num_batched_tokens=budget)
        answers(llm, prompts_of([2000], seed=6), num_tokens=40)
        layout = layout_of(llm)
        everywhere = KVLayout(BLOCK_SIZE, (None,) * NUM_GROUPS, budget)
        decodes = [r for r in llm.assembled.core.records if r.num_running and r.plan.num_tokens == 1]
        assert len(decodes) > 30
        for number, record in enumerate(decodes):
            length = 2001 + number  # tokens whose KV is there once the step has been executed
            assert record.kv.num_held <= everywhere.most_blocks(length) / 2
            edges = layout.num_columns(WINDOW) + 1  # of a window that does not begin with a block
            assert record.kv.num_held <= layout.num_columns(length) + (NUM_GROUPS - 1) * edges
        held, full = decodes[-1].kv.num_held, everywhere.most_blocks(2000 + len(decodes))
        print(f"\nsteps of up to {budget}: {held} blocks held, with full attention {full}: {held / full:.1%}")


def test_the_same_prompt_four_times_with_other_traffic_between(new_llm: LLMFactory) -> None:
    """It finds itself, also after a little traffic; after much it is gone, and computed again."""
    llm = new_llm(num_kv_blocks=900, max_num_batched_tokens=512)
    [prompt] = prompts_of([1000], seed=7)
    between = [[], [300], [900, 1100, 700, 1400], []]
    given: list[Answer] = []
    found: list[int] = []
    for number, lengths in enumerate(between):
        answer, hit = answers(llm, [prompt])
        given += answer
        found += hit
        if lengths:
            _, others = answers(llm, prompts_of(lengths, seed=20 + number))
            assert others == [0] * len(lengths)
    print(f"\nfound in the cache: {found}")
    assert all(answer == given[0] for answer in given)
    assert found == [0, 992, 992, 0]
    stats = llm.assembled.core.records[-1].kv
    assert (stats.num_held, stats.num_cached_idle + stats.num_blank) == (0, 900)
