"""Policy priority: order, displacement, and the bound on waiting."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import World

from noria.core.plan import Limit, StepPlan


def priority_world(**config) -> World:
    return World(**{"scheduling_policy": "priority", "priority_aging_s": 1000.0} | config)


def order(world: World) -> list[str]:
    return [request.request_id for request in world.scheduler.waiting.order()]


def test_the_smaller_priority_goes_first_and_arrival_breaks_ties():
    world = priority_world()
    for request_id, priority in [("a", 1), ("b", 0), ("c", 1), ("d", -2), ("e", 0)]:
        world.add(request_id, 3, priority=priority)
    assert order(world) == ["d", "b", "e", "a", "c"]
    assert list(world.step().num_scheduled_tokens) == ["d", "b", "e", "a", "c"]


def test_asking_for_the_order_changes_nothing():
    world = priority_world()
    for number in range(9):
        world.add(f"r{number}", 3, priority=number % 3)
    assert order(world) == order(world)
    assert list(world.step().num_scheduled_tokens)[:3] == ["r0", "r3", "r6"]


# --- displacement ---


def test_an_urgent_request_takes_a_slot_from_a_lower_class():
    world = priority_world(max_num_seqs=2)
    world.add("low", 3, max_tokens=20, priority=5)
    world.add("lowest", 3, max_tokens=20, priority=6)
    world.step()
    world.add("urgent", 3, max_tokens=2, priority=0)
    plan = world.step()
    assert plan.preempted == ("lowest",)
    assert plan.num_scheduled_tokens == {"low": 1, "urgent": 3}
    world.run()
    assert len(world.outputs["lowest"]) == 20


@pytest.mark.parametrize("priority", [5, 6, 9])
def test_an_equal_or_higher_class_is_never_displaced(priority):
    world = priority_world(max_num_seqs=2)
    world.add("a", 3, max_tokens=20, priority=5)
    world.add("b", 3, max_tokens=20, priority=5)
    world.step()
    world.add("late", 3, priority=priority)
    plan = world.step()
    assert not plan.preempted
    assert (plan.admission_end.limit, plan.admission_end.num_behind) == (Limit.MAX_NUM_SEQS, 1)


def test_an_earlier_arrival_does_not_displace_a_later_one_of_its_own_class():
    """The later one had passed it while it waited for memory."""
    world = priority_world(num_blocks=12, block_size=4, lookahead_age_limit_s=1.0)
    world.add("first", 20, max_tokens=2, priority=5)
    world.add("big", 46, max_tokens=2, priority=5)
    world.clock.advance(0.5)
    world.add("late", 3, max_tokens=15, priority=5)
    assert list(world.step().num_scheduled_tokens) == ["first", "late"]
    for _ in range(6):
        plan = world.step()
        assert not plan.preempted
        assert [(h.request_id, h.limit) for h in plan.held] == [("big", Limit.KV_BLOCKS)]
    world.run()


def test_an_urgent_request_takes_memory_from_as_few_as_possible():
    world = priority_world(num_blocks=8, block_size=4)
    world.add("small", 3, max_tokens=9, priority=7)  # 1 block
    world.add("large", 15, max_tokens=9, priority=5)  # 4 blocks
    world.add("medium", 7, max_tokens=9, priority=6)  # 2 blocks
    world.step()
    world.add("urgent", 18, max_tokens=1, priority=0)  # 5 blocks, 1 is free
    plan = world.step()
    assert plan.preempted == ("large",), "without small and medium alone it would not fit, with large alone it does"
    assert {p.in_favour_of for p in plan.preemptions} == {"urgent"}


def test_nobody_is_displaced_when_that_would_not_make_room():
    world = priority_world(num_blocks=8, block_size=4)
    world.add("first", 15, max_tokens=9, priority=0)
    world.add("low", 7, max_tokens=9, priority=6)
    world.step()
    world.add("urgent", 25, max_tokens=1, priority=0)  # 7 blocks; 4 without low
    plan = world.step()
    assert not plan.preempted
    assert [(h.request_id, h.limit) for h in plan.held] == [("urgent", Limit.KV_BLOCKS)]


def test_only_the_urgent_one_is_admitted_in_the_step_that_displaces():
    world = priority_world(max_num_seqs=2)
    world.add("a", 3, max_tokens=20, priority=5)
    world.add("b", 3, max_tokens=20, priority=5)
    world.step()
    world.add("urgent", 3, max_tokens=1, priority=0)
    world.add("also", 3, max_tokens=1, priority=0)
    plan = world.step()
    assert [admitted.request_id for admitted in plan.admitted] == ["urgent"]
    assert plan.admission_end is not None
    assert plan.admission_end.limit is Limit.PREEMPTING_STEP
    assert [admitted.request_id for admitted in world.step().admitted] == ["also"]


def test_the_displaced_is_resumed_first_within_its_class():
    world = priority_world(max_num_seqs=1)
    world.add("low", 3, max_tokens=20, priority=5)
    world.step()
    world.add("older", 3, priority=4)
    world.add("same", 3, priority=5)
    world.add("urgent", 3, max_tokens=2, priority=0)
    world.step()
    assert order(world) == ["older", "low", "same"]


def test_a_displaced_request_that_was_planned_at_a_block_end_gives_everything_back():
    """low is steady, and this step has a token and a new block planned for it."""
    world = priority_world(num_blocks=8, block_size=4, max_num_seqs=1)
    world.add("low", 4, max_tokens=20, priority=5)
    world.step()  # 4 computed: its next token needs a block
    world.add("urgent", 3, max_tokens=1, priority=0)
    num_free = world.scheduler.kv.pool.num_free_blocks
    plan = world.schedule()
    assert plan.num_scheduled_tokens == {"urgent": 3}
    assert not plan.new_block_ids
    assert [(p.request_id, p.num_tokens_lost) for p in plan.preemptions] == [("low", 4)]
    assert world.scheduler.kv.pool.num_free_blocks == num_free  # its one block came back, urgent has one
    world.update(plan)
    world.run()


def test_a_displaced_chunk_gives_its_tokens_back_to_the_budget():
    world = priority_world(num_blocks=16, block_size=4, max_num_seqs=1, max_num_batched_tokens=8)
    world.add("low", 30, max_tokens=5, priority=5)
    world.step()
    world.add("urgent", 8, max_tokens=1, priority=0)
    plan = world.step()
    assert plan.preempted == ("low",)
    assert plan.num_scheduled_tokens == {"urgent": 8}, "the whole budget, although low's chunk had been planned"
    world.run()


def test_where_slots_and_budget_are_spent_alike_the_displaced_gives_both():
    world = priority_world(max_num_seqs=3, max_num_batched_tokens=3)
    for request_id in ("a", "b", "c"):
        world.add(request_id, 1, max_tokens=20, priority=5)
    world.step()
    world.add("urgent", 1, max_tokens=1, priority=0)
    plan = world.step()
    assert plan.preempted == ("c",)
    assert plan.num_scheduled_tokens["urgent"] == 1


def test_nobody_is_displaced_for_tokens_alone():
    """They come back with the next step, and what the other one has computed does not."""
    world = priority_world(num_blocks=64, max_num_batched_tokens=8, max_prefill_share=1.0)
    world.add("low", 60, max_tokens=4, priority=5)
    world.step()
    world.add("urgent", 3, max_tokens=2, priority=0)
    plans = world.run()
    assert not any(plan.preemptions for plan in plans)


def test_an_urgent_giant_that_cannot_be_helped_costs_each_step_little():
    """It is asked of every running request in every step, so nothing may be counted anew for each of them."""
    world = priority_world(num_blocks=720, max_num_seqs=66, max_num_batched_tokens=5000, max_model_len=2200)
    for number in range(64):
        world.add(f"low{number}", 10, max_tokens=50, priority=5)
    world.add("resident", 2000, max_tokens=100, priority=-5)
    world.step()
    world.add("giant", 1100, max_tokens=100, priority=0)
    asked = []
    count = world.scheduler.kv.num_spare_blocks
    world.scheduler.kv.num_spare_blocks = lambda *args: asked.append(args) or count(*args)  # type: ignore[method-assign]
    plan = world.step()
    assert not plan.preemptions
    assert [(h.request_id, h.limit) for h in plan.held if h.request_id == "giant"] == [("giant", Limit.KV_BLOCKS)]
    assert len(asked) <= 3


def test_whoever_was_admitted_in_this_step_is_not_displaced_in_it():
    """Class 5 is due before the urgent request for its oldest member's sake, and its resumed member goes first; that
    one by itself is due after the urgent request."""

    class Grammar:
        is_ready = False

    grammar = Grammar()
    world = priority_world(num_blocks=12, block_size=4, max_num_seqs=2, priority_aging_s=10.0)
    world.add("oldest", 4, priority=5, grammar=grammar)
    world.clock.advance(10)
    world.add("first", 20, max_tokens=20, priority=0)
    world.step()
    world.add("resumed", 8, max_tokens=16, priority=5)
    while "resumed" not in world.step().preempted:
        pass
    world.finish("first")
    world.clock.advance(54 - world.clock())
    world.add("urgent", 4, max_tokens=20, priority=0)
    grammar.is_ready = True
    plan = world.step()
    assert [admitted.request_id for admitted in plan.admitted] == ["resumed", "oldest"]
    assert not plan.preemptions
    assert world.step().preempted, "in the next step it may be"
    world.run()


REQUESTS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 3)), min_size=2, max_size=7)


@settings(max_examples=200, deadline=None)
@given(requests=REQUESTS, urgent=st.integers(1, 24), num_seqs=st.integers(1, 5), num_tokens=st.sampled_from([6, 64]))
def test_displacement_is_of_strictly_lower_classes_and_none_of_them_could_be_spared(
    requests, urgent, num_seqs, num_tokens
):
    def run_until_urgent(without: tuple[str, ...]) -> tuple[World, StepPlan]:
        world = priority_world(
            num_blocks=10, block_size=4, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens,
            enable_prefix_caching=False, admission_lookahead=0, adaptive_watermark=False,
        )  # fmt: skip
        for number, (num_prompt, max_tokens, priority) in enumerate(requests):
            world.add(f"r{number}", num_prompt, max_tokens=max_tokens, priority=priority + 1)
        for _ in range(3):
            world.step()
        for request_id in without:
            world.finish(request_id)
        for request in list(world.scheduler.waiting):
            world.finish(request.request_id)
        world.add("urgent", urgent, max_tokens=1, priority=1)
        return world, world.step()

    world, plan = run_until_urgent(())
    displaced = tuple(p.request_id for p in plan.preemptions if p.in_favour_of == "urgent")
    assert all(world.requests[request_id].priority > 1 for request_id in displaced)
    if not displaced:
        return
    assert "urgent" in plan.num_scheduled_tokens
    for spared in combinations(displaced, len(displaced) - 1):
        _, other_plan = run_until_urgent(spared)
        is_enough = "urgent" in other_plan.num_scheduled_tokens and not other_plan.preemptions
        assert not is_enough, f"{spared} alone would have been enough"


# --- aging ---


@settings(max_examples=300, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(1, 9), st.integers(1, 6)), min_size=2, max_size=25
    ),
    aging_s=st.sampled_from([1, 3, 10]),
    num_blocks=st.integers(4, 12),
    max_num_seqs=st.integers(1, 3),
)
def test_aging_bounds_by_whom_a_request_is_overtaken_or_displaced(arrivals, aging_s, num_blocks, max_num_seqs):
    """Never by one of class q that arrives at or after t + (p - q) x aging, unless that one had run before. Times are
    whole seconds, so the comparison is exact."""
    world = priority_world(
        num_blocks=num_blocks, block_size=4, max_num_seqs=max_num_seqs, priority_aging_s=aging_s, admission_lookahead=0
    )
    due: dict[str, tuple[float, int]] = {}  # between equal times the earlier arrival goes first
    begun: set[str] = set()

    def look_at(plan: StepPlan) -> None:
        admitted = [a.request_id for a in plan.admitted]
        still = [r.request_id for r in world.scheduler.waiting if r.request_id not in plan.preempted]
        for position, request_id in enumerate(admitted):
            for passed_by in [*still, *admitted[position + 1 :]]:
                assert request_id in begun or due[request_id] < due[passed_by], f"{passed_by} overtaken: {plan}"
        for preemption in plan.preemptions:
            if preemption.in_favour_of in admitted:
                assert due[preemption.in_favour_of][0] < due[preemption.request_id][0]
        begun.update(admitted)

    for number, (wait_steps, priority, num_prompt, max_tokens) in enumerate(arrivals):
        for _ in range(wait_steps):
            if world.scheduler.has_unfinished:
                look_at(world.step())
        request_id = f"r{number}"
        world.add(request_id, min(num_prompt, 4 * num_blocks - max_tokens), max_tokens=max_tokens, priority=priority)
        due[request_id] = world.clock() + priority * aging_s, number
    while world.scheduler.has_unfinished:
        look_at(world.step())


def test_within_a_class_only_work_that_had_begun_goes_before_an_earlier_arrival():
    world = priority_world(max_num_seqs=1)
    for number in range(6):
        world.add(f"r{number}", 3, max_tokens=2, priority=1)
    admitted = [a.request_id for plan in world.run() for a in plan.admitted]
    assert admitted == [f"r{number}" for number in range(6)]


def test_endless_urgent_arrivals_do_not_starve_a_low_class():
    world = priority_world(max_num_seqs=1, priority_aging_s=3.0)
    world.add("low", 3, max_tokens=2, priority=10)
    number = 0
    while "low" not in world.reasons:
        world.add(f"urgent{number}", 3, max_tokens=2, priority=0)
        number += 1
        world.step()
        world.step()
        assert world.clock() < 10 * 3.0 + 10, "it goes before whoever arrives 30 s after it"
    assert world.clock() >= 30.0, "and not much earlier"


def test_the_victim_of_memory_pressure_is_of_the_class_that_is_due_last():
    world = priority_world(num_blocks=6, block_size=4)
    world.add("low", 7, max_tokens=12, priority=5)
    world.add("high", 7, max_tokens=12, priority=0)
    victims = [victim for plan in world.run() for victim in plan.preempted]
    assert set(victims) == {"low"}, "although it arrived first"


def test_unfinished_prompts_take_their_share_in_the_order_of_due_times():
    world = priority_world(max_num_batched_tokens=16, max_prefill_share=0.5)
    world.add("low", 60, max_tokens=1, priority=5)
    world.add("high", 60, max_tokens=1, priority=0)
    world.add("late", 60, max_tokens=1, priority=0)
    world.step()  # high and late have 8 tokens each
    world.step()
    assert list(world.step().num_scheduled_tokens) == ["high", "late"]
    order = world.scheduler.waiting.prefill_order([world.requests[r] for r in ("low", "late", "high")])
    assert [request.request_id for request in order][-1] == "low"


def test_beside_a_lower_class_an_equal_one_that_is_due_later_is_still_not_displaceable():
    world = priority_world(max_num_seqs=3)
    world.add("low", 3, max_tokens=9, priority=9)
    world.add("equal", 3, max_tokens=9, priority=5)
    world.step()
    urgent = world.add("urgent", 3, priority=5)
    urgent.arrival_s = -1.0
    found = world.scheduler.waiting.displaceable(urgent, world.scheduler.running)
    assert [request.request_id for request in found] == ["low"]
