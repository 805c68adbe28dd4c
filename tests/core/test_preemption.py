"""Memory pressure: who gives way, and that nobody can tell from the output."""

import pytest
from histories import FakeGrammar
from worlds import World, solo_output

from noria.core.plan import Limit


def test_the_last_running_request_gives_way_and_returns_to_the_front():
    world = World(num_blocks=5, block_size=4, max_num_seqs=2)
    world.add("a", 7, max_tokens=10)
    world.add("b", 6, max_tokens=10)
    world.add("c", 2, max_tokens=1)  # waits for a slot all the while
    preempting = None
    for _ in range(40):
        plan = world.step()
        if plan.preempted:
            preempting = plan
            break
    assert preempting is not None
    assert preempting.preempted == ("b",)
    assert [request.request_id for request in world.scheduler.waiting.order()] == ["b", "c"]
    assert not preempting.admitted, "a step that preempts admits nobody"
    world.run()
    assert all(len(world.outputs[r]) == world.requests[r].max_tokens for r in "abc")
    assert world.requests["b"].num_preemptions >= 1
    assert world.requests["a"].num_preemptions == 0, "the first running request is nobody's victim"


def test_a_preempting_step_says_why_it_admits_nobody():
    world = World(num_blocks=4, block_size=4)
    world.add("a", 7, max_tokens=9)
    world.add("b", 7, max_tokens=9)
    plans = world.run()
    preempting = [plan for plan in plans if plan.preempted]
    assert preempting
    assert all(p.admission_end is not None and p.admission_end.limit is Limit.PREEMPTING_STEP for p in preempting)


def test_a_preemption_that_the_worker_never_heard_of_is_told_again():
    """The step that preempts fails before it is executed: the victim's row must not stay behind in the worker."""
    world = World(num_blocks=4, block_size=4)
    world.add("a", 7, max_tokens=9)
    world.add("b", 7, max_tokens=9)
    while not (plan := world.schedule()).preempted:
        world.update(plan)
    for event in world.scheduler.abandon(plan, world.clock(), "out of smoke"):
        world.note(event)
    assert (plan.preempted, world.reasons) == (("b",), {"a": "error"})
    following = world.step()
    assert "b" in following.finished
    assert [admitted.request_id for admitted in following.admitted] == ["b"]
    world.run()
    assert len(world.outputs["b"]) == 9


def test_prompt_and_output_that_just_fit_alone_end_without_preempting():
    """28 + 4 tokens in a pool of exactly 32."""
    world = World(num_blocks=8, block_size=4)
    world.add("r", 28, max_tokens=4)
    plans = world.run()
    assert not any(plan.preempted for plan in plans)
    assert len(world.outputs["r"]) == 4


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_output", range(1, 14))
def test_preempted_requests_say_what_they_would_have_said(num_output, enable_prefix_caching):
    """Pressure at every output length over three blocks: same tokens as alone in a roomy pool."""
    world = World(num_blocks=6, block_size=4, max_num_batched_tokens=7, enable_prefix_caching=enable_prefix_caching)
    prompts = {r: [100 * i + t for t in range(6)] for i, r in enumerate("abc")}
    for request_id, prompt in prompts.items():
        world.add(request_id, prompt, max_tokens=num_output)
    world.run()
    for request_id, prompt in prompts.items():
        assert world.outputs[request_id] == solo_output(prompt, max_tokens=num_output)


def test_the_pressure_of_that_test_is_real():
    world = World(num_blocks=6, block_size=4, max_num_batched_tokens=7)
    for i, request_id in enumerate("abc"):
        world.add(request_id, [100 * i + t for t in range(6)], max_tokens=13)
    world.run()
    assert sum(request.num_preemptions for request in world.requests.values()) > 0


def test_resuming_finds_what_is_left_in_the_cache_before_sizing_the_rest():
    """Two requests share two blocks; the second is preempted and resumes onto the shared ones."""
    world = World(num_blocks=8, block_size=4)
    shared = list(range(50, 58))
    world.add("a", [*shared, 1], max_tokens=15)
    world.step()
    world.add("b", [*shared, 2], max_tokens=15)
    plans = world.run()
    assert any("b" in plan.preempted for plan in plans)
    resumed = [a for plan in plans for a in plan.admitted if a.request_id == "b"][1]
    assert resumed.num_computed_tokens >= 8
    assert len(resumed.token_ids) > 9, "its output came along"
    for request_id, last in [("a", 1), ("b", 2)]:
        assert world.outputs[request_id] == solo_output([*shared, last], max_tokens=15)


def test_a_request_does_not_displace_a_later_one_of_its_own_class_that_went_past_it():
    world = World(num_blocks=10, block_size=4, scheduling_policy="priority")
    world.add("runs", 9, max_tokens=3, priority=0)
    world.step()
    world.add("large", 32, max_tokens=4, priority=1)
    world.clock.advance(0.5)
    world.add("later", 16, max_tokens=6, priority=1)
    assert [admitted.request_id for admitted in world.step().admitted] == ["later"]
    plans = world.run()
    assert "runs" in plans[1].finished, "from now on large would fit without later"
    assert not any(plan.preempted for plan in plans)
    assert [h.limit for h in plans[1].held] == [Limit.KV_BLOCKS]
    assert world.outputs["large"] == solo_output(world.requests["large"].token_ids[:32], max_tokens=4)


def test_a_chunk_that_a_later_one_in_the_same_step_takes_back_is_not_charged():
    """b goes first in each step, since it was admitted first; but a arrived before it, so b gives way to a."""
    world = World(num_blocks=8, block_size=4, max_num_batched_tokens=12, scheduling_policy="fair",
                  reserve_full_sequence=False, enable_prefix_caching=False, fair_output_weight=0)  # fmt: skip
    grammar = FakeGrammar()
    world.add("a", 27, max_tokens=1, tenant="t", grammar=grammar)
    world.add("b", 27, max_tokens=1, tenant="t")
    computed = {"a": 0, "b": 0}
    preemptions: list[tuple[str, str]] = []
    world.step()
    computed["b"] = 12
    grammar.state = "ready"
    while world.scheduler.has_unfinished:
        plan = world.schedule()
        preemptions += [(p.request_id, p.in_favour_of) for p in plan.preemptions]
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            computed[request_id] = max(computed[request_id], world.requests[request_id].num_computed + num_tokens)
        assert world.scheduler.waiting.counter("t") == sum(computed.values())
        world.update(plan)
    assert ("b", "a") in preemptions
