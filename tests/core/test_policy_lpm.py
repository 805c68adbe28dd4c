"""Policy lpm: longest cached prefix first, its bounds, and the hit rates that it is for."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Job, Simulation
from worlds import World

from noria.config import SchedulerConfig


def lpm_world(**config) -> World:
    return World(**{"scheduling_policy": "lpm", "block_size": 4} | config)


def prompt(prefix: int, num_shared: int, own: int, num_own: int = 1) -> list[int]:
    return [1000 * prefix + t for t in range(num_shared)] + [10**6 + 100 * own + t for t in range(num_own)]


def order(world: World) -> list[str]:
    return [request.request_id for request in world.scheduler.waiting.order()]


def warm(world: World, *prefixes: tuple[int, int]) -> None:
    """Leaves so many tokens of each prefix in the cache."""
    for prefix, num_tokens in prefixes:
        world.add(f"warm{prefix}", prompt(prefix, num_tokens, 99 - prefix), max_tokens=1)
        world.run()


def test_the_longest_cached_prefix_goes_first_and_arrival_breaks_ties():
    world = lpm_world()
    warm(world, (1, 8), (2, 16))
    world.add("cold", 20)
    world.add("short", prompt(1, 8, 1))
    world.add("long", prompt(2, 16, 2))
    world.add("short too", prompt(1, 8, 3))
    assert order(world) == ["long", "short", "short too", "cold"]


def test_the_cache_is_asked_when_it_is_someones_turn_and_not_at_arrival():
    world = lpm_world(max_num_seqs=1)
    world.add("running", prompt(1, 12, 0), max_tokens=3)
    world.step()
    world.add("cold", 20)
    world.add("same", prompt(1, 12, 1))
    assert order(world) == ["same", "cold"]


def test_resumed_work_goes_before_any_prefix():
    world = lpm_world(max_num_seqs=2)
    warm(world, (1, 12))
    world.add("begun", 3, max_tokens=20)
    world.step()
    world.add("cached", prompt(1, 12, 1))
    world.preempt("begun")
    assert order(world) == ["begun", "cached"]


def test_only_the_earliest_are_compared():
    world = lpm_world(lpm_window=3)
    warm(world, (1, 12))
    for number in range(3):
        world.add(f"cold{number}", 5)
    world.add("cached", prompt(1, 12, 1))
    assert order(world) == ["cold0", "cached", "cold1", "cold2"]


def test_after_so_many_overtakes_a_request_goes_first():
    world = lpm_world(max_num_seqs=1, lpm_max_overtakes=3)
    warm(world, (1, 12))
    world.add("cold", 5, max_tokens=1)
    for number in range(10):
        world.add(f"cached{number}", prompt(1, 12, number), max_tokens=1)
    admitted = [a.request_id for plan in world.run() for a in plan.admitted]
    assert admitted.index("cold") == 3


def test_endless_cached_arrivals_do_not_starve_a_cold_prompt():
    world = lpm_world(max_num_seqs=1, lpm_max_overtakes=8)
    warm(world, (1, 12))
    world.add("cold", 20, max_tokens=1)
    for number in range(100):
        world.add(f"cached{number}", prompt(1, 12, number), max_tokens=1)
        world.step()
        if "cold" in world.reasons:
            break
    assert number == 8


@settings(max_examples=120, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 6), st.integers(1, 8)), min_size=2, max_size=30
    ),
    lpm_max_overtakes=st.integers(0, 4),
    lpm_window=st.integers(1, 6),
    num_blocks=st.integers(8, 24),
    max_num_seqs=st.integers(1, 3),
)
def test_nobody_is_overtaken_by_more_later_arrivals_than_allowed_nor_from_outside_the_window(
    arrivals, lpm_max_overtakes, lpm_window, num_blocks, max_num_seqs
):
    """Exact, for requests that could have been admitted instead: in a step in which one is held by a limit of its
    own, others may pass."""
    world = lpm_world(
        num_blocks=num_blocks, max_num_seqs=max_num_seqs, lpm_max_overtakes=lpm_max_overtakes, lpm_window=lpm_window,
        admission_lookahead=0,
    )  # fmt: skip
    num_overtakes: dict[str, int] = {}
    begun: set[str] = set()

    def step() -> None:
        waiting = [r.request_id for r in world.scheduler.waiting]
        plan = world.step()
        held = {h.request_id for h in plan.held}
        still = [r for r in waiting if r not in held and r in world.scheduler.waiting]
        admitted = [a.request_id for a in plan.admitted]
        for position, request_id in enumerate(admitted):
            if request_id not in begun:
                earlier = [
                    other
                    for other in [*still, *admitted[position + 1 :]]
                    if world.requests[other].arrival_number < world.requests[request_id].arrival_number
                ]
                for other in earlier:
                    num_overtakes[other] = num_overtakes.get(other, 0) + 1
                    assert num_overtakes[other] <= lpm_max_overtakes
                num_never_ran = sum(other not in begun for other in earlier)
                assert num_never_ran < lpm_window + len(held), "only the earliest are compared"
        begun.update(admitted)

    for number, (num_steps, prefix, num_blocks_shared, max_tokens) in enumerate(arrivals):
        for _ in range(num_steps):
            step()
        world.add(f"r{number}", prompt(prefix, 4 * num_blocks_shared, number), max_tokens=min(max_tokens, 7))
    while world.scheduler.has_unfinished:
        step()


# --- the experiment: 32 prefixes of 256 tokens, 8 requests to each in random order, 32 tokens of their own ---


def hit_rate(policy: str, pool_tokens: int, seed: int = 0) -> float:
    jobs = [
        Job(0.0, 0, 288, 8, prompt=[1000 * (prefix + 1) + t for t in range(256)] + [10**6 + 8 * prefix + member] * 32)
        for prefix in range(32)
        for member in range(8)
    ]
    random.Random(seed).shuffle(jobs)
    for number, job in enumerate(jobs):
        job.number = number
    config = SchedulerConfig(
        num_blocks=pool_tokens // 16, block_size=16, max_model_len=pool_tokens, max_num_batched_tokens=512,
        max_num_seqs=4, scheduling_policy=policy, lpm_window=256, lpm_max_overtakes=256,
    )  # fmt: skip
    simulation = Simulation(config, jobs).run()
    return sum(r.num_cached_tokens or 0 for r in simulation.requests.values()) / (256 * 288)


OPTIMUM = 32 * 7 * 256 / (256 * 288)
"""Each prefix computed once: 77.8 %."""


@pytest.mark.parametrize("pool_tokens", [1024, 2048, 4096, 8192, 16384])
def test_every_prefix_is_computed_once_whatever_the_pool(pool_tokens):
    assert hit_rate("lpm", pool_tokens) == pytest.approx(OPTIMUM, abs=1e-9)


@pytest.mark.parametrize(("pool_tokens", "most"), [(1024, 0.2), (2048, 0.3), (4096, 0.5)])
def test_in_order_of_arrival_small_pools_lose_most_of_it(pool_tokens, most):
    assert hit_rate("fcfs", pool_tokens) <= most
