"""Policy fcfs, and how any policy is chosen."""

import pytest
from worlds import World

from noria.core.policies import POLICIES
from noria.core.policies.fcfs import FcfsPolicy
from noria.errors import OptionError


def order(world: World) -> list[str]:
    return [request.request_id for request in world.scheduler.waiting.order()]


def test_requests_are_admitted_in_order_of_arrival():
    world = World(max_num_seqs=1)
    for request_id in "abcd":
        world.add(request_id, 3, max_tokens=1)
    admitted = [a.request_id for plan in world.run() for a in plan.admitted]
    assert admitted == list("abcd")


def test_resumed_requests_go_before_those_that_never_ran_and_keep_their_own_order():
    world = World(max_num_seqs=2)
    world.add("a", 3, max_tokens=20)
    world.add("b", 3, max_tokens=20)
    world.step()
    world.add("c", 3)
    world.preempt("b")
    world.preempt("a")
    assert order(world) == ["a", "b", "c"]


def test_priorities_and_tenants_change_nothing():
    world = World()
    for number, request_id in enumerate("abc"):
        world.add(request_id, 3, priority=-number, tenant=request_id)
    assert order(world) == ["a", "b", "c"]


def test_the_latest_arrival_gives_way_even_when_it_was_not_admitted_last():
    world = World(max_num_seqs=3)
    for request_id in "abc":
        world.add(request_id, 3, max_tokens=20)
    world.step()
    world.preempt("b")
    world.step()
    assert [r.request_id for r in world.scheduler.running] == ["a", "c", "b"]
    assert world.scheduler.waiting.victim(world.scheduler.running).request_id == "c"


@pytest.mark.parametrize("max_preemptions", [0, 1, 2, 3])
def test_whoever_was_preempted_often_enough_is_the_last_to_be_chosen(max_preemptions):
    world = World(max_preemptions=max_preemptions)
    for request_id in "abc":
        world.add(request_id, 3, max_tokens=40)
    world.step()
    for _ in range(max_preemptions):
        assert world.scheduler.waiting.victim(world.scheduler.running).request_id == "c"
        world.preempt("c")
        world.step()
    victim = world.scheduler.waiting.victim(world.scheduler.running)
    assert victim.request_id == ("b" if max_preemptions else "c"), "with 0 all are alike, and arrival decides"


def test_pressure_goes_round_once_somebody_has_had_enough():
    """Nobody is preempted more than `max_preemptions` times while somebody else may be chosen."""
    world = World(num_blocks=9, block_size=4, max_preemptions=1, adaptive_watermark=False, enable_prefix_caching=False)
    for request_id in "abcd":
        world.add(request_id, 7, max_tokens=25)
    for plan in world.run():
        for preemption in plan.preemptions:
            if preemption.num_preemptions > 1:
                spared = [r for r in plan.num_scheduled_tokens if world.requests[r].num_preemptions == 0]
                assert spared in ([], ["a"]) or all(r < preemption.request_id for r in spared)
    assert world.requests["a"].num_preemptions <= 1


class LastComeFirstServed(FcfsPolicy):
    """A policy of somebody else's."""

    def _dequeue(self):
        request = max(self, key=lambda r: r.arrival_number)
        self._discard(request)
        return request


def test_a_policy_of_ones_own_is_loaded_by_import_path():
    world = World(max_num_seqs=1, scheduling_policy=f"{__name__}:LastComeFirstServed")
    for request_id in "abc":
        world.add(request_id, 3, max_tokens=1)
    admitted = [a.request_id for plan in world.run() for a in plan.admitted]
    assert admitted == ["c", "b", "a"]


NOT_A_POLICY = 3


@pytest.mark.parametrize(
    "name", ["sjf", "", "no.such.module:Class", f"{__name__}:Nothing", f"{__name__}:NOT_A_POLICY", "worlds:World"]
)
def test_what_is_no_policy_is_refused_with_its_name_and_the_list(name):
    with pytest.raises(OptionError) as caught:
        World(scheduling_policy=name)
    message = str(caught.value)
    assert repr(name) in message
    assert all(policy in message for policy in POLICIES)
