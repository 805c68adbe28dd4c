"""Seeded workloads whose plans are kept on file, one line per step: `golden/<name>.txt`.

A change of the scheduler that is meant to change nothing must reproduce them exactly; one that is meant to change
plans shows in the diff of these files what it does. `make golden` runs this module and rewrites them.

Nothing here depends on hashes of strings, on the order of sets or on the platform: draws are multiples of
`random.Random(seed).random()`, whose sequence Python keeps.
"""

from __future__ import annotations

import difflib
import random
import sys
from collections.abc import Callable
from pathlib import Path

from histories import assert_nothing_is_held, assert_said_as_alone, guess_unevenly
from worlds import World

DIRECTORY = Path(__file__).parent / "golden"

Workload = Callable[[], World]
WORKLOADS: dict[str, Workload] = {}


def workload(run: Workload) -> Workload:
    WORKLOADS[run.__name__] = run
    return run


class Draw:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return low + int(self._random.random() * (high - low + 1))


def under_pressure(policy: str, seed: int, **config: object) -> World:
    """Twenty requests of three tenants and classes over forty steps, in a third of the memory that they would like."""
    draw = Draw(seed)
    limits = {"num_blocks": 24, "max_num_batched_tokens": 24, "max_num_seqs": 6} | config
    world = World(scheduling_policy=policy, **limits)
    for i in range(20):
        family = 1000 * draw(1, 3)
        prompt = [family + t for t in range(draw(0, 14))] + [10_000 * (i + 1) + t for t in range(draw(1, 12))]
        world.add(f"r{i}", prompt, max_tokens=draw(2, 20), tenant=f"t{draw(0, 2)}", priority=draw(0, 2))
        for _ in range(draw(0, 4)):
            world.step()
    return world


@workload
def fcfs_under_pressure() -> World:
    return under_pressure("fcfs", 1)


@workload
def priority_with_displacement() -> World:
    return under_pressure("priority", 2, priority_aging_s=20.0)


@workload
def longest_prefix_first() -> World:
    return under_pressure("lpm", 3, lpm_max_overtakes=3, lpm_window=6)


@workload
def fair_shares() -> World:
    return under_pressure("fair", 4)


@workload
def chunked_prefill_mix() -> World:
    """Prompts of all lengths in small steps, between decodes."""
    draw = Draw(5)
    world = World(num_blocks=128, max_num_batched_tokens=16, long_prefill_token_threshold=6)
    for i in range(12):
        world.add(f"r{i}", draw(1, 40), max_tokens=draw(1, 8))
        for _ in range(draw(0, 3)):
            world.step()
    return world


@workload
def prefix_sharing() -> World:
    """Sequences that share a long prompt: the first computes it, the others wait and take it over; then a reset."""
    world = World(num_blocks=64, max_num_batched_tokens=16)
    shared = list(range(50, 84))
    for i in range(6):
        world.add(f"a{i}", [*shared, i], max_tokens=4)
    for _ in range(6):
        world.step()
    world.scheduler.reset_prefix_cache()
    for i in range(3):
        world.add(f"b{i}", [*shared, i], max_tokens=4)
    return world


@workload
def look_ahead_past_a_large_request() -> World:
    world = World(num_blocks=20, max_num_batched_tokens=40, admission_lookahead=3, lookahead_age_limit_s=5.0)
    world.add("runs", 30, max_tokens=20)
    world.step()
    world.add("large", 60, max_tokens=6)
    for i in range(8):
        world.add(f"small{i}", 3, max_tokens=3)
        world.step()
    return world


@workload
def one_giant_prompt_takes_its_share() -> World:
    draw = Draw(6)
    world = World(num_blocks=128, max_num_batched_tokens=20, max_prefill_share=0.4)
    world.add("giant", 200, max_tokens=5)
    for i in range(10):
        world.add(f"r{i}", draw(1, 12), max_tokens=draw(1, 6))
        for _ in range(draw(0, 2)):
            world.step()
    return world


@workload
def drafts_right_and_wrong() -> World:
    draw = Draw(7)
    world = World(num_blocks=18, max_num_batched_tokens=18, drafter=guess_unevenly, adaptive_watermark=False)
    for i in range(14):
        world.add(f"r{i}", draw(1, 20), max_tokens=draw(16, 40))
        world.step()
    return world


@workload
def windows_under_pressure() -> World:
    """A model of two kinds of layers, two groups of the one and one of the other."""
    return under_pressure("fcfs", 8, kv_windows=(None, 10, 10), num_blocks=48)


@workload
def displacement_with_windows() -> World:
    return under_pressure("priority", 9, kv_windows=(6, None), num_blocks=40, priority_aging_s=20.0)


@workload
def one_prompt_four_times_with_windows() -> World:
    """The second finds its prefix; the third does not, for others have used the memory; the fourth does again."""
    world = World(num_blocks=36, max_num_batched_tokens=16, kv_windows=(None, 8))
    shared = list(range(50, 91))
    for i in range(4):
        world.add(f"same{i}", shared, max_tokens=6)
        world.run()
        if i == 1:
            world.add("other", 60, max_tokens=40)
            world.run()
    return world


def plans_of(name: str) -> list[str]:
    """Runs the workload to its end and returns its plans, one line each."""
    world = WORKLOADS[name]()
    world.run()
    assert_said_as_alone(world)
    assert_nothing_is_held(world.scheduler)
    return [str(plan) for plan in world.runner.plans]


def path_of(name: str) -> Path:
    return DIRECTORY / f"{name}.txt"


def kept(name: str) -> list[str]:
    path = path_of(name)
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def difference(name: str, expected: list[str], got: list[str], num_around: int = 4) -> str:
    """The steps around the first one that differs, as a unified diff; empty if none does."""
    if expected == got:
        return ""
    pairs = zip([*expected, None], [*got, None], strict=False)
    first = next(i for i, (old, new) in enumerate(pairs) if old != new)
    start, end = max(0, first - num_around), first + num_around + 1
    lines = difflib.unified_diff(
        expected[start:end], got[start:end], f"golden/{name}.txt", "plans now", n=num_around, lineterm=""
    )
    num_different = sum(old != new for old, new in zip(expected, got, strict=False)) + abs(len(expected) - len(got))
    return "\n".join(
        [
            f"{name}: {num_different} steps differ ({len(expected)} on file, {len(got)} now), "
            f"the first on line {first + 1}:",
            *lines,
            "If this is what the change is meant to do: `make golden` rewrites the files; commit them with it.",
        ]
    )


def main() -> int:
    """Rewrites all files and says of each what became of it."""
    DIRECTORY.mkdir(exist_ok=True)
    for name in WORKLOADS:
        old, new = kept(name), plans_of(name)
        path_of(name).write_text("".join(f"{line}\n" for line in new), encoding="utf-8")
        print(difference(name, old, new) if old and old != new else f"{name}: {'unchanged' if old else 'new'}")
    for path in sorted(DIRECTORY.glob("*.txt")):
        if path.stem not in WORKLOADS:
            path.unlink()
            print(f"{path.stem}: removed, no workload has this name")
    return 0


if __name__ == "__main__":
    sys.exit(main())
