"""Ending a request from outside, in every state, through the one release path."""

import pytest
from worlds import World

from noria.core.events import FinishReason
from noria.core.plan import StepPlan, StepResult
from noria.errors import EngineError


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


@pytest.mark.parametrize("reach", [queued, mid_prefill, after_first_token, decoding, resumed])
def test_a_request_that_fails_in_the_worker_ends_alone(reach):
    world = World(num_blocks=8, block_size=4, max_num_batched_tokens=8)
    reach(world)
    world.add("other", 2, max_tokens=6)
    plan = world.schedule()
    while "r" not in plan.num_scheduled_tokens:
        world.update(plan)
        plan = world.schedule()
    [last] = [event for event in world.update(plan, failed=["r"]) if event.request_id == "r"]
    assert (last.finish_reason, last.error, last.token_ids) == (FinishReason.ERROR, "out of smoke", ())
    following = world.schedule()
    assert "r" in following.finished, "the worker is told"
    world.update(following)
    world.run()
    assert len(world.outputs["other"]) == 6
    assert world.reasons["other"] is FinishReason.LENGTH
    assert world.scheduler.kv.pool.num_free_blocks == world.config.num_blocks


def test_what_a_failed_request_computed_last_is_not_found():
    """Eight tokens fill two blocks; a step that fails must leave none of them to the next prompt that begins alike."""
    world = World(num_blocks=8, block_size=4)
    world.add("r", list(range(100, 109)))
    world.update(world.schedule(), failed=["r"])
    world.add("again", list(range(100, 109)))
    [again] = world.step().admitted
    assert again.num_computed_tokens == 0


@pytest.mark.parametrize(
    "result",
    [
        StepResult({"r": (7,)}, failed={"r": "has a token all the same"}),
        StepResult({"r": (7,)}, failed={"stranger": "did not run"}),
    ],
)
def test_a_failure_that_the_plan_does_not_know_is_refused(result: StepResult):
    world = World()
    world.add("r", 6)
    plan: StepPlan = world.schedule()
    with pytest.raises(EngineError, match="fail, which the plan did not run or which have tokens"):
        world.scheduler.update(plan, result, world.clock())
