"""Every history of a small world: an explicit-state model checker over the real scheduler.

`explore(world)` visits every moment that the world's requests, arriving in their order, can bring about, whatever
happens in between. From each moment between steps it tries every action:

- `arrive`: the next request is accepted;
- `step`: a second passes, a step is planned, executed by a worker that follows scripts, and learnt from. In worlds
  with faults the k-th allocation of the step may fail, for every k;
- in worlds that have them: `abort` of any request that lives, `pause` and `resume`, `reset` of the prefix cache, and
  `ready`, a grammar's being compiled.

All but `resume` and `ready` also happen within steps, between execution and learning (one in each step).

Moments with the same future are one state (`exploration_states.key`), so the states are finitely many and each is
entered once. The schedulers are real; nothing of them is modelled. What is checked:

- in every state, `Scheduler.check()`, that the worker holds what the scheduler believes, that all findable KV is what
  its hash says, that every accepted request lives or has ended just once with the tokens that the worker said, and
  that nothing is left when everybody has ended (`check_moment`);
- of every plan, that it can be executed, keeps the limits, and lets every running request advance (`check_plan`);
- that the scheduler is live: from every state, with no further arrivals or aborts, steps alone lead to the end of
  everybody. Since steps are deterministic, each state has one next state; a chain of those that comes back to itself
  is a deadlock (nothing was executed in it) or a livelock. The chain must be no longer than `steps_to_end` and the
  measure of progress, tokens said to clients plus requests ended, must rise within `steps_to_progress`. A pause is
  lifted and a late grammar is ready when steps no longer execute anything: those two are the environment's to do.

Together that proves, for these worlds, that no order of events breaks an invariant or stops the scheduler. It says
nothing of larger worlds; those are for random tests. What is found is reported with the shortest history there is, one
line for each plan.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

from exploration_history import Action, Fault, act, learn, plan_step, tell
from exploration_states import Finding, Kind, Lost, Moment, check_moment, forget_the_last_step, freeze, key, thaw, where
from exploration_worlds import Contents, FakeGrammar, SmallWorld

from noria.core.gates import Grammar
from noria.core.plan import StepPlan, StepResult
from noria.fakes.runner import PlanViolation
from noria.kv.block_pool import BlockPool

UNKNOWN, BROKEN = -2, -1


@dataclass
class Counterexample:
    """What is wrong, and the events that lead there."""

    world: SmallWorld
    kind: Kind
    message: str
    actions: list[Action]
    lines: list[str]

    def __str__(self) -> str:
        head = [f"{self.kind.upper()}: {self.message}", f"world: {self.world.name}"]
        head += [f"  {name}: {value}" for name, value in self.world.options.items()]
        head += [f"  {request_id}: {spec}" for request_id, spec in self.world.requests.items()]
        return "\n".join([*head, "history:", *(f"  {line}" for line in self.lines)])


@dataclass
class Exploration:
    """What exploring one world came to."""

    world: SmallWorld
    num_states: int = 0
    num_actions: int = 0
    longest_to_end: int = 0
    """Most steps from any state to the end of everybody."""
    longest_to_progress: int = 0
    """Most steps from any state until the measure of progress rises."""
    found: dict[Kind, Counterexample] = field(default_factory=dict)
    """The first of each kind."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.found.values())) or f"{self.num_states} states, nothing wrong"


def steps_to_progress(world: SmallWorld) -> int:
    """Within so many steps progress is made: at worst one request computes all that it knows, a token in each step,
    after one step that admitted nobody."""
    return world.longest + 1 + world.num_faults


def steps_to_end(world: SmallWorld) -> int:
    """Within so many steps everybody has ended: as if all ran one after the other, a token in each step, with a step
    between any two, and one at the end in which the worker is told."""
    return sum(len(spec.token_ids) + 1 for spec in world.specs) + 1 + world.num_faults


def explore(world: SmallWorld) -> Exploration:
    """Visits all states of the world. Needs no more memory than their keys and the states still to be entered."""
    was_enabled = gc.isenabled()
    gc.disable()  # moments let go of themselves
    try:
        with mock.patch.object(BlockPool, "can_take", Fault.can_take):
            return _Explorer(world).run()
    finally:
        if was_enabled:
            gc.enable()


class _State:
    """What is kept of a state: how it was reached first, and the step that follows by itself.

    Moments that are one state may have come there with more or less progress, so only its rise is kept."""

    __slots__ = ("action", "is_over", "is_progress", "next", "next_action", "num_executed", "parent")

    def __init__(self, parent: int, action: Action, *, is_over: bool) -> None:
        self.parent = parent
        self.action = action
        self.is_over = is_over
        self.next: int | None = None  # None: something is wrong there, and has been reported
        self.next_action = action
        self.num_executed = 0
        self.is_progress = False


class _Explorer:
    def __init__(self, world: SmallWorld) -> None:
        self.world = world
        self.contents = Contents(world, world.config().block_size)
        self.result = Exploration(world)
        self._states: list[_State] = []
        self._index: dict[bytes, int] = {}
        self._to_enter: deque[tuple[int, Moment]] = deque()  # first come, first served: histories are the shortest

    def run(self) -> Exploration:
        self._reach(Moment(self.world), -1, Action("begin"))
        while self._to_enter:
            self._enter(*self._to_enter.popleft())
        self._check_liveness()
        assert self.result.found or not any(state.next is None and not state.is_over for state in self._states)
        self.result.num_states = len(self._states)
        return self.result

    def _reach(self, moment: Moment, parent: int, action: Action) -> int | None:
        """The state that the moment is in; checked and noted if it is new. None if there is something wrong with it."""
        self.result.num_actions += 1
        state_key = key(moment, self.world, self.contents)
        index = self._index.get(state_key)
        if index is None:
            finding = next(check_moment(moment, self.world, self.contents), None)
            if finding is not None:
                self._report(finding, parent, action)
                return None
            index = self._index[state_key] = len(self._states)
            self._states.append(_State(parent, action, is_over=not moment.scheduler.has_unfinished))
            forget_the_last_step(moment)
            self._to_enter.append((index, moment))
        else:
            moment.let_go()
        return index

    # --- actions ---

    def _enter(self, index: int, here: Moment) -> None:
        """Tries every action from a state. The step goes last: it uses up the moment itself."""
        scheduler, state, alive = here.scheduler, self._states[index], here.alive()
        owed = [Action("ready", r.request_id) for r in alive if r.grammar is not None and not _is_decided(r.grammar)]
        if scheduler.paused is not None:
            owed.append(Action("resume"))
        actions = [*self._choices(here), *owed]
        has_step = bool(alive) or scheduler.has_news
        frozen = freeze(here) if actions or here.num_faults_left else b""
        reached = {action: self._try(index, frozen, action) for action in actions}
        for countdown in range(1, 100 if has_step and here.num_faults_left else 1):
            if not self._step(index, thaw(frozen), countdown):
                break
        if has_step:
            self._step(index, here)
        else:
            here.let_go()
        if owed and not state.num_executed and not state.is_progress and not state.is_over:
            state.next, state.next_action = reached[owed[0]], owed[0]

    def _choices(self, here: Moment) -> Iterator[Action]:
        """What the environment may do now and need not."""
        if here.num_arrived < len(self.world.specs):
            yield Action("arrive", list(self.world.requests)[here.num_arrived])
        if self.world.aborts:
            for request in here.alive():
                yield Action("abort", request.request_id)
        if self.world.resets:
            yield Action("reset")
        if here.scheduler.paused is None:
            for mode in self.world.pauses:
                yield Action("pause", mode.value)

    def _try(self, index: int, frozen: bytes, action: Action) -> int | None:
        moment = thaw(frozen)
        try:
            act(moment, action, self.world)
        except Exception as error:
            self._report(_finding_of(error), index, action)
            return None
        return self._reach(moment, index, action)

    def _step(self, index: int, moment: Moment, fault: int = 0) -> bool:
        """One step, with all that may happen within it. Whether the fault happened, if there was to be one."""
        action = Action("step", fault=fault)
        state, progress = self._states[index], moment.progress
        try:
            plan, findings = plan_step(moment, self.world, fault)
            if fault and Fault.countdown:
                moment.let_go()
                return False
            for finding in findings:
                self._report(finding, index, action)
            result = moment.worker.execute(plan, self.world, self.contents)
            meanwhile = list(self._choices(moment)) if plan.step and not fault else []
            in_flight = freeze(moment) if meanwhile else b""
            learn(moment, plan, result, self.world)
        except Exception as error:
            self._report(_finding_of(error), index, action)
            return bool(fault)
        if not fault:
            state.next_action, state.num_executed = action, plan.num_tokens
            state.is_progress = moment.progress > progress
        reached = self._reach(moment, index, action)
        state.next = state.next if fault else reached
        for event in meanwhile:
            self._learn_after(index, thaw(in_flight), plan, result, event)
        return True

    def _learn_after(self, index: int, moment: Moment, plan: StepPlan, result: StepResult, event: Action) -> None:
        """The rest of a step during whose execution something happened."""
        action = Action("step", meanwhile=event)
        try:
            act(moment, event, self.world)
            learn(moment, plan, result, self.world)
        except Exception as error:
            self._report(_finding_of(error), index, action)
        else:
            self._reach(moment, index, action)

    # --- liveness ---

    def _check_liveness(self) -> None:
        """Follows the one next state of each state, and finds where that does not lead to the end soon enough.

        Distances are in steps; a chain that leads to something wrong, which has been reported, has none (`BROKEN`).
        """
        states = self._states
        to_end = [0 if state.is_over else UNKNOWN for state in states]
        to_progress = to_end.copy()
        for start in range(len(states)):
            chain: list[int] = []
            at: int | None = start
            while at is not None and to_end[at] == UNKNOWN and at not in chain:
                chain.append(at)
                at = states[at].next
            steps = rise = BROKEN
            if at in chain:
                self._report_cycle(chain[chain.index(at) :])
            elif at is not None:
                steps, rise = to_end[at], to_progress[at]
            for index in reversed(chain):
                if steps != BROKEN:
                    steps, rise = steps + 1, 1 if states[index].is_progress else rise + 1
                to_end[index], to_progress[index] = steps, rise
        self._check_bounds(to_end, to_progress)

    def _check_bounds(self, to_end: list[int], to_progress: list[int]) -> None:
        for distances, bound, what in (
            (to_end, steps_to_end(self.world), "until everybody has ended"),
            (to_progress, steps_to_progress(self.world), "without progress"),
        ):
            most = max(distances)
            if most > bound:
                where = distances.index(most)
                chain = [where]
                while len(chain) < most and (after := self._states[chain[-1]].next) is not None:
                    chain.append(after)
                self._report((Kind.LIVELOCK, f"{most} steps {what}, more than {bound}"), where, None, chain)
        self.result.longest_to_end = max(to_end)
        self.result.longest_to_progress = max(to_progress)

    def _report_cycle(self, cycle: list[int]) -> None:
        is_idle = not any(self._states[index].num_executed for index in cycle)
        kind = Kind.DEADLOCK if is_idle else Kind.LIVELOCK
        self._report((kind, f"the last {len(cycle)} steps repeat for ever"), cycle[0], None, cycle)

    # --- reports ---

    def _report(self, finding: Finding, index: int, action: Action | None, chain: list[int] | None = None) -> None:
        kind, message = finding
        if kind in self.result.found:
            return
        actions = [] if action is None else [action]
        actions[:0] = [self._states[i].next_action for i in chain or ()]
        while index > 0:
            actions.insert(0, self._states[index].action)
            index = self._states[index].parent
        self.result.found[kind] = Counterexample(self.world, kind, message, actions, list(tell(self.world, actions)))


def _is_decided(grammar: Grammar) -> bool:
    return not isinstance(grammar, FakeGrammar) or grammar.condition != "late"


def _finding_of(error: Exception) -> Finding:
    match error:
        case PlanViolation():
            return Kind.PLAN, str(error)
        case Lost():
            return Kind.LOST, str(error)
    return Kind.INVARIANT, f"{type(error).__name__} in {where(error)}: {error}"
