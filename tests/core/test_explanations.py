"""Why a request is where it is: limits in plans, explanations for one request, records of what happened."""

import pytest
from worlds import World

from noria.core.explain import Explanation, explain
from noria.core.plan import Limit
from noria.core.scheduler import PauseMode
from noria.kv.events import AllCleared, BlockRemoved, BlockStored
from noria.kv.prefix import PrefixKey


class Grammar:
    is_ready = False


def why(world: World, request_id: str) -> Explanation:
    explanation = explain(world.scheduler, request_id)
    assert explanation is not None
    return explanation


def token_budget() -> World:
    world = World(max_num_batched_tokens=4)
    world.add("it", 9)
    world.step()
    return world


def long_prefill() -> World:
    world = World(max_num_batched_tokens=8, long_prefill_token_threshold=3)
    world.add("it", 20)
    world.add("other", 20)
    world.add("another", 20)
    world.step()
    return world


def prefill_share() -> World:
    world = World(max_num_batched_tokens=16, max_prefill_share=0.5)
    for request_id in ("other", "and another", "it"):
        world.add(request_id, 20)
    world.step()
    return world


def max_num_seqs() -> World:
    world = World(max_num_seqs=1)
    world.add("other", 3)
    world.add("it", 3)
    world.step()
    return world


def kv_blocks() -> World:
    world = World(num_blocks=8, block_size=4)
    world.add("other", 20)
    world.add("it", 20)
    world.step()
    return world


def prefix_being_computed() -> World:
    world = World(block_size=4, max_num_batched_tokens=8, max_prefill_share=0.5)
    world.add("other", range(50, 70))
    world.add("it", range(50, 70))
    world.step()
    return world


def grammar() -> World:
    world = World()
    world.add("it", 3, grammar=Grammar())
    world.step()
    return world


def adapters() -> World:
    world = World(max_adapters=1)
    world.add("other", 3, prefix_key=PrefixKey(adapter="x"))
    world.add("it", 3, prefix_key=PrefixKey(adapter="y"))
    world.step()
    return world


def paused() -> World:
    world = World()
    world.add("it", 3)
    world.scheduler.pause(PauseMode.WAIT, 0.0)
    world.step()
    return world


def admission_scan() -> World:
    world = World(max_num_looks=2)
    for number in range(2):
        world.add(f"other{number}", 3, grammar=Grammar())
    world.add("it", 3)
    world.step()
    return world


def preempting_step() -> World:
    world = World(num_blocks=4, block_size=4)
    world.add("a", 7, max_tokens=9)
    world.add("b", 7, max_tokens=9)
    world.step()
    world.add("it", 3)
    while not world.step().preemptions:
        pass
    return world


@pytest.mark.parametrize("limit", list(Limit))
def test_every_limit_is_named_to_whom_it_holds(limit):
    makers = {
        Limit.TOKEN_BUDGET: token_budget,
        Limit.LONG_PREFILL: long_prefill,
        Limit.PREFILL_SHARE: prefill_share,
        Limit.MAX_NUM_SEQS: max_num_seqs,
        Limit.KV_BLOCKS: kv_blocks,
        Limit.PREFIX_BEING_COMPUTED: prefix_being_computed,
        Limit.GRAMMAR: grammar,
        Limit.ADAPTERS: adapters,
        Limit.PAUSED: paused,
        Limit.ADMISSION_SCAN: admission_scan,
        Limit.PREEMPTING_STEP: preempting_step,
    }
    world = makers[limit]()
    explanation = why(world, "it")
    assert explanation.limit is limit
    assert str(limit) in str(explanation)


def test_a_waiting_request_is_told_its_place_and_queue():
    world = World(max_num_seqs=1, scheduling_policy="priority")
    world.add("running", 3, max_tokens=20)
    world.step()
    for request_id, priority in [("a", 2), ("b", 1), ("c", 3)]:
        world.add(request_id, 3, priority=priority)
    assert [why(world, r).position for r in "abc"] == [1, 0, 2]
    assert why(world, "a").queue == "priority"
    assert str(why(world, "a")) == "a: waiting, 0 of 3 tokens computed, number 2 in the priority queue"


def test_a_running_request_that_advances_fully_has_no_limit():
    world = World()
    world.add("r", 3, max_tokens=20)
    world.step()
    assert (why(world, "r").limit, why(world, "r").position) == (None, None)


def test_whoever_came_after_the_last_plan_is_told_no_limit():
    world = World(max_num_seqs=1)
    world.add("running", 3)
    world.add("behind", 3)
    world.step()
    world.add("late", 3)
    assert explain(world.scheduler, "behind").limit is Limit.MAX_NUM_SEQS
    assert explain(world.scheduler, "late").limit is None


def test_who_was_displaced_for_a_slot_is_told_so():
    world = World(max_num_seqs=1, scheduling_policy="priority")
    world.add("low", 3, max_tokens=9, priority=5)
    world.step()
    world.add("urgent", 3, priority=0)
    world.step()
    found = explain(world.scheduler, "low")
    assert (found.limit, found.detail) == (Limit.MAX_NUM_SEQS, "gave way to urgent")


def test_a_victim_is_told_for_whom_it_gave_way():
    world = preempting_step()
    explanation = why(world, "b")
    assert explanation.state == "preempted"
    assert explanation.limit is Limit.KV_BLOCKS
    assert explanation.detail == f"gave way to {world.scheduler.records[-1].plan.preemptions[0].in_favour_of}"
    assert explanation.num_preemptions == 1


def test_whoever_has_ended_or_never_was_has_no_explanation():
    world = World()
    world.add("r", 3)
    world.run()
    assert explain(world.scheduler, "r") is None
    assert explain(world.scheduler, "nobody") is None


def test_all_that_nobody_looked_at_share_one_entry():
    world = World(max_num_seqs=2, max_num_batched_tokens=64)
    for number in range(1000):
        world.add(f"r{number}", 3)
    plan = world.step()
    assert plan.held == ()
    assert plan.admission_end is not None
    assert (plan.admission_end.limit, plan.admission_end.num_behind) == (Limit.MAX_NUM_SEQS, 998)
    assert why(world, "r500").position == 498


# --- records ---


def test_every_preemption_is_recorded_with_its_cost():
    world = World(num_blocks=8, block_size=4, enable_prefix_caching=False)
    for request_id in "abc":
        world.add(request_id, 7, max_tokens=14)
    lost = dict.fromkeys("abc", 0)
    count = dict.fromkeys("abc", 0)
    while world.scheduler.has_unfinished:
        computed = {r.request_id: r.num_computed for r in world.scheduler.running}
        blocks = {r: len(world.scheduler.kv.block_ids(r)) for r in computed}
        plan = world.step()
        assert world.scheduler.records[-1].plan.preemptions == plan.preemptions
        for preemption in plan.preemptions:
            victim = preemption.request_id
            count[victim] += 1
            lost[victim] += computed[victim]
            assert preemption.num_tokens_lost == computed[victim]
            assert preemption.num_blocks_freed == blocks[victim]
            assert preemption.num_preemptions == count[victim]
    assert sum(count.values()) > 0
    endings = {e.request_id: e for record in world.scheduler.records for e in record.endings}
    assert {r: (e.num_preemptions, e.num_tokens_lost) for r, e in endings.items()} == {
        r: (count[r], lost[r]) for r in "abc"
    }


def test_records_know_how_the_pool_is_used():
    world = World(num_blocks=8, block_size=4)
    world.add("a", 9, max_tokens=3)
    world.step()
    usage = world.scheduler.records[-1].kv
    assert (usage.num_held, usage.num_cached_idle, usage.num_blank, usage.num_unused_slots) == (3, 0, 5, 3)
    world.run()
    usage = world.scheduler.records[-1].kv
    assert (usage.num_held, usage.num_cached_idle, usage.num_blank, usage.num_unused_slots) == (0, 2, 6, 0)


# --- KV events ---


def test_a_subscriber_can_follow_what_is_findable():
    """Replaying the events gives exactly the index of the pool, in every step and also across a reset."""
    world = World(num_blocks=6, block_size=4)
    findable: dict[bytes, bytes | None] = {}
    batches = []

    def follow(events) -> None:
        batches.append(events)
        for event in events:
            match event:
                case BlockStored(block_hash=block_hash, parent_hash=parent):
                    assert block_hash not in findable
                    findable[block_hash] = parent
                case BlockRemoved(block_hash=block_hash):
                    del findable[block_hash]
                case AllCleared():
                    findable.clear()

    world.scheduler.kv.subscribe(follow)
    for number in range(12):
        world.add(f"r{number}", range(50 * (number % 4), 50 * (number % 4) + 6 + number), max_tokens=3)
        num_batches = len(batches)
        world.step()
        assert len(batches) <= num_batches + 1, "one batch per step at most"
        assert findable.keys() == world.scheduler.kv.pool._block_of.keys()
        if number == 6:
            world.scheduler.reset_prefix_cache()
    world.run()
    kinds = {type(event) for batch in batches for event in batch}
    assert kinds == {BlockStored, BlockRemoved, AllCleared}


def test_stored_blocks_are_named_with_their_tokens_and_parents():
    world = World(block_size=4)
    stored = []
    world.scheduler.kv.subscribe(stored.extend)
    world.add("r", [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1)
    world.run()
    assert [event.token_ids for event in stored] == [(1, 2, 3, 4), (5, 6, 7, 8)]
    assert [event.parent_hash for event in stored] == [None, stored[0].block_hash]
