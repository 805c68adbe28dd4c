"""Gates: what a request waits for beyond tokens, slots and memory, and that nobody waits for it."""

import pytest
from worlds import World

from noria.core.events import FinishReason
from noria.core.gates import Refused
from noria.core.plan import Limit
from noria.kv.prefix import PrefixKey


class FakeGrammar:
    """Ready, or broken, when told so."""

    def __init__(self) -> None:
        self.ready = False
        self.broken: str | None = None

    @property
    def is_ready(self) -> bool:
        if self.broken:
            raise Refused(self.broken)
        return self.ready


POLICIES = ["fcfs", "priority", "lpm", "fair"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_waits_for_its_grammar_and_others_go_by(policy):
    world = World(scheduling_policy=policy)
    grammar = FakeGrammar()
    world.add("structured", 3, grammar=grammar)
    world.add("plain", 3)
    plan = world.step()
    assert list(plan.num_scheduled_tokens) == ["plain"]
    assert [(h.request_id, h.limit) for h in plan.held] == [("structured", Limit.GRAMMAR)]
    grammar.ready = True
    assert "structured" in world.step().num_scheduled_tokens
    world.run()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(policy):
    world = World(scheduling_policy=policy)
    grammar = FakeGrammar()
    world.add("structured", 3, grammar=grammar)
    world.add("plain", 3)
    world.step()
    grammar.broken = "unbalanced bracket at 7"
    plan = world.schedule()
    events = world.update(plan)
    assert [(e.error, e.error_code) for e in events if e.request_id == "structured"] == [
        ("unbalanced bracket at 7", "refused")
    ]
    world.run()
    assert world.reasons == {"structured": FinishReason.ERROR, "plain": FinishReason.LENGTH}
    assert world.scheduler.kv.pool.num_free_blocks == world.config.num_blocks


def test_a_gate_that_raises_ends_its_request_and_nobody_is_lost():
    class Exploding:
        @property
        def is_ready(self) -> bool:
            raise ValueError("regex")

    world = World()
    world.add("held", 3, grammar=FakeGrammar())
    world.add("structured", 3, grammar=Exploding())
    world.add("plain", 3)
    world.step()
    assert world.reasons == {"structured": FinishReason.ERROR}
    assert "held" in world.scheduler.waiting
    assert "plain" in world.scheduler.running


def test_requests_beyond_those_that_wait_for_grammars_are_reached_however_many_those_are():
    world = World(max_num_seqs=1)
    for number in range(300):
        world.add(f"structured{number}", 3, grammar=FakeGrammar())
    world.add("plain", 3, max_tokens=2)
    assert list(world.step().num_scheduled_tokens) == ["plain"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_for_another_adapter_gets_its_place_although_the_first_is_always_wanted(policy):
    """Requests for A never stop coming; B waits no longer than the age limit, and then for those that run."""
    world = World(max_adapters=1, max_num_seqs=2, scheduling_policy=policy, lookahead_age_limit_s=5.0, num_blocks=256)
    world.add("b", 3, max_tokens=2, prefix_key=PrefixKey(adapter="A"))
    world.step()
    waiting = world.add("other", 3, max_tokens=2, prefix_key=PrefixKey(adapter="B"))
    for number in range(40):
        world.add(f"a{number}", 3, max_tokens=4, prefix_key=PrefixKey(adapter="A"))
        world.step()
    assert waiting.num_output_tokens > 0


def test_a_request_that_waits_for_its_grammar_may_be_aborted():
    world = World()
    world.add("structured", 3, grammar=FakeGrammar())
    world.step()
    assert world.finish("structured") is not None
    world.step()
    assert not world.scheduler.has_unfinished


def test_a_preempted_request_is_asked_again():
    world = World()
    grammar = FakeGrammar()
    grammar.ready = True
    world.add("structured", 3, max_tokens=9, grammar=grammar)
    world.step()
    world.preempt("structured")
    grammar.ready = False
    assert world.step().is_empty
    grammar.ready = True
    world.run()


def add_with_adapter(world: World, request_id: str, adapter: str | None, **kwargs) -> None:
    world.add(request_id, 3, prefix_key=PrefixKey(adapter=adapter), **kwargs)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_step_has_more_adapters_than_allowed(policy):
    world = World(max_adapters=2, scheduling_policy=policy)
    adapters = ["x", "y", "z", None, "x", "z", "w", None, "y"]
    for number, adapter in enumerate(adapters):
        add_with_adapter(world, f"r{number}", adapter)
    first = world.step()
    assert sorted(first.num_scheduled_tokens) == ["r0", "r1", "r3", "r4", "r7", "r8"]
    assert {h.request_id: h.limit for h in first.held} == dict.fromkeys(["r2", "r5", "r6"], Limit.ADAPTERS)
    for plan in world.run():
        assert len({adapters[int(r[1:])] for r in plan.num_scheduled_tokens} - {None}) <= 2
    assert len(world.reasons) == len(adapters)


def test_without_a_limit_any_number_of_adapters_run():
    world = World()
    for number in range(8):
        add_with_adapter(world, f"r{number}", f"adapter{number}")
    assert len(world.step().num_scheduled_tokens) == 8
