"""What the limits on steps, on overtaking and on waiting promise, one by one."""

import pytest
from worlds import World

from noria.core.events import FinishReason
from noria.core.plan import Limit
from noria.errors import UnavailableError

# --- how unfinished prompts share a step ---


def test_one_prompt_takes_no_more_than_its_share_while_others_can_use_the_rest():
    world = World(max_num_batched_tokens=16, max_prefill_share=0.5)
    world.add("giant", 60, max_tokens=1)
    world.add("other", 8, max_tokens=1)
    plan = world.step()
    assert plan.num_scheduled_tokens == {"giant": 8, "other": 8}
    assert [(h.request_id, h.limit) for h in plan.held] == [("giant", Limit.PREFILL_SHARE)]


def test_what_nobody_else_can_use_goes_to_the_prompt_that_was_cut():
    world = World(max_num_batched_tokens=16, max_prefill_share=0.5)
    world.add("giant", 60, max_tokens=1)
    world.add("other", 3, max_tokens=1)
    plan = world.step()
    assert plan.num_scheduled_tokens == {"giant": 13, "other": 3}
    assert [(h.request_id, h.limit) for h in plan.held] == [("giant", Limit.TOKEN_BUDGET)]


def test_a_lone_prompt_has_the_whole_step():
    world = World(max_num_batched_tokens=16, max_prefill_share=0.25, long_prefill_token_threshold=2)
    world.add("giant", 60, max_tokens=1)
    assert world.step().num_scheduled_tokens == {"giant": 16}


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("num_decodes", [0, 3])
def test_every_unfinished_prompt_gets_half_of_an_equal_share_in_every_step(num_decodes, share):
    """Or all that it still needs, or the cap on a single prompt."""
    budget = 40
    world = World(num_blocks=256, max_num_batched_tokens=budget, max_prefill_share=share)
    for i in range(num_decodes):
        world.add(f"decode{i}", 2, max_tokens=100)
    world.step()
    for i in range(4):
        world.add(f"prompt{i}", 37 if i == 0 else 90, max_tokens=1)
    num_shared_steps = 0
    while world.scheduler.has_unfinished and any(f"prompt{i}" not in world.reasons for i in range(4)):
        unfinished = {r.request_id: r.num_remaining for r in world.scheduler.running if not r.is_caught_up}
        plan = world.step()
        if unfinished:
            floor = min(int(budget * share), (budget - num_decodes) // (2 * len(unfinished)))
            num_shared_steps += len(unfinished) > 1
            for request_id, num_remaining in unfinished.items():
                assert plan.num_scheduled_tokens[request_id] >= min(floor, num_remaining)
    assert num_shared_steps >= (2 if share < 0.9 else 0)


# --- going past a request that waits for memory ---


def held_large_request(**config: object) -> World:
    """`runs` leaves 12 of 20 blocks, `large` needs 15, and many small ones stand behind it."""
    world = World(num_blocks=20, max_num_batched_tokens=64, max_num_seqs=12, **config)
    world.add("runs", 26, max_tokens=30)
    world.step()
    world.add("large", 60, max_tokens=4)
    for i in range(8):
        world.add(f"small{i}", 3, max_tokens=1)
    return world


def admitted_in(world: World) -> list[str]:
    return [admitted.request_id for admitted in world.step().admitted]


@pytest.mark.parametrize("num_looks", [1, 3, 5])
def test_no_more_than_so_many_are_looked_at_past_one_that_waits_for_memory(num_looks):
    world = held_large_request(admission_lookahead=num_looks)
    assert admitted_in(world) == [f"small{i}" for i in range(num_looks)]


def test_nobody_goes_past_a_request_that_has_waited_for_memory_for_so_long():
    world = held_large_request(admission_lookahead=1, lookahead_age_limit_s=3.0)
    assert [admitted_in(world) for _ in range(5)] == [["small0"], ["small1"], ["small2"], [], []]
    world.run()
    assert len(world.outputs["large"]) == 4


def test_without_look_ahead_nobody_goes_past_it():
    world = held_large_request(admission_lookahead=0)
    assert admitted_in(world) == []


# --- deadlines ---


def test_a_request_without_a_token_by_its_deadline_ends_and_says_why():
    world = World(max_num_seqs=1, first_token_deadline_s=3.0)
    world.add("first", 4, max_tokens=9)
    world.add("late", 4, max_tokens=9)
    for _ in range(3):
        world.step()
    assert "late" not in world.reasons
    events = world.update(world.schedule())
    [event] = [e for e in events if e.request_id == "late"]
    assert (event.finish_reason, event.error_code) == (FinishReason.TIMEOUT, "deadline_exceeded")
    assert "limit of 3 s" in (event.error or "")
    world.run()
    assert world.reasons["first"] is FinishReason.LENGTH, "it had its first token in time"


def test_a_request_that_has_not_ended_by_its_deadline_keeps_what_it_has_said():
    world = World(request_deadline_s=5.0)
    world.add("long", 4, max_tokens=50)
    world.add("short", 4, max_tokens=3)
    world.run()
    assert world.reasons == {"short": FinishReason.LENGTH, "long": FinishReason.TIMEOUT}
    assert len(world.outputs["long"]) == 5
    assert world.scheduler.kv.pool.num_free_blocks == world.config.num_blocks


def test_a_deadline_wakes_an_engine_that_has_nothing_else_to_do():
    world = World(request_deadline_s=5.0)
    world.scheduler.pause("keep", world.clock())
    world.add("r", 4)
    world.step()  # its arrival is news; after that there is nothing to do
    assert not world.scheduler.has_work(4.9)
    assert world.scheduler.has_work(5.0)


def test_deadlines_that_were_met_do_not_pile_up():
    world = World(first_token_deadline_s=1000.0, request_deadline_s=2000.0)
    for i in range(500):
        world.add(f"r{i}", 4, max_tokens=1)
        world.step()
    assert len(world.scheduler._deadlines._heap) <= 64 + 4


# --- drafts ---


def test_nobody_is_preempted_for_a_guess():
    """Each guess would need three more blocks, and the pool has just what the requests themselves come to need."""
    world = World(num_blocks=6, block_size=2, max_num_batched_tokens=20, drafter=lambda request: (1, 1, 1, 1, 1, 1))
    world.add("a", 3, max_tokens=9)
    world.add("b", 3, max_tokens=4)
    plans = world.run()
    assert any(plan.drafts for plan in plans)
    assert not any(plan.preempted for plan in plans)


def test_a_guess_takes_no_block_that_an_admitted_prompt_still_needs():
    world = World(num_blocks=11, block_size=2, max_num_batched_tokens=8, drafter=lambda request: (1, 1, 1, 1))
    world.add("a", 1, max_tokens=20)
    world.step()
    world.add("prompt", 15, max_tokens=1)
    plans = world.run()
    assert any(plan.drafts for plan in plans)
    assert not any(plan.preempted for plan in plans)


# --- the queue, and memory kept for those who run ---


def test_the_queue_takes_so_many_beyond_those_that_may_run_and_refuses_with_the_numbers():
    world = World(max_num_seqs=2, max_num_queued_reqs=3)
    for i in range(5):
        world.add(f"r{i}", 4)
    with pytest.raises(UnavailableError, match="0 requests run and 5 wait, at most 2 may run and 3 more wait"):
        world.add("one too many", 4)
    world.finish("r4")
    world.add("another", 4)


def test_the_watermark_keeps_nobody_out_of_an_idle_engine():
    world = World(num_blocks=8, watermark=1.0)
    world.add("a", 20, max_tokens=4)
    world.add("b", 4, max_tokens=4)
    assert list(world.step().num_scheduled_tokens) == ["a"]
    world.run()
    assert (len(world.outputs["a"]), len(world.outputs["b"])) == (4, 4)
