"""Order, budgets and limits of single steps."""

import pytest
from worlds import EOS, World

from noria.core.events import FinishReason
from noria.core.plan import Limit
from noria.errors import ContextLengthError, RequestError


def test_running_requests_have_the_first_claim_on_the_budget():
    world = World(max_num_batched_tokens=8)
    world.add("a", 2, max_tokens=10)
    world.step()
    world.add("b", 20)
    assert world.step().num_scheduled_tokens == {"a": 1, "b": 7}
    assert world.step().num_scheduled_tokens == {"a": 1, "b": 7}
    assert world.step().num_scheduled_tokens == {"a": 1, "b": 6}
    assert world.step().num_scheduled_tokens == {"a": 1, "b": 1}


def test_admission_is_first_come_first_served():
    world = World(max_num_seqs=2)
    for request_id in "abcd":
        world.add(request_id, 3, max_tokens=2)
    plan = world.step()
    assert list(plan.num_scheduled_tokens) == ["a", "b"]
    assert plan.admission_end is not None
    assert (plan.admission_end.limit, plan.admission_end.num_behind) == (Limit.MAX_NUM_SEQS, 2)
    world.step()
    assert list(world.step().num_scheduled_tokens) == ["c", "d"]


def test_there_are_never_more_running_requests_than_tokens_in_the_budget():
    """So everybody who runs advances in every step."""
    world = World(max_num_batched_tokens=3)
    for request_id in "abcd":
        world.add(request_id, 1, max_tokens=3)
    plan = world.step()
    assert list(plan.num_scheduled_tokens) == ["a", "b", "c"]
    assert plan.admission_end is not None
    assert plan.admission_end.limit is Limit.TOKEN_BUDGET
    for plan in world.run():
        assert len(plan.num_scheduled_tokens) == plan.num_tokens or "d" in plan.num_scheduled_tokens
    assert all(len(output) == 3 for output in world.outputs.values())


def test_a_request_waits_for_memory_and_nobody_overtakes_it():
    world = World(num_blocks=8, block_size=4, admission_lookahead=0)
    world.add("a", 16, max_tokens=4)
    world.add("big", 20, max_tokens=4)
    world.add("small", 2, max_tokens=4)
    plan = world.step()
    assert list(plan.num_scheduled_tokens) == ["a"]
    assert [(h.request_id, h.limit) for h in plan.held] == [("big", Limit.KV_BLOCKS)]
    assert plan.admission_end is not None
    assert (plan.admission_end.limit, plan.admission_end.num_behind) == (Limit.KV_BLOCKS, 1)
    world.run()
    assert all(len(output) == 4 for output in world.outputs.values())


def test_a_first_chunk_never_starts_what_cannot_go_on():
    """Two prompts that fit one at a time: the second waits although its first chunk would fit."""
    world = World(num_blocks=10, block_size=4, max_num_batched_tokens=8)
    world.add("a", 24, max_tokens=1)
    world.add("b", 24, max_tokens=1)
    plans = world.run()
    assert not any(plan.preempted for plan in plans)
    assert [h.limit for h in plans[0].held if h.request_id == "b"] == [Limit.KV_BLOCKS]
    first_with_both = next(plan for plan in plans if "b" in plan.num_scheduled_tokens)
    assert "a" not in first_with_both.num_scheduled_tokens


def test_what_admitted_prefills_still_need_is_not_given_to_newcomers():
    world = World(num_blocks=10, block_size=4, max_num_batched_tokens=12)
    world.add("a", 28, max_tokens=1)  # 7 blocks, 3 of them taken by the first chunk
    world.step()
    world.add("b", 16, max_tokens=1)  # 4 blocks: 7 are free, but 4 of those are owed to a
    plan = world.schedule()
    assert plan.num_scheduled_tokens == {"a": 12}
    world.update(plan)
    plan = world.step()
    assert plan.num_scheduled_tokens == {"a": 4}
    assert [(h.request_id, h.limit) for h in plan.held] == [("b", Limit.KV_BLOCKS)]


@pytest.mark.parametrize(
    ("tokens", "sampling", "expected_reason", "expected_output"),
    [
        ([5, EOS, 6], {"max_tokens": 10}, FinishReason.STOP, [5, EOS]),
        ([5, EOS, 6], {"max_tokens": 2}, FinishReason.STOP, [5, EOS]),  # in the last allowed place: still a stop
        ([5, EOS, 6], {"max_tokens": 3, "ignore_eos": True}, FinishReason.LENGTH, [5, EOS, 6]),
        ([5, 9, 6], {"max_tokens": 10, "stop_token_ids": (9,)}, FinishReason.STOP, [5, 9]),
        ([5, 6, 7, 8], {"max_tokens": 3}, FinishReason.LENGTH, [5, 6, 7]),
        ([5, 6, 7, 8, 9, 10], {"max_tokens": None}, FinishReason.LENGTH, [5, 6, 7, 8]),
    ],
)  # fmt: skip
def test_why_requests_end(tokens, sampling, expected_reason, expected_output):
    world = World(max_model_len=7, script={"r": tokens})
    if (sampling["max_tokens"] or 0) > 4:
        sampling = sampling | {"max_tokens": 4}
    world.add("r", 3, **sampling)
    world.run()
    assert world.reasons["r"] is expected_reason
    assert world.outputs["r"] == expected_output


def test_the_stop_token_is_named_and_the_models_own_end_is_not():
    world = World(script={"a": [5, 9], "b": [5, EOS]})
    world.add("a", 3, stop_token_ids=(9,))
    world.add("b", 3)
    world.step()
    events = world.update(world.schedule())
    assert [(e.request_id, e.stop_reason) for e in events] == [("a", 9), ("b", None)]


def test_an_empty_prompt_is_refused():
    world = World()
    with pytest.raises(RequestError) as refusal:
        world.add("r", [])
    assert refusal.value.param == "prompt"


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(32, None), (33, 1), (100, None)])
def test_a_prompt_at_or_over_the_context_is_refused_with_the_numbers(num_prompt, max_tokens):
    world = World(max_model_len=32)
    with pytest.raises(ContextLengthError, match=f"{num_prompt} tokens.*context length is 32"):
        world.add("r", num_prompt, max_tokens=max_tokens)
    assert not world.scheduler.has_unfinished


def test_prompt_and_max_tokens_over_the_context_are_refused_with_all_numbers():
    world = World(max_model_len=32)
    with pytest.raises(
        ContextLengthError,
        match=r"30 tokens and max_tokens is 3, together 33, but this model's maximum context length is 32",
    ):
        world.add("r", 30, max_tokens=3)
    world.add("fits", 30, max_tokens=2)
    world.run()
    assert len(world.outputs["fits"]) == 2


def test_ids_outside_the_vocabulary_are_refused():
    world = World()
    object.__setattr__(world.config, "vocab_size", 100)
    for prompt, bad in [([1, 100], 100), ([-1, 5], -1)]:
        with pytest.raises(RequestError, match=f"token id {bad} is outside"):
            world.add("r", prompt)


def test_a_step_with_nothing_to_do_is_legal():
    world = World()
    plan = world.step()
    assert plan.is_empty
    assert str(plan) == "step 1: idle | 0 tokens"


def test_every_step_leaves_a_record_and_the_ring_is_bounded():
    world = World()
    world.add("a", 3, max_tokens=3)
    world.run()
    records = world.scheduler.records
    assert [r.plan.step for r in records] == [1, 2, 3]
    assert [r.duration_s for r in records] == [1.0, 1.0, 1.0]
    assert [(e.request_id, e.reason, e.num_output_tokens) for e in records[-1].endings] == [("a", "length", 3)]
    assert records[-1].num_free_blocks == world.config.num_blocks
    for _ in range(world.config.num_records_kept + 5):
        world.step()
    assert len(records) == world.config.num_records_kept
