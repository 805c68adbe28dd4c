"""Policy fair: counters, lift and order. The bound and the published experiments are in `test_fairness.py`."""

import pytest
from worlds import World

import noria.core.policies.fair as fair_module
from noria.core.policies.fair import FairPolicy


class Grammar:
    is_ready = False


def fair_world(**config) -> World:
    return World(**{"scheduling_policy": "fair"} | config)


def counter(world: World, tenant: str) -> int:
    policy = world.scheduler.waiting
    assert isinstance(policy, FairPolicy)
    return policy.counter(tenant)


def order(world: World) -> list[str]:
    return [request.request_id for request in world.scheduler.waiting.order()]


# --- what is charged ---


@pytest.mark.parametrize(("prompt_weight", "output_weight"), [(1, 2), (3, 5), (0, 1), (1, 0)])
def test_prompt_and_output_tokens_are_charged_at_their_weights(prompt_weight, output_weight):
    world = fair_world(fair_prompt_weight=prompt_weight, fair_output_weight=output_weight)
    world.add("r", 7, max_tokens=4, tenant="t")
    world.run()
    assert counter(world, "t") == 7 * prompt_weight + 4 * output_weight


def test_a_prompt_in_chunks_is_charged_as_its_chunks_are_planned():
    world = fair_world(max_num_batched_tokens=4, fair_prompt_weight=1, fair_output_weight=0)
    world.add("r", 10, max_tokens=1, tenant="t")
    charged = []
    while world.scheduler.has_unfinished:
        world.step()
        charged.append(counter(world, "t"))
    assert charged == [4, 8, 10]


def test_what_a_top_up_adds_is_charged_too():
    world = fair_world(max_num_batched_tokens=16, fair_output_weight=0)
    world.add("long", 40, max_tokens=1, tenant="t")
    world.add("short", 2, max_tokens=1, tenant="u")
    assert world.step().num_scheduled_tokens == {"long": 14, "short": 2}
    assert counter(world, "t") == 14


def test_cached_tokens_are_free():
    world = fair_world(block_size=4, fair_output_weight=0)
    world.add("cold", list(range(100, 117)), max_tokens=1, tenant="t")
    world.run()
    assert counter(world, "t") == 17
    world.add("warm", list(range(100, 117)), max_tokens=1, tenant="t")
    world.run()
    assert counter(world, "t") == 17 + 1, "16 of 17 are cached"


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_recomputing_what_a_preemption_threw_away_is_never_charged(enable_prefix_caching):
    world = fair_world(num_blocks=6, block_size=4, enable_prefix_caching=enable_prefix_caching)
    for request_id in "abc":
        world.add(request_id, 6, max_tokens=10, tenant=request_id)
    world.run()
    assert any(request.num_preemptions for request in world.requests.values())
    assert [counter(world, tenant) for tenant in "abc"] == [6 + 2 * 10] * 3


def test_a_chunk_that_is_taken_back_in_its_own_step_is_not_charged():
    """Chunks are charged at the end of the running pass, after the last preemption that could take one back."""
    world = fair_world(num_blocks=8, block_size=4, max_num_batched_tokens=8, reserve_full_sequence=False,
                       fair_output_weight=0, adaptive_watermark=False, enable_prefix_caching=False)  # fmt: skip
    world.add("a", 27, max_tokens=1, tenant="t")
    world.add("b", 27, max_tokens=1, tenant="t")
    computed: dict[str, int] = {}
    while world.scheduler.has_unfinished:
        plan = world.schedule()
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            end = world.requests[request_id].num_computed + num_tokens
            computed[request_id] = max(computed.get(request_id, 0), min(end, 27))
        assert counter(world, "t") == sum(computed.values())
        world.update(plan)
    assert sum(request.num_preemptions for request in world.requests.values()) > 0


# --- who is next ---


def test_the_tenant_with_the_smallest_counter_is_next_and_its_requests_in_order_of_arrival():
    world = fair_world(max_num_seqs=1)
    for number in range(3):
        world.add(f"a{number}", 4, max_tokens=1, tenant="a")
    for number in range(3):
        world.add(f"b{number}", 4, max_tokens=1, tenant="b")
    admitted = [a.request_id for plan in world.run() for a in plan.admitted]
    assert admitted == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_tenants_resumed_request_goes_before_its_others():
    world = fair_world(max_num_seqs=2)
    world.add("a0", 4, max_tokens=20, tenant="a")
    world.add("a1", 4, max_tokens=20, tenant="a")
    world.step()
    world.add("a2", 4, tenant="a")
    world.preempt("a1")
    assert order(world) == ["a1", "a2"]


def test_requests_without_a_tenant_share_one():
    world = fair_world(max_num_seqs=1)
    world.add("x", 4, max_tokens=1)
    world.add("y", 4, max_tokens=1)
    world.add("a", 4, max_tokens=1, tenant="a")
    admitted = [a.request_id for plan in world.run() for a in plan.admitted]
    assert admitted == ["x", "a", "y"]


def test_the_victim_is_of_the_tenant_with_the_largest_counter():
    world = fair_world(max_num_seqs=3)
    world.add("a", 20, max_tokens=40, tenant="a")
    world.add("b0", 3, max_tokens=40, tenant="b")
    world.add("b1", 3, max_tokens=40, tenant="b")
    world.step()
    assert counter(world, "a") > counter(world, "b")
    assert world.scheduler.waiting.victim(world.scheduler.running).request_id == "a", "although it arrived first"


def test_unfinished_prompts_take_their_share_in_the_order_of_counters():
    world = fair_world(max_num_batched_tokens=16, max_prefill_share=1.0, long_prefill_token_threshold=6)
    world.add("a0", 60, max_tokens=1, tenant="a")
    world.add("a1", 60, max_tokens=1, tenant="a")
    world.add("b", 60, max_tokens=1, tenant="b")
    assert list(world.step().num_scheduled_tokens.items())[:2] == [("a0", 6), ("b", 6)]
    plan = world.step()
    assert next(iter(plan.num_scheduled_tokens)) == "b", "a has the larger counter"


# --- who returns ---


def test_idling_saves_nothing_up():
    world = fair_world(max_num_seqs=1)
    world.add("early", 4, max_tokens=1, tenant="b")
    world.run()
    for number in range(20):
        world.add(f"a{number}", 4, max_tokens=4, tenant="a")
    for _ in range(40):
        world.step()
    for number in range(20):
        world.add(f"b{number}", 4, max_tokens=4, tenant="b")
    since = len(world.outputs)
    num_before = {r: len(o) for r, o in world.outputs.items()}
    for _ in range(40):
        world.step()
    shares = {
        t: sum(len(o) - num_before[r] for r, o in world.outputs.items() if r[0] == t and r != "early") for t in "ab"
    }
    assert since == 41
    assert abs(shares["a"] - shares["b"]) <= 4, shares


def test_whoever_comes_while_nobody_waits_is_lifted_as_well():
    """The other tenant's request runs, so the queue is empty; it had been served up to here."""
    world = fair_world(max_num_seqs=1, fair_prompt_weight=1, fair_output_weight=1)
    for number in range(5):
        world.add(f"a{number}", 4, max_tokens=4, tenant="a")
        world.run()
    world.add("a5", 4, max_tokens=4, tenant="a")
    world.step()
    world.add("b", 4, tenant="b")
    assert counter(world, "b") == 5 * 8, "where a stood when its last was admitted"


def test_a_newcomer_is_not_lifted_above_anybody_who_waits():
    world = fair_world(max_num_seqs=2)
    for number in range(6):
        world.add(f"a{number}", 20, max_tokens=9, tenant="a")
    world.step()
    for number in range(6):
        world.add(f"b{number}", 2, max_tokens=9, tenant="b")
    world.finish("a0")
    world.step()
    world.add("c", 2, tenant="c")
    assert counter(world, "c") <= min(counter(world, "a"), counter(world, "b"))
    world.run()


def test_debt_is_kept_by_whoever_leaves_and_returns():
    world = fair_world(max_num_seqs=2)
    world.add("a", 20, max_tokens=2, tenant="a")
    world.add("b", 2, max_tokens=30, tenant="b")
    world.step()
    world.step()
    debt = counter(world, "a")
    world.add("a1", 2, tenant="a")
    assert counter(world, "a") == debt


def test_waiting_for_a_grammar_is_idling():
    grammar = Grammar()
    world = fair_world(max_num_seqs=2, max_num_batched_tokens=8)
    world.add("h", 4, max_tokens=4, tenant="h", grammar=grammar)
    for number in range(20):
        world.add(f"a{number}", 4, max_tokens=4, tenant="a")
        for _ in range(4):
            world.step()
    world.add("a20", 4, tenant="a")
    world.step()
    assert counter(world, "h") == world.scheduler.waiting._level >= 20 * 12


@pytest.mark.parametrize("is_held", [False, True])
def test_a_newcomer_is_not_favoured_because_somebody_waits_for_a_grammar(is_held):
    """Lifted to the counter of a tenant that cannot be served, it would have the machine to itself for long."""
    world = fair_world(max_num_seqs=2)
    if is_held:
        world.add("h", 4, tenant="h", grammar=Grammar())
    for number in range(60):
        world.add(f"a{number}", 4, max_tokens=4, tenant="a")
    for _ in range(80):
        world.step()
    for number in range(60):
        world.add(f"b{number}", 4, max_tokens=4, tenant="b")
    num_before = {r: len(o) for r, o in world.outputs.items()}
    for _ in range(20):
        world.step()
    shares = {t: sum(len(o) - num_before[r] for r, o in world.outputs.items() if r[0] == t) for t in "ab"}
    assert abs(shares["a"] - shares["b"]) <= 8, shares


def test_a_tenant_that_gets_nothing_else_waits_for_at_most_the_bound():
    """One small request beside a giant backlog is next as soon as a slot is free."""
    world = fair_world(max_num_seqs=1)
    for number in range(50):
        world.add(f"a{number}", 20, max_tokens=3, tenant="a")
    world.step()
    world.add("b", 2, max_tokens=1, tenant="b")
    admitted = [a.request_id for _ in range(12) for a in world.step().admitted]
    assert admitted[0] == "b" or admitted[:2] == ["a1", "b"]


def test_idle_tenants_are_forgotten_and_their_debt_is_not(monkeypatch):
    monkeypatch.setattr(fair_module, "_NUM_IDLE_TENANTS_KEPT", 4)
    world = fair_world()
    world.add("debtor", 30, max_tokens=20, tenant="debtor")
    world.run()
    debt = counter(world, "debtor")
    for number in range(100):
        world.add(f"r{number}", 2, max_tokens=1, tenant=f"t{number}")
        world.run()
    tenants = world.scheduler.waiting._tenants
    assert len(tenants) <= 8
    world.add("again", 2, tenant="debtor")
    assert counter(world, "debtor") >= debt


def test_an_aborted_request_leaves_no_trace_but_its_charges():
    world = fair_world(max_num_seqs=1)
    world.add("a", 4, max_tokens=20, tenant="a")
    world.add("b", 4, tenant="b")
    world.step()
    world.finish("b")
    world.finish("a")
    policy = world.scheduler.waiting
    assert {name: tenant.num_requests for name, tenant in policy._tenants.items()} == {"a": 0, "b": 0}
    assert counter(world, "b") == 0


def test_nobody_is_admitted_past_a_request_that_waits_for_memory():
    world = fair_world(num_blocks=8, block_size=4, admission_lookahead=8)
    world.add("a", 16, max_tokens=4, tenant="a")
    world.add("big", 20, tenant="b")
    world.add("small", 2, tenant="c")
    assert list(world.step().num_scheduled_tokens) == ["a"]
