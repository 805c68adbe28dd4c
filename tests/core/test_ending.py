"""Ending a request from outside, in every state, through the one release path."""

import pytest
from worlds import World

from noria.core.events import FinishReason


def queued(world: World) -> None:
    world.add("r", 6)


def mid_prefill(world: World) -> None:
    world.add("r", 20)
    world.step()


def after_first_token(world: World) -> None:
    world.add("r", 6)
    world.step()


def decoding(world: World) -> None:
    world.add("r", 6, max_tokens=20)
    for _ in range(5):
        world.step()


def preempted(world: World) -> None:
    world.add("first", 7, max_tokens=20)
    world.add("r", 7, max_tokens=20)
    while not world.requests["r"].num_preemptions:
        world.step()


def resumed(world: World) -> None:
    preempted(world)
    world.finish("first")
    world.step()


STATES = [queued, mid_prefill, after_first_token, decoding, preempted, resumed]


@pytest.mark.parametrize("reach", STATES)
@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.STOP])
def test_finish_in_every_state_gives_everything_back(reach, reason):
    world = World(num_blocks=8, block_size=4, max_num_batched_tokens=8)
    reach(world)
    event = world.finish("r", reason)
    assert event is not None
    assert event.finish_reason is reason
    plan = world.step()
    assert "r" in plan.finished, "the worker is told"
    assert "r" not in plan.num_scheduled_tokens
    world.run()
    assert world.scheduler.kv.pool.num_free_blocks == world.config.num_blocks
    assert world.finish("r") is None, "a second time is no error"


@pytest.mark.parametrize("reach", STATES)
def test_finish_between_schedule_and_update(reach):
    world = World(num_blocks=8, block_size=4, max_num_batched_tokens=8)
    reach(world)
    plan = world.schedule()
    assert world.finish("r") is not None
    events = world.update(plan)
    assert "r" not in {event.request_id for event in events}, "late tokens are dropped"
    world.run()
    assert world.scheduler.kv.pool.num_free_blocks == world.config.num_blocks


def test_an_id_may_return_in_the_very_step_it_ended_in():
    world = World()
    world.add("r", [1, 2, 3], max_tokens=20)
    world.step()
    plan = world.schedule()
    world.finish("r")
    world.reasons.clear()
    world.add("r", [4, 5, 6, 7], max_tokens=2)
    world.update(plan)
    assert world.outputs["r"] == []
    plan = world.step()
    assert plan.finished == ("r",)
    assert plan.num_scheduled_tokens == {"r": 4}
    world.run()
    assert len(world.outputs["r"]) == 2


def test_unknown_ids_are_no_error():
    assert World().finish("nobody") is None
