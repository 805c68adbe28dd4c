"""Deadlines, pauses, draining: how time and operators end or stop requests."""

import pytest
from worlds import World

from noria.core.events import FinishReason
from noria.core.explain import explain
from noria.core.plan import Limit
from noria.core.scheduler import PauseMode
from noria.errors import UnavailableError

# --- deadlines ---


def test_a_request_without_a_token_by_its_deadline_ends_at_that_very_moment():
    world = World(max_num_seqs=1, first_token_deadline_s=5.0)
    world.add("running", 3, max_tokens=30)
    world.step()
    world.add("waiting", 3)  # at 1 s
    for _ in range(4):
        world.step()
    assert world.clock() == 5.0
    assert "waiting" not in world.reasons
    world.step()  # planned at 5 s: 4 s have passed
    assert "waiting" not in world.reasons
    world.step()  # planned at 6 s
    assert world.reasons == {"waiting": FinishReason.TIMEOUT}


def test_the_first_token_in_time_meets_the_first_deadline_for_good():
    world = World(first_token_deadline_s=2.0)
    world.add("r", 3, max_tokens=20)
    world.run()
    assert world.reasons == {"r": FinishReason.LENGTH}


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_request_that_is_not_done_in_time_ends_and_its_blocks_are_free_in_the_same_step(is_waiting):
    world = World(num_blocks=8, block_size=4, request_deadline_s=4.0, admission_lookahead=0)
    world.add("overdue", 10, max_tokens=20)
    for _ in range(4):
        world.step()
    if is_waiting:
        world.preempt("overdue")
    world.add("next", 31, max_tokens=1)  # the whole pool
    plan = world.schedule()
    assert plan.finished == ("overdue",)
    assert "next" in plan.num_scheduled_tokens
    world.update(plan)
    assert world.reasons["overdue"] is FinishReason.TIMEOUT


def test_the_message_and_the_code_say_what_was_waited_for():
    world = World(first_token_deadline_s=3.0, request_deadline_s=4.0)
    world.scheduler.pause(PauseMode.KEEP, 0.0)
    world.add("r", 3)
    world.clock.advance(3.5)
    [event] = world.update(world.schedule())
    assert event.error_code == "deadline_exceeded"
    assert event.error == (
        "the request waited 3.5 s for its first token, over the server's limit of 3 s; it has 0 output tokens and was "
        "waiting"
    )


def test_deadlines_pass_while_everything_stands_still():
    world = World(request_deadline_s=4.0)
    world.add("r", 3, max_tokens=20)
    world.step()
    world.scheduler.pause(PauseMode.KEEP, world.clock())
    assert not world.scheduler.has_work(3.9)
    assert world.scheduler.has_work(4.0)
    world.clock.advance(3.0)
    world.step()
    assert world.reasons == {"r": FinishReason.TIMEOUT}
    assert world.scheduler.kv.pool.num_free_blocks == world.config.num_blocks


def test_deadlines_of_requests_that_ended_are_dropped():
    world = World(request_deadline_s=1e6, max_num_seqs=4)
    for number in range(500):
        world.add(f"r{number}", 2, max_tokens=1)
        world.step()
    assert len(world.scheduler._deadlines._heap) <= 100


def test_without_limits_nobody_is_ever_overdue():
    world = World()
    world.add("r", 3)
    world.clock.advance(1e9)
    world.run()
    assert world.reasons == {"r": FinishReason.LENGTH}


# --- pauses ---


def three_in_all_states(**config) -> World:
    """One runs, one was preempted, one waits."""
    world = World(**{"max_num_seqs": 2} | config)
    world.add("running", 5, max_tokens=6)
    world.add("preempted", 5, max_tokens=6)
    world.step()
    world.add("waiting", 5, max_tokens=6)
    world.preempt("preempted")
    return world


def test_pause_abort_ends_everybody_and_lets_others_wait():
    world = three_in_all_states()
    for event in world.scheduler.pause(PauseMode.ABORT, world.clock()):
        world.note(event)
    assert world.reasons == dict.fromkeys(["running", "preempted", "waiting"], FinishReason.ABORT)
    world.step()
    assert world.scheduler.kv.pool.num_free_blocks == world.config.num_blocks
    world.add("new", 3)
    assert world.step().is_empty
    assert not world.scheduler.has_work(world.clock())
    world.scheduler.resume()
    world.run()
    assert world.reasons["new"] is FinishReason.LENGTH


def test_pause_wait_finishes_what_has_begun_and_nothing_else():
    world = three_in_all_states()
    world.scheduler.pause(PauseMode.WAIT, world.clock())
    assert not world.scheduler.is_quiet
    while world.scheduler.has_work(world.clock()):
        plan = world.step()
        assert "waiting" not in plan.num_scheduled_tokens
    assert world.scheduler.is_quiet
    assert world.reasons == dict.fromkeys(["running", "preempted"], FinishReason.LENGTH)
    explanation = explain(world.scheduler, "waiting")
    assert explanation is not None
    assert explanation.limit is Limit.PAUSED
    world.scheduler.resume()
    world.run()


def test_pause_keep_freezes_everything_and_loses_nothing():
    world, undisturbed = three_in_all_states(), three_in_all_states()
    world.scheduler.pause(PauseMode.KEEP, world.clock())
    running = world.scheduler.kv.block_ids("running")
    for _ in range(3):
        assert world.step().is_empty
    assert world.scheduler.kv.block_ids("running") == running
    assert not world.scheduler.has_work(world.clock())
    world.scheduler.resume()
    world.run()
    undisturbed.run()
    assert world.outputs == undisturbed.outputs


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm", "fair"])
@pytest.mark.parametrize("mode", list(PauseMode))
def test_every_pause_ends_well_under_every_policy(mode, policy):
    world = three_in_all_states(scheduling_policy=policy)
    for event in world.scheduler.pause(mode, world.clock()):
        world.note(event)
    for _ in range(20):
        world.step()
    world.scheduler.resume()
    world.run()
    assert world.reasons.keys() == {"running", "preempted", "waiting"}


def test_a_request_may_be_aborted_while_paused():
    world = three_in_all_states()
    world.scheduler.pause(PauseMode.KEEP, world.clock())
    for request_id in list(world.requests):
        assert world.finish(request_id) is not None
    world.step()
    assert world.scheduler.kv.pool.num_free_blocks == world.config.num_blocks


# --- draining ---


def test_draining_finishes_what_there_is_and_takes_nothing_new():
    world = three_in_all_states()
    world.scheduler.drain()
    with pytest.raises(UnavailableError, match="draining") as caught:
        world.add("new", 3)
    assert caught.value.code == "draining"
    world.run()
    assert world.reasons == dict.fromkeys(["running", "preempted", "waiting"], FinishReason.LENGTH)
