"""The k-th allocation fails, for every k, on each path that takes blocks.

`BlockPool.can_take` says no once, at its k-th call, whatever is free: as if somebody else had been quicker. The
scheduler must neither break nor stall nor leak, and every request still says what it would have said alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from histories import FakeGrammar, assert_nothing_is_held, assert_said_as_alone, end_of_all, guess_unevenly
from worlds import World

from noria.core.advancing import Advancing
from noria.core.request import Request, RequestState
from noria.kv.block_pool import BlockPool

ADMISSION, RESUME, DISPLACEMENT = "admission", "resume", "displacement"
BLOCK_END, CHUNK, DRAFTS, ONE_TOKEN, TOP_UP = "decode at a block end", "prefill chunk", "drafts", "one token", "top-up"
ALL_PATHS = {ADMISSION, RESUME, DISPLACEMENT, BLOCK_END, CHUNK, DRAFTS, ONE_TOKEN, TOP_UP}


def pressure() -> World:
    """Prompts in chunks, then decodes that outgrow the pool: preemptions and resumptions."""
    world = World(num_blocks=18, block_size=2, max_num_batched_tokens=12, max_num_seqs=3)
    for request_id, num_tokens in [("a", 11), ("b", 14), ("c", 6), ("d", 3), ("e", 9), ("f", 1)]:
        world.add(request_id, num_tokens, max_tokens=14)
    return world


def lone() -> World:
    """Nobody else runs, so there is nobody to take blocks from."""
    world = World(num_blocks=24, block_size=1, max_num_batched_tokens=6)
    world.add("a", 13, max_tokens=11)
    return world


def shared_prefix() -> World:
    world = World(num_blocks=22, block_size=2, max_num_batched_tokens=9)
    shared = list(range(50, 62))
    for own in range(6):
        world.add(f"r{own}", [*shared, own], max_tokens=12)
    return world


def long_prompt_among_others() -> World:
    """Half a step for one prompt; what the others leave comes back to it."""
    world = World(num_blocks=40, block_size=2, max_num_batched_tokens=16)
    world.add("long", 40, max_tokens=3)
    world.add("short", 5, max_tokens=9)
    world.add("held", 5, max_tokens=2, grammar=FakeGrammar())
    return world


def drafts() -> World:
    world = World(num_blocks=18, block_size=2, max_num_batched_tokens=12, drafter=guess_unevenly)
    for request_id, num_tokens in [("a", 9), ("b", 10), ("c", 7), ("d", 12), ("e", 2)]:
        world.add(request_id, num_tokens, max_tokens=15)
    return world


def urgent() -> World:
    """Two low requests hold the pool when urgent ones come."""
    world = World(num_blocks=20, block_size=2, max_num_batched_tokens=24, scheduling_policy="priority")
    world.add("low", 14, max_tokens=12, priority=5)
    world.add("lower", 13, max_tokens=12, priority=6)
    return world


def urgent_later(world: World) -> None:
    world.add("urgent", 12, max_tokens=8, priority=0)
    world.add("urgent too", 9, max_tokens=8, priority=1)


def crowd(policy: str) -> Callable[[], World]:
    def build() -> World:
        world = World(num_blocks=24, block_size=2, max_num_batched_tokens=14, scheduling_policy=policy)
        for i in range(14):
            prompt = list(range(50, 50 + 3 * (i % 4))) + [1000 * i + t for t in range(1 + 5 * i % 8)]
            world.add(f"r{i}", prompt, max_tokens=4 + 7 * i % 12, tenant=f"t{i % 3}", priority=i % 3)
        return world

    return build


@dataclass(frozen=True)
class Scenario:
    build: Callable[[], World]
    paths: frozenset[str]
    later: Callable[[World], None] = lambda world: None
    """Called after three steps."""


SCENARIOS = {
    "pressure": Scenario(pressure, frozenset({ADMISSION, RESUME, BLOCK_END, CHUNK})),
    "lone": Scenario(lone, frozenset({ADMISSION, BLOCK_END, CHUNK, ONE_TOKEN})),
    "shared prefix": Scenario(shared_prefix, frozenset({ADMISSION, RESUME, BLOCK_END, CHUNK})),
    "long prompt": Scenario(long_prompt_among_others, frozenset({ADMISSION, CHUNK, TOP_UP})),
    "drafts": Scenario(drafts, frozenset({ADMISSION, RESUME, CHUNK, DRAFTS})),
    "urgent": Scenario(urgent, frozenset({ADMISSION, RESUME, DISPLACEMENT, BLOCK_END}), urgent_later),
    **{
        f"crowd, {policy}": Scenario(crowd(policy), frozenset({ADMISSION, RESUME, BLOCK_END}))
        for policy in ["fcfs", "priority", "lpm", "fair"]
    },
}


class FailingOnce:
    """Stands in for `BlockPool.can_take`."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.num_calls = 0
        self.path: str | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        can_take = BlockPool.can_take

        def fails_once(pool: BlockPool, num_blocks: int) -> bool:
            self.num_calls += 1
            if self.num_calls == self.k:
                self.path = path_to_here()
                return False
            return can_take(pool, num_blocks)

        monkeypatch.setattr(BlockPool, "can_take", fails_once)


def path_to_here() -> str:
    """Which of the scheduler's paths asks for blocks, from the functions on the stack."""
    frame = sys._getframe(2)
    while frame is not None:
        name, values = frame.f_code.co_name, frame.f_locals
        if name == "top_up":
            return TOP_UP
        if name == "_admit":
            if any(p.in_favour_of == values["request"].request_id for p in values["draft"].preemptions):
                return DISPLACEMENT
            return RESUME if values["request"].state is RequestState.PREEMPTED else ADMISSION
        if name == "_run_chunk":
            return _path_of_chunk(values["request"])
        if name == "run" and isinstance(values["self"], Advancing):
            return BLOCK_END
        frame = frame.f_back
    raise AssertionError("somebody else takes blocks")


def _path_of_chunk(request: Request) -> str:
    if request.draft_token_ids:
        return DRAFTS
    return ONE_TOKEN if request.is_caught_up else CHUNK


def run(scenario: Scenario) -> World:
    """To the end, with all checks after every step."""
    world = scenario.build()
    for _ in range(3):
        world.step()
    scenario.later(world)
    for request in world.requests.values():
        if request.grammar is not None:
            request.grammar.state = "ready"
    end_of_all(world, max_steps=500)
    assert_said_as_alone(world)
    assert_nothing_is_held(world.scheduler)
    return world


@pytest.mark.parametrize("name", SCENARIOS)
def test_whichever_allocation_fails_everybody_finishes_and_nothing_leaks(name):
    scenario = SCENARIOS[name]
    hit: set[str] = set()
    k = 0
    while True:
        k += 1
        failing = FailingOnce(k)
        with pytest.MonkeyPatch.context() as monkeypatch:
            failing.install(monkeypatch)
            run(scenario)
        if failing.path is None:
            break
        hit.add(failing.path)
    print(f"{name}: {k - 1} allocations failed one at a time, on {len(hit)} paths")
    assert hit >= scenario.paths


def test_the_scenarios_cover_every_path():
    assert set().union(*(scenario.paths for scenario in SCENARIOS.values())) == ALL_PATHS
