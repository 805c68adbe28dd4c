"""Prefix caching: what is found, what is recomputed, who waits for whom."""

import pytest
from worlds import World, solo_output

from noria.core.admitting import Admitting
from noria.core.chunks import ChunkRule
from noria.core.draft import PlanDraft
from noria.core.plan import Limit
from noria.kv.prefix import PrefixKey


def prompt_of(num_tokens: int, start: int = 50) -> list[int]:
    return list(range(start, start + num_tokens))


@pytest.mark.parametrize(
    ("num_prompt", "num_cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (32, 28), (33, 32)]
)
def test_hits_are_whole_blocks_and_at_most_all_but_the_last_token(num_prompt, num_cached):
    world = World(block_size=4)
    world.add("cold", prompt_of(num_prompt))
    world.run()
    world.add("warm", prompt_of(num_prompt))
    plan = world.schedule()
    assert plan.num_scheduled_tokens == {"warm": num_prompt - num_cached}
    world.update(plan)
    world.run()
    assert world.requests["warm"].num_cached_tokens == num_cached
    assert world.outputs["warm"] == world.outputs["cold"]


def test_an_aligned_full_hit_recomputes_its_last_block_into_a_private_one():
    """The runner refuses writes into shared blocks; here the first request still holds them."""
    world = World(block_size=4)
    world.add("a", prompt_of(8), max_tokens=20)
    world.step()
    world.add("b", prompt_of(8), max_tokens=3)
    plan = world.schedule()
    [admitted] = plan.admitted
    a_blocks = world.scheduler.kv.block_ids("a")
    assert admitted.block_ids[0] == a_blocks[0]
    assert admitted.block_ids[1] != a_blocks[1]
    world.update(plan)
    world.run()
    assert world.outputs["b"] == world.outputs["a"][:3]


def test_equal_prompts_that_arrive_together_cost_about_one():
    world = World(num_blocks=4096, block_size=16, max_num_batched_tokens=512, max_num_seqs=64)
    for i in range(32):
        world.add(f"r{i}", prompt_of(512), max_tokens=4)
    world.run()
    num_prompt_tokens_computed = world.runner.num_tokens_computed - 32 * 3  # the last output is never computed
    assert num_prompt_tokens_computed <= 512 + 31 * 16
    assert len({tuple(output) for output in world.outputs.values()}) == 1


def test_the_wait_for_a_prefix_names_who_computes_it_and_others_go_by():
    world = World(block_size=4, max_num_batched_tokens=16)
    world.add("a", prompt_of(24))
    world.step()  # a has 16 of 24
    world.add("b", prompt_of(24))
    world.add("c", prompt_of(5, start=900))
    plan = world.step()
    assert [(h.request_id, h.limit, h.detail) for h in plan.held if h.request_id == "b"] == [
        ("b", Limit.PREFIX_BEING_COMPUTED, "by a")
    ]
    assert plan.num_scheduled_tokens == {"a": 8, "c": 5}, "a different prompt behind it is not held up"
    plan = world.step()
    assert plan.num_scheduled_tokens["b"] == 4


def test_those_who_wait_keep_their_order_and_who_was_not_looked_at_is_told_so():
    world = World(num_blocks=64, block_size=4, max_num_looks=3, max_num_batched_tokens=64)
    prompt = list(range(100, 112))
    for i in range(4):
        world.add(f"same{i}", [*prompt, i])
    world.add("other", 5)
    plan = world.step()
    assert [held.request_id for held in plan.held] == ["same1", "same2", "same3"]
    assert plan.admission_end is not None
    assert plan.admission_end.limit is Limit.ADMISSION_SCAN, "nobody computes a prefix of the other one"
    assert [request.request_id for request in world.scheduler.waiting.order()] == ["same1", "same2", "same3", "other"]


def test_the_wait_ends_when_the_one_that_computes_is_gone():
    world = World(block_size=4, max_num_batched_tokens=16)
    world.add("a", prompt_of(40))
    world.step()
    world.add("b", prompt_of(40))
    world.finish("a")
    plan = world.step()
    assert plan.num_scheduled_tokens == {"b": 16}
    assert world.requests["b"].num_cached_tokens == 16, "what a had computed is still found"


def test_the_wait_stands_only_while_the_other_one_advances():
    """A step that leaves the computing request out (as a cap on prefills could) must not hold its followers too."""
    world = World(block_size=4, max_num_batched_tokens=16)
    world.add("a", prompt_of(24))
    world.step()
    world.add("b", prompt_of(24))
    draft = PlanDraft(8)
    Admitting(world.scheduler, draft, ChunkRule(world.config, is_alone=False), world.clock()).run()
    assert draft.is_scheduled("b")


def test_a_half_computed_block_is_not_found():
    world = World(block_size=4, max_num_batched_tokens=14)
    world.add("a", prompt_of(40))
    world.step()  # 14 tokens: three blocks and a half
    world.finish("a")
    world.add("b", prompt_of(40))
    world.step()
    assert world.requests["b"].num_cached_tokens == 12


def test_blocks_of_a_step_that_was_planned_but_not_executed_are_not_found():
    world = World(block_size=4)
    world.add("a", prompt_of(12))
    world.schedule()  # planned; the worker dies before it runs
    world.finish("a")
    world.add("b", prompt_of(12))
    assert world.schedule().num_scheduled_tokens == {"b": 12}


def test_outputs_are_cached_too():
    world = World(block_size=4)
    world.add("a", prompt_of(6), max_tokens=8)
    world.run()
    follow_up = prompt_of(6) + world.outputs["a"] + [1, 2, 3]
    world.add("b", follow_up)
    world.step()
    assert world.requests["b"].num_cached_tokens == 12  # 13 computed tokens: the last output never was


def test_leaves_are_evicted_before_their_parents():
    world = World(num_blocks=4, block_size=4)
    world.add("a", prompt_of(13), max_tokens=1)
    world.run()  # three full blocks stay idle, and one blank
    world.add("other", prompt_of(5, start=900), max_tokens=1)
    world.run()  # takes the blank one and the least valuable of the three
    world.add("again", prompt_of(13), max_tokens=1)
    world.step()
    assert world.requests["again"].num_cached_tokens == 8


def test_keys_keep_prefixes_apart():
    world = World(block_size=4)
    keys = [
        PrefixKey(),
        PrefixKey(tenant="t"),
        PrefixKey(salt="t"),
        PrefixKey(adapter="t"),
        PrefixKey(weights_version="t"),
        PrefixKey(tenant="t", salt="t"),
    ]
    for i, key in enumerate(keys * 2):
        request = world.add(f"r{i}", prompt_of(13), prefix_key=key)
        world.run()
        assert request.num_cached_tokens == (0 if i < len(keys) else 12)


def test_whoever_waits_while_the_weights_change_is_known_by_the_new_ones():
    world = World(block_size=4, max_num_seqs=1)
    world.scheduler.weights_version = "W1"
    world.add("running", 5, max_tokens=3)
    world.step()
    world.add("waiting", prompt_of(13), max_tokens=1)
    world.scheduler.weights_version = "W2"
    world.run()
    assert world.add("later", prompt_of(13), max_tokens=1).num_cached_tokens is None
    world.run()
    assert world.requests["later"].num_cached_tokens == 12
    world.scheduler.weights_version = "W1"
    world.add("back", prompt_of(13), max_tokens=1)
    world.run()
    assert world.requests["back"].num_cached_tokens == 0


def test_caching_can_be_switched_off():
    world = World(block_size=4, enable_prefix_caching=False)
    for request_id in ("a", "b"):
        world.add(request_id, prompt_of(16))
        world.run()
    world.add("c", prompt_of(16))
    world.add("d", prompt_of(16))
    plan = world.step()
    assert plan.num_scheduled_tokens == {"c": 16, "d": 16}
    assert len({tuple(output) for output in world.outputs.values() if output and len(output) == 4}) == 1


def test_reset_makes_everything_unfindable_and_disturbs_nobody():
    world = World(block_size=4)
    world.add("a", prompt_of(16), max_tokens=12)
    world.step()
    world.scheduler.kv.reset_prefix_cache()
    world.scheduler.check()
    world.add("b", prompt_of(16), max_tokens=12)
    world.run()
    assert world.requests["b"].num_cached_tokens == 0
    assert world.outputs["a"] == world.outputs["b"] == solo_output(prompt_of(16), max_tokens=12)
