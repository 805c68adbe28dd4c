"""Small worlds, explored exhaustively: nothing breaks, nobody waits for ever; and the explorer finds planted faults."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

import pytest
from exploration import Exploration, _Explorer, explore
from exploration_history import Action
from exploration_states import Kind, Moment, forget_the_last_step, freeze, key, thaw
from exploration_worlds import WINDOWS, SmallWorld, Spec, hybrid_worlds, plain_worlds, special_worlds

from noria.core.advancing import Advancing
from noria.core.draft import PlanDraft
from noria.core.events import RequestEvent
from noria.core.plan import Limit, Preemption
from noria.core.policies import POLICIES
from noria.core.policies.base import Policy
from noria.core.policies.fair import FairPolicy
from noria.core.policies.fcfs import FcfsPolicy
from noria.core.policies.priority import PriorityPolicy
from noria.core.request import Request
from noria.core.scheduler import Scheduler
from noria.kv.manager import KVManager


def daily_worlds() -> list[SmallWorld]:
    """Strides without a common factor with the lists' periods, so that all sorts are met."""
    return [*islice(plain_worlds(), 0, None, 9), *islice(special_worlds(), 0, None, 19)]


def explore_all(worlds: Iterable[SmallWorld]) -> int:
    """The number of states; fails with what was found."""
    start_s, num_worlds, num_states, num_actions, most_to_end, most_to_progress = time.process_time(), 0, 0, 0, 0, 0
    found = []
    for world in worlds:
        result = explore(world)
        num_worlds += 1
        num_states += result.num_states
        num_actions += result.num_actions
        most_to_end = max(most_to_end, result.longest_to_end)
        most_to_progress = max(most_to_progress, result.longest_to_progress)
        found += result.found.values()
    seconds = time.process_time() - start_s
    print(
        f"\n{num_states} distinct states, {num_actions} actions in {num_worlds} worlds; {seconds:.0f} s of one core, "
        f"{num_states / seconds:.0f} states/s; at most {most_to_end} steps to the end, {most_to_progress} to progress"
    )
    assert not found, f"{len(found)} findings:\n\n" + "\n\n".join(map(str, found[:5]))
    return num_states


def test_no_history_breaks_or_stops_the_scheduler() -> None:
    assert explore_all(daily_worlds()) >= 100_000


def daily_hybrid_worlds() -> list[SmallWorld]:
    return list(islice(hybrid_worlds(), 0, None, 53))


def test_no_history_breaks_or_stops_the_scheduler_of_a_model_with_sliding_windows() -> None:
    assert explore_all(daily_hybrid_worlds()) >= 25_000


def test_the_hybrid_worlds_of_every_day_meet_each_kind_of_model_with_each_policy_pool_switch_and_event() -> None:
    everything = {part for world in hybrid_worlds() for part in world.name.split("; ")}
    for kind in WINDOWS:
        met = {
            part for world in daily_hybrid_worlds() for part in world.name.split("; ") if world.name.startswith(kind)
        }
        assert everything - met == WINDOWS.keys() - {kind}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(13))
def test_no_history_of_all_hybrid_worlds_breaks_or_stops_the_scheduler(part: int) -> None:
    assert explore_all(islice(hybrid_worlds(), part, None, 13)) >= 100_000


@pytest.mark.parametrize("policy", POLICIES)
def test_the_worlds_of_every_day_meet_each_policy_with_each_pool_switch_and_event(policy: str) -> None:
    everything = {part for world in chain(plain_worlds(), special_worlds()) for part in world.name.split("; ")}
    met = {part for world in daily_worlds() for part in world.name.split("; ") if f"; {policy};" in world.name}
    assert everything - met == POLICIES.keys() - {policy}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(7))
def test_no_history_of_all_worlds_breaks_or_stops_the_scheduler(part: int) -> None:
    assert explore_all(islice(chain(plain_worlds(), special_worlds()), part, None, 7)) >= 150_000


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(2))
def test_no_history_of_four_requests_breaks_or_stops_the_scheduler(part: int) -> None:
    assert explore_all(islice(plain_worlds(4), 31 * part, None, 97)) >= 50_000


# --- the explorer itself ----------------------------------------------------------------------------------------------


class Comparing(_Explorer):
    """Keeps where each action leads from each state, and the moments that were taken for a state known already."""

    def __init__(self, world: SmallWorld) -> None:
        super().__init__(world)
        self.leads_to: dict[int, dict[Action, bytes]] = defaultdict(dict)
        self.twins: list[tuple[int, bytes]] = []

    def _reach(self, moment: Moment, parent: int, action: Action) -> int | None:
        forget_the_last_step(moment)
        state_key = key(moment, self.world, self.contents)
        self.leads_to[parent][action] = state_key
        if state_key in self._index:
            self.twins.append((self._index[state_key], freeze(moment)))
        return super()._reach(moment, parent, action)


@pytest.mark.parametrize("first", range(2))
def test_moments_taken_for_the_same_have_the_same_future(first: int) -> None:
    num_compared = 0
    worlds = [*islice(plain_worlds(), first * 91, None, 277), *islice(special_worlds(), first * 91, None, 277)]
    for world in worlds:
        explorer = Comparing(world)
        explorer.run()
        twins, explorer.twins = explorer.twins[:100], []
        for index, frozen in twins:
            expected = explorer.leads_to.pop(index, {})
            explorer._enter(index, thaw(frozen))
            assert explorer.leads_to[index] == expected, f"{world.name}: a state stands for two"
        num_compared += len(twins)
    assert num_compared > 500
    assert not explorer._to_enter


# --- planted faults ---------------------------------------------------------------------------------------------------


def tiny(*specs: Spec, aborts: bool = False, faults: int = 0, **options: Any) -> SmallWorld:
    shape = {"block_size": 2, "num_blocks": 4, "max_num_batched_tokens": 4, "max_num_seqs": 3}
    return SmallWorld("tiny", specs, shape | options, aborts=aborts, num_faults=faults)


LONG, OTHER = Spec((31, 32, 33, 34, 35), (21, 22)), Spec((41, 42, 43, 44, 45), (21, 22))
SHORT = Spec((41, 42), (21, 22))


def found(world: SmallWorld, kind: Kind) -> str:
    """What the explorer reports of this kind."""
    result: Exploration = explore(world)
    assert kind in result.found, f"found instead: {list(result.found)}"
    return str(result.found[kind])


def test_a_policy_that_sends_away_whoever_is_furthest_is_a_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = Spec((31, 32, 33, 34, 35, 36), (21,)), Spec((41, 42, 43, 44, 45, 46), (21,))
    pool = {"block_size": 1, "num_blocks": 7, "max_num_batched_tokens": 2, "max_num_seqs": 2}
    world = tiny(*specs, **pool, reserve_full_sequence=False, enable_prefix_caching=False, adaptive_watermark=False)
    assert not explore(world).found
    monkeypatch.setattr(FcfsPolicy, "victim", lambda self, running: max(running, key=lambda r: r.num_computed))
    assert "repeat for ever" in found(world, Kind.LIVELOCK)


def test_prompts_that_wait_for_each_others_blocks_are_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    switches = {"reserve_full_sequence": False, "enable_prefix_caching": False, "max_prefill_share": 1.0}
    world = tiny(LONG, OTHER, **switches, long_prefill_token_threshold=2)
    assert not explore(world).found

    def never_preempt(self: Advancing, request: Request, num_planned: int) -> tuple[int, ...] | None:
        block_ids = self._kv.extend(request.request_id, num_planned)
        if block_ids is None:
            self._stand_still(request)
        return block_ids

    monkeypatch.setattr(Advancing, "_take_blocks", never_preempt)
    assert Limit.KV_BLOCKS in found(world, Kind.DEADLOCK)


def test_a_request_that_is_left_out_of_a_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    really = Advancing._run_chunk

    def skip_the_second(self: Advancing, request: Request) -> None:
        if not self._draft.chunks:
            really(self, request)

    monkeypatch.setattr(Advancing, "_run_chunk", skip_the_second)
    found(tiny(LONG, OTHER, num_blocks=8), Kind.LEFT_OUT)


def test_a_lone_request_that_gives_way_to_itself_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_way(self: Advancing, request: Request, num_planned: int) -> tuple[int, ...] | None:
        block_ids = self._kv.extend(request.request_id, num_planned)
        if block_ids is None:
            self._scheduler.preempt(request, request, Limit.KV_BLOCKS, self._draft)
        return block_ids

    monkeypatch.setattr(Advancing, "_take_blocks", give_way)
    found(tiny(LONG, faults=1), Kind.LONE_VICTIM)


def test_a_block_leaked_by_an_abort_during_a_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    really = Scheduler.finish

    def leak(self: Scheduler, request_id: str, *args: Any) -> RequestEvent | None:
        if self._in_flight is not None and self._in_flight.is_scheduled(request_id):
            self.kv._holdings[request_id].block_ids.pop()
        return really(self, request_id, *args)

    monkeypatch.setattr(Scheduler, "finish", leak)
    assert "before its result: abort" in found(tiny(LONG, SHORT, aborts=True), Kind.INVARIANT)


def test_a_cursor_that_is_not_stepped_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    really = Scheduler.preempt

    def forget_the_cursor(self: Scheduler, victim: Request, *args: Any) -> Preemption:
        num_computed = victim.num_computed
        preemption = really(self, victim, *args)
        victim.num_computed = num_computed
        return preemption

    monkeypatch.setattr(Scheduler, "preempt", forget_the_cursor)
    found(tiny(LONG, SHORT, reserve_full_sequence=False), Kind.INVARIANT)


def test_a_block_that_is_findable_before_it_is_computed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    really = KVManager.admit

    def register_early(self: KVManager, request_id: str, *args: Any, **lengths: int) -> bool:
        is_admitted = really(self, request_id, *args, **lengths)
        if is_admitted:
            self.register_computed(request_id, lengths["num_planned"], ())
        return is_admitted

    monkeypatch.setattr(KVManager, "admit", register_early)
    assert "KV is not its own" in found(tiny(LONG, Spec((31, 32, 43), (21,)), num_blocks=8), Kind.PLAN)


def test_a_full_hit_that_leaves_nothing_to_compute_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVManager, "_max_shared", lambda self, num_tokens, num_shareable: num_tokens // self.block_size)
    found(tiny(SHORT, SHORT, max_prefill_share=1.0), Kind.DEADLOCK)  # there is nothing to run, so it is never admitted


def test_memory_promised_twice_costs_no_more_than_preemptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every fault is one: a pool that is overcommitted is what preemption is for."""
    really = KVManager.num_spare_blocks
    monkeypatch.setattr(KVManager, "num_spare_blocks", lambda self, *args: really(self, *args) + self.num_owed_blocks)
    assert not explore(tiny(LONG, OTHER, SHORT)).found


def test_an_equal_that_is_displaced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PriorityPolicy, "displaceable", lambda self, urgent, running: list(running)[::-1])
    found(tiny(LONG, OTHER, scheduling_policy="priority"), Kind.DISPLACED)


def test_a_step_over_the_budget_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    really = PlanDraft.advance_steady

    def forget_to_pay(self: PlanDraft, steady: dict[str, int]) -> None:
        really(self, steady)
        self.num_tokens_left += len(steady)

    monkeypatch.setattr(PlanDraft, "advance_steady", forget_to_pay)
    found(tiny(SHORT, LONG, num_blocks=8), Kind.LIMITS)


def test_a_token_that_is_not_told_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    really = Scheduler.update
    monkeypatch.setattr(Scheduler, "update", lambda self, *args: [e for e in really(self, *args) if e.finish_reason])
    found(tiny(LONG), Kind.LOST)


def test_a_request_that_is_held_and_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Policy, "put_back", lambda self, request: None)
    found(tiny(LONG, OTHER), Kind.LOST)


def test_what_a_policy_keeps_of_the_ended_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FairPolicy, "note_ended", lambda self, request: None)
    assert "tenants at work" in found(tiny(SHORT, scheduling_policy="fair"), Kind.LEAK)
