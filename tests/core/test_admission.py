"""Who is admitted: memory kept for those who run, the look-ahead past what does not fit, caps of the queue."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import World

from noria.core.admission import judge_call
from noria.core.margin import Margin
from noria.core.plan import Limit
from noria.errors import RequestError, UnavailableError


def held(plan) -> dict[str, Limit]:
    return {h.request_id: h.limit for h in plan.held}


# --- whole sequences ---


@pytest.mark.parametrize(("reserve_full_sequence", "is_admitted"), [(True, False), (False, True)])
def test_a_sequence_must_fit_whole_unless_that_is_switched_off(reserve_full_sequence, is_admitted):
    world = World(
        num_blocks=10, block_size=4, max_num_batched_tokens=8, reserve_full_sequence=reserve_full_sequence,
        admission_lookahead=0,
    )  # fmt: skip
    world.add("a", 3, max_tokens=12)
    world.step()
    world.add("b", 38, max_tokens=1)  # 10 blocks, 9 are free
    assert ("b" in world.step().num_scheduled_tokens) is is_admitted
    world.run()
    assert len(world.outputs["b"]) == 1


# --- the watermark ---


@pytest.mark.parametrize(("watermark", "is_admitted"), [(0.0, True), (0.2, True), (0.3, False), (1.0, False)])
def test_a_newcomer_leaves_the_watermark_free_while_others_run(watermark, is_admitted):
    world = World(num_blocks=10, block_size=4, watermark=watermark)
    world.add("a", 3, max_tokens=12)
    world.step()
    world.add("b", 28, max_tokens=1)  # 7 of the 9 free blocks, so it leaves 2
    plan = world.step()
    assert ("b" in plan.num_scheduled_tokens) is is_admitted
    if not is_admitted:
        assert held(plan) == {"b": Limit.KV_BLOCKS}
        assert f"{int(10 * watermark)} kept free" in plan.held[0].detail


def test_the_watermark_does_not_apply_when_nothing_runs():
    world = World(num_blocks=10, block_size=4, watermark=1.0)
    world.add("a", 38, max_tokens=1)
    assert "a" in world.step().num_scheduled_tokens


def test_a_preemption_raises_the_margin_by_what_the_victim_had_held():
    margin = Margin(100, 0.05, adaptive=True)
    assert margin.num_blocks_for(60) == 5
    margin.note_preemption(10, 30)
    assert margin.share == pytest.approx(0.25)
    assert margin.num_blocks_for(40) == 5 + 10, "with the victim back, or another like it, 40 are to come"


def test_the_margin_melts_while_nothing_is_preempted():
    margin = Margin(100, 0.0, adaptive=True)
    margin.note_preemption(10, 10)
    for _ in range(8):
        assert margin.num_blocks_for(50) == 25
        margin.note_step()
    assert margin.num_blocks_for(50) == 24
    for _ in range(2000):
        margin.note_step()
    assert margin.num_blocks_for(50) == 0


def test_the_margin_is_never_more_than_half_of_the_pool_and_all_that_is_to_come():
    margin = Margin(100, 0.0, adaptive=True)
    for _ in range(50):
        margin.note_preemption(30, 1)
    assert margin.share == 1.0
    assert margin.num_blocks_for(10**6) == 50
    assert margin.num_blocks_for(20) == 20


def test_without_adaptation_only_the_fixed_part_is_kept():
    margin = Margin(100, 0.1, adaptive=False)
    margin.note_preemption(30, 1)
    assert margin.num_blocks_for(10**6) == 10


def test_after_preemptions_admission_keeps_blocks_free_for_those_who_run():
    world = World(num_blocks=16, block_size=4, max_num_seqs=8, enable_prefix_caching=False)
    for number in range(8):
        world.add(f"r{number}", 6, max_tokens=20)
    while not world.step().preemptions:
        pass
    assert world.scheduler.margin.share > 0
    plan = world.step()
    assert Limit.KV_BLOCKS in held(plan).values()
    assert any("kept free" in h.detail and " 0 kept free" not in h.detail for h in plan.held)
    world.run()


# --- the look-ahead ---


def lookahead_world(**config) -> World:
    """6 blocks are free, and the queue needs 10, 2 and 2."""
    world = World(**{"num_blocks": 12, "block_size": 4, "adaptive_watermark": False} | config)
    world.add("running", 22, max_tokens=2)
    world.step()
    world.add("big", 38, max_tokens=2)
    world.add("small", 7, max_tokens=1)
    world.add("small too", 7, max_tokens=1)
    return world


def test_small_requests_are_admitted_past_one_that_waits_for_memory():
    plan = lookahead_world().step()
    assert plan.num_scheduled_tokens == {"running": 1, "small": 7, "small too": 7}
    assert held(plan) == {"big": Limit.KV_BLOCKS}


@pytest.mark.parametrize(("admission_lookahead", "num_admitted"), [(0, 0), (1, 1), (2, 2), (8, 2)])
def test_no_more_are_looked_at_past_it_than_configured(admission_lookahead, num_admitted):
    plan = lookahead_world(admission_lookahead=admission_lookahead).step()
    assert len(plan.admitted) == num_admitted


def test_the_big_one_keeps_its_place():
    world = lookahead_world()
    world.step()
    world.add("small 3", 7, max_tokens=1)
    assert next(iter(world.scheduler.waiting.order())).request_id == "big"


@pytest.mark.parametrize("age_limit_s", [0.0, 1.0, 5.0])
def test_nobody_goes_past_a_request_that_has_waited_for_memory_for_too_long(age_limit_s):
    """Small ones arrive for ever; a step takes a second."""
    world = World(
        num_blocks=12, block_size=4, lookahead_age_limit_s=age_limit_s, adaptive_watermark=False, max_num_seqs=4
    )
    world.add("running", 22, max_tokens=3)
    world.step()
    world.add("big", 45, max_tokens=2)
    since_s = world.clock()
    number = 0
    while "big" not in world.reasons:
        world.add(f"small{number}", 7, max_tokens=3)
        number += 1
        now_s = world.clock()
        plan = world.step()
        passed = any(a.request_id != "big" for a in plan.admitted) and "big" in world.scheduler.waiting
        assert not passed or now_s < since_s + age_limit_s
        assert now_s <= since_s + age_limit_s + 6, "then those that run end, and it is its turn"


def test_nobody_goes_past_a_preempted_request():
    world = World(num_blocks=8, block_size=4, adaptive_watermark=False, enable_prefix_caching=False)
    world.add("a", 15, max_tokens=12)
    world.add("b", 15, max_tokens=12)
    while "b" not in world.step().preempted:
        pass
    world.add("small", 3, max_tokens=1)
    plan = world.step()
    assert held(plan) == {"b": Limit.KV_BLOCKS}
    assert not plan.admitted
    assert plan.admission_end is not None
    assert (plan.admission_end.limit, plan.admission_end.num_behind) == (Limit.KV_BLOCKS, 1)


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 46), min_size=2, max_size=14),
    admission_lookahead=st.integers(0, 4),
    age_limit_s=st.sampled_from([0.0, 2.0, 100.0]),
)
def test_the_look_ahead_admits_no_more_than_its_bound_past_anybody(prompts, admission_lookahead, age_limit_s):
    world = World(
        num_blocks=12, block_size=4, admission_lookahead=admission_lookahead, lookahead_age_limit_s=age_limit_s,
        adaptive_watermark=False, max_num_batched_tokens=256,
    )  # fmt: skip
    for number, num_prompt in enumerate(prompts):
        world.add(f"r{number}", num_prompt, max_tokens=2)
    while world.scheduler.has_unfinished:
        plan = world.step()
        waits = [h.request_id for h in plan.held if h.limit is Limit.KV_BLOCKS]
        if waits:
            first = min(world.requests[r].arrival_number for r in waits)
            newcomers = [world.requests[a.request_id] for a in plan.admitted]
            passed = [r for r in newcomers if r.arrival_number > first and not r.num_preemptions]
            assert len(passed) + len(waits) - 1 <= admission_lookahead


# --- the queue ---


def test_the_queue_is_full_at_so_many_sequences_and_says_the_numbers():
    world = World(max_num_seqs=2, max_num_queued_reqs=3)
    for number in range(2):
        world.add(f"running{number}", 3)
    world.step()
    for number in range(3):
        world.add(f"waiting{number}", 3)
    with pytest.raises(
        UnavailableError, match="2 requests run and 3 wait, at most 2 may run and 3 more wait"
    ) as caught:
        world.add("one too many", 3)
    assert caught.value.code == "queue_full"
    world.finish("waiting1")
    world.add("in its place", 3)
    world.run()


def test_requests_that_would_run_at_once_do_not_count_as_queued():
    world = World(max_num_seqs=4, max_num_queued_reqs=0)
    for number in range(4):
        world.add(f"r{number}", 3)
    with pytest.raises(UnavailableError):
        world.add("one too many", 3)


def test_the_queue_is_full_at_so_many_prompt_tokens_and_says_the_numbers():
    world = World(num_blocks=64, max_num_seqs=1, max_num_queued_tokens=100)
    world.add("running", 50)
    world.step()
    world.add("a", 60)
    with pytest.raises(
        UnavailableError, match="60 tokens together are waiting, this one has 41, and at most 100"
    ) as caught:
        world.add("b", 41)
    assert caught.value.code == "queue_full"
    world.add("c", 40)
    world.run()


def test_a_prompt_is_never_too_long_for_an_empty_queue():
    world = World(num_blocks=64, max_num_queued_tokens=10)
    world.add("long", 200)
    world.run()


def test_the_sequences_of_one_prompt_queue_it_once():
    world = World(num_blocks=64, max_num_seqs=1, max_num_queued_tokens=100)
    world.add("running", 50)
    world.step()
    for index in range(4):
        world.add(f"n{index}", range(60), parent_id="n0" if index else None)
    assert world.scheduler.waiting.num_queued_tokens == 60
    world.run()


def test_the_sequences_of_a_refused_prompt_are_refused_with_it():
    world = World(num_blocks=64, max_num_seqs=1, max_num_queued_tokens=100)
    world.add("running", 50)
    world.step()
    world.add("queued", 60)
    for index in range(4):
        with pytest.raises(UnavailableError):
            world.add(f"n{index}", range(60), parent_id="n0" if index else None)


def test_a_preempted_request_is_not_counted_as_queued_tokens():
    world = World(max_num_seqs=2, max_num_queued_tokens=10)
    world.add("a", 30, max_tokens=20)
    world.step()
    world.preempt("a")
    assert world.scheduler.waiting.num_queued_tokens == 0
    world.add("b", 10)
    world.run()


def test_a_refused_request_leaves_nothing_behind():
    world = World(max_num_seqs=1, max_num_queued_reqs=1, scheduling_policy="fair", request_deadline_s=5.0)
    world.add("a", 3)
    world.add("b", 3)
    with pytest.raises(UnavailableError):
        world.add("c", 3, tenant="t")
    assert "c" not in world.scheduler.waiting
    world.run()
    assert not world.scheduler.has_news or world.step().finished


@pytest.mark.parametrize(
    ("lengths", "n", "fits"),
    [
        ([60, 40], 1, True),
        ([60, 41], 1, False),
        ([500], 4, True),
        ([500], 5, False),
        ([1] * 4, 1, True),
        ([1] * 5, 1, False),
    ],
)
def test_the_verdict_on_a_call_is_that_of_its_sequences_on_an_empty_queue(lengths, n, fits):
    limits = {"max_num_seqs": 2, "max_num_queued_reqs": 2, "max_num_queued_tokens": 100}
    world = World(num_blocks=256, **limits)

    def add_all() -> None:
        for number, length in enumerate(lengths):
            for index in range(n):
                world.add(f"{number}-{index}", length, parent_id=f"{number}-0" if index else None)

    if fits:
        add_all()
        judge_call(lengths, n, world.scheduler.config)
    else:
        with pytest.raises(UnavailableError):
            add_all()
        with pytest.raises(RequestError) as refusal:
            judge_call(lengths, n, world.scheduler.config)
        assert refusal.value.code == "request_too_large"
