"""How a step's tokens are shared: caps on one prompt, floors under each, and what is left over."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import World

from noria.core.chunks import ChunkRule
from noria.core.plan import Limit
from noria.core.request import Request
from noria.errors import OptionError
from noria.sampling import SamplingParams

# --- caps ---


def test_a_chunk_ends_at_the_threshold_even_if_nobody_else_can_use_the_rest():
    """It is there for the token gaps of others: a long step is what it prevents."""
    world = World(max_num_batched_tokens=32, long_prefill_token_threshold=5, max_prefill_share=1.0)
    for request_id in "abc":
        world.add(request_id, 40, max_tokens=1)
    plan = world.schedule()
    assert plan.num_scheduled_tokens == {"a": 5, "b": 5, "c": 5}
    assert {held.limit for held in plan.held} == {Limit.LONG_PREFILL}
    world.update(plan)


def test_what_the_share_leaves_is_topped_up_to_the_threshold_and_no_further():
    world = World(max_num_batched_tokens=32, long_prefill_token_threshold=12, max_prefill_share=0.25)
    world.add("a", 40, max_tokens=1)
    world.add("b", 3, max_tokens=1)
    plan = world.step()
    assert plan.num_scheduled_tokens == {"a": 12, "b": 3}
    assert [(held.request_id, held.limit) for held in plan.held] == [("a", Limit.LONG_PREFILL)]


def test_the_threshold_names_itself_as_the_limit():
    world = World(max_num_batched_tokens=16, long_prefill_token_threshold=5, max_prefill_share=1.0)
    for request_id in "abcd":
        world.add(request_id, 40, max_tokens=1)
    plan = world.step()
    assert plan.num_scheduled_tokens == {"a": 5, "b": 5, "c": 5, "d": 1}
    assert {h.request_id: h.limit for h in plan.held} == {
        "a": Limit.LONG_PREFILL, "b": Limit.LONG_PREFILL, "c": Limit.LONG_PREFILL, "d": Limit.TOKEN_BUDGET,
    }  # fmt: skip


@pytest.mark.parametrize("caps", [{"long_prefill_token_threshold": 3}, {"max_prefill_share": 0.1}])
def test_a_lone_request_has_the_whole_budget(caps):
    world = World(max_num_batched_tokens=32, **caps)
    world.add("alone", 60, max_tokens=1)
    assert world.step().num_scheduled_tokens == {"alone": 32}


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.75, 1.0])
def test_one_prompt_takes_no_more_than_its_share_while_others_can_use_the_rest(share):
    world = World(num_blocks=256, max_num_batched_tokens=40, max_prefill_share=share, max_num_seqs=64)
    world.add("giant", 400, max_tokens=1)
    for number in range(60):
        world.add(f"small{number}", 1, max_tokens=1)
    plan = world.step()
    assert plan.num_scheduled_tokens["giant"] == max(1, int(40 * share))
    assert plan.num_tokens == 40


@pytest.mark.parametrize("num_giants", [1, 2, 4, 7])
def test_giants_together_leave_something_of_each_step_to_a_newcomer(num_giants):
    world = World(num_blocks=4096, max_num_batched_tokens=64, max_num_seqs=16)
    for number in range(num_giants):
        world.add(f"giant{number}", 1500, max_tokens=1)
    for _ in range(12):
        world.step()
    running = [request.request_id for request in world.scheduler.running]
    assert len(running) == min(num_giants, 2), "further giants wait for these"
    world.add("small", 8, max_tokens=4)
    plans = [world.step() for _ in range(3)]
    assert plans[0].num_scheduled_tokens["small"] == 8
    for plan in plans:
        assert set(plan.num_scheduled_tokens) == {"small", *running}
        assert plan.num_tokens == 64, "what it left went to the giants"


def test_what_nobody_else_can_use_goes_to_those_that_were_cut():
    world = World(num_blocks=256, max_num_batched_tokens=40, max_prefill_share=0.25)
    world.add("giant", 400, max_tokens=1)
    world.add("small", 3, max_tokens=1)
    plan = world.step()
    assert plan.num_scheduled_tokens == {"giant": 37, "small": 3}
    assert [(h.request_id, h.limit, h.detail) for h in plan.held] == [("giant", Limit.TOKEN_BUDGET, "37 of 400 tokens")]


def test_decodes_are_never_cut():
    world = World(max_num_batched_tokens=8, max_prefill_share=0.01)
    for number in range(6):
        world.add(f"r{number}", 1, max_tokens=20)
    world.step()
    world.add("prompt", 40, max_tokens=1)
    for _ in range(5):
        plan = world.step()
        assert all(plan.num_scheduled_tokens[f"r{number}"] == 1 for number in range(6))
        assert plan.num_scheduled_tokens["prompt"] == 2, "all that the decodes leave"


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm", "fair"])
def test_short_prompts_beside_a_giant_get_their_first_token_in_a_few_steps_and_the_giant_goes_on(policy):
    """64 tokens a step; a prompt of 4,096; 10 ms later twenty prompts of 8. Half of the step is theirs: 160 tokens,
    32 in a step, less what those that have begun decode."""
    world = World(
        num_blocks=1200, max_num_batched_tokens=64, max_num_seqs=32, scheduling_policy=policy, max_model_len=4800
    )
    world.add("giant", 4096, max_tokens=4, tenant="g")
    world.step()
    world.clock.advance(0.01)
    for number in range(20):
        world.add(f"short{number}", 8, max_tokens=30, tenant=f"t{number % 3}")
    first_token_step: dict[str, int] = {}
    num_steps = 0
    while "giant" not in world.reasons:
        num_steps += 1
        before = world.requests["giant"].num_computed
        plan = world.step()
        if before < 4096:
            assert plan.num_scheduled_tokens["giant"] >= min(4096 - before, (64 - 20) // 2)
        for request_id, output in world.outputs.items():
            if output:
                first_token_step.setdefault(request_id, num_steps)
    shorts = [step for request_id, step in first_token_step.items() if request_id != "giant"]
    assert len(shorts) == 20
    assert max(shorts) <= 10
    assert num_steps <= 2 * 4096 / 64 + 10, "the giant takes at most twice as long as alone"


# --- floors ---


@settings(max_examples=200, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(0, 2), st.integers(0, 2)), min_size=2, max_size=8
    ),
    max_num_batched_tokens=st.integers(2, 40),
    threshold=st.sampled_from([0, 0, 3, 9]),
    share=st.sampled_from([0.1, 0.5, 1.0]),
    policy=st.sampled_from(["fcfs", "priority", "lpm", "fair"]),
    num_blocks=st.sampled_from([18, 40, 128]),
)
def test_every_unfinished_prompt_advances_at_the_stated_rate(
    requests, max_num_batched_tokens, threshold, share, policy, num_blocks
):
    """Half of an equal share of what decodes leave, or all that it still needs, or the cap, if those are less."""
    world = World(
        num_blocks=num_blocks, max_num_batched_tokens=max_num_batched_tokens, long_prefill_token_threshold=threshold,
        max_prefill_share=share, scheduling_policy=policy,
    )  # fmt: skip
    cap = max(1, int(max_num_batched_tokens * share))
    if threshold:
        cap = min(cap, threshold)
    pending = list(requests)
    while pending or world.scheduler.has_unfinished:
        if pending:
            num_prompt, max_tokens, tenant, priority = pending.pop(0)
            world.add(f"r{len(pending)}", num_prompt, max_tokens=max_tokens, tenant=str(tenant), priority=priority)
        unfinished = {r.request_id: r.num_remaining for r in world.scheduler.running if not r.is_caught_up}
        num_decodes = len(world.scheduler.running) - len(unfinished)
        plan = world.step()
        assert plan.num_tokens <= max_num_batched_tokens
        for request_id, num_remaining in unfinished.items():
            if request_id not in plan.preempted:
                equal_share = (max_num_batched_tokens - num_decodes) / len(unfinished)
                floor = min(num_remaining, cap, max(1, int(equal_share / 2)))
                assert plan.num_scheduled_tokens[request_id] >= floor


@settings(max_examples=200, deadline=None)
@given(
    remaining=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    num_left=st.integers(8, 64),
    share=st.sampled_from([0.1, 0.5, 1.0]),
)
def test_floors_are_set_aside_whatever_stands_before_and_nothing_is_given_twice(remaining, num_left, share):
    """The rule by itself: prompts of all lengths at once, which a world rarely has."""
    config = World(max_num_batched_tokens=64, max_prefill_share=share).config
    requests = [Request(f"r{number}", list(range(n)), SamplingParams()) for number, n in enumerate(remaining)]
    num_prompts = sum(not request.is_caught_up for request in requests)
    half = max(1, (num_left - (len(requests) - num_prompts)) // (2 * max(1, num_prompts)))
    cap = max(1, int(64 * share))
    num_for_newcomers = int(num_left * (1 - share) / 2)
    rule, given = ChunkRule(config, is_alone=False), []
    rule.begin(num_left)
    for request in rule.in_turn(requests, num_left):
        num_tokens, _ = rule.next_chunk(request.num_remaining, num_left - sum(given))
        given.append(num_tokens)
        assert min(request.num_remaining, cap, half) <= num_tokens <= cap
    assert sum(given) <= num_left
    floors = sum(min(n, cap, half) for n in remaining)
    if all(n > cap for n in remaining):
        assert sum(given) <= max(floors, num_left - num_for_newcomers), "long prompts leave something to newcomers"
    if not any(n > cap for n in remaining):
        assert sum(given) == min(num_left, sum(remaining))


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    max_num_batched_tokens=st.integers(1, 20),
    max_num_seqs=st.integers(1, 12),
)
def test_whoever_runs_advances_in_every_step(prompts, max_num_batched_tokens, max_num_seqs):
    """There are never more of them than the smaller of `max_num_seqs` and the budget."""
    world = World(num_blocks=40, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
    for number, num_prompt in enumerate(prompts):
        world.add(f"r{number}", num_prompt, max_tokens=6)
    while world.scheduler.has_unfinished:
        running = {r.request_id for r in world.scheduler.running}
        plan = world.step()
        assert running - set(plan.preempted) <= plan.num_scheduled_tokens.keys()
        assert len(plan.num_scheduled_tokens) <= min(max_num_seqs, max_num_batched_tokens)


# --- without chunks ---


def test_without_chunked_prefill_a_prompt_runs_whole_or_not_at_all():
    world = World(
        num_blocks=16, max_model_len=32, max_num_batched_tokens=32, enable_chunked_prefill=False, max_prefill_share=0.1
    )
    world.add("a", 12, max_tokens=3)
    world.add("b", 19, max_tokens=3)
    world.add("c", 2, max_tokens=3)
    plans = world.run()
    assert plans[0].num_scheduled_tokens == {"a": 12, "b": 19}, "no cap applies"
    assert [(h.request_id, h.limit, h.detail) for h in plans[0].held] == [
        ("c", Limit.TOKEN_BUDGET, "2 tokens to run, 1 left in the budget")
    ]
    assert plans[1].num_scheduled_tokens["c"] == 2


def test_without_chunked_prefill_a_step_must_hold_a_whole_sequence():
    with pytest.raises(OptionError, match="max_num_batched_tokens is 31 and max_model_len is 32"):
        World(num_blocks=8, block_size=4, max_num_batched_tokens=31, enable_chunked_prefill=False)


def test_a_resumed_sequence_runs_whole_as_well():
    world = World(num_blocks=8, block_size=4, max_num_batched_tokens=32, enable_chunked_prefill=False,
                  enable_prefix_caching=False)  # fmt: skip
    world.add("a", 10, max_tokens=12)
    world.add("b", 10, max_tokens=12)
    plans = world.run()
    assert any(plan.preempted for plan in plans)
    for plan in plans:
        for admitted in plan.admitted:
            assert plan.num_scheduled_tokens[admitted.request_id] == len(admitted.token_ids)


@pytest.mark.parametrize(
    "wrong",
    [{"max_prefill_share": 0}, {"max_prefill_share": 1.5}, {"watermark": -0.1}, {"watermark": 2},
     {"long_prefill_token_threshold": -1}, {"max_num_batched_tokens": 0}, {"max_num_seqs": 0}],
)  # fmt: skip
def test_a_budget_that_cannot_be_kept_is_refused_by_name(wrong):
    with pytest.raises(OptionError, match=next(iter(wrong))):
        World(**wrong)
