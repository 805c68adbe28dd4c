"""What can happen in a small world, and how a history of it is told.

`act` and the parts of a step (`plan_step`, `ModelWorker.execute`, `learn`) change a `Moment`; `tell` plays a list of
actions from the beginning and says in lines what comes of each. Used by `exploration`, which decides what to try.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from exploration_states import Finding, Moment, check_plan
from exploration_worlds import Contents, FakeGrammar, SmallWorld

from noria.core.events import FinishReason
from noria.core.plan import StepPlan, StepResult
from noria.core.scheduler import PauseMode
from noria.kv.block_pool import BlockPool


class Action(NamedTuple):
    """Something that happens. A step may have an allocation that fails (the first, second, ...), or another event
    between its execution and its result."""

    what: str
    whom: str = ""
    fault: int = 0
    meanwhile: Action | None = None

    def __str__(self) -> str:
        text = f"{self.what} {self.whom}".rstrip()
        text += f", of which allocation {self.fault} fails" if self.fault else ""
        return text + (f", and before its result: {self.meanwhile}" if self.meanwhile else "")


class Fault:
    """Makes the allocation fail that the countdown ends at. None is made to fail at 0."""

    countdown = 0
    _really: Callable[[BlockPool, int], bool] = BlockPool.can_take

    @staticmethod
    def can_take(pool: BlockPool, num_blocks: int) -> bool:
        if num_blocks and Fault.countdown:
            Fault.countdown -= 1
            if Fault.countdown == 0:
                return False
        return Fault._really(pool, num_blocks)


def act(moment: Moment, action: Action, world: SmallWorld) -> None:
    """Everything but a step."""
    scheduler = moment.scheduler
    match action.what:
        case "arrive":
            moment.num_arrived += 1
            moment.said[action.whom] = 0
            scheduler.add(world.requests[action.whom].request(action.whom), moment.now_s)
        case "abort":
            event = scheduler.finish(action.whom, FinishReason.ABORT, moment.now_s)
            assert event is not None, f"{action.whom} lives, but cannot be aborted"
            moment.note([event], world)
        case "pause":
            moment.note(scheduler.pause(PauseMode(action.whom), moment.now_s), world)
        case "resume":
            scheduler.resume()
        case "reset":
            scheduler.reset_prefix_cache()
        case "ready":
            next(r for r in moment.alive() if r.request_id == action.whom).grammar = FakeGrammar("ready")


def plan_step(moment: Moment, world: SmallWorld, fault: int = 0) -> tuple[StepPlan, list[Finding]]:
    """A second passes, and a step is planned. An idle second if the scheduler says that there is nothing to do."""
    moment.now_s += 1.0
    if not moment.scheduler.has_work(moment.now_s):
        return StepPlan(0, {}), []
    Fault.countdown = fault
    plan = moment.scheduler.schedule(moment.now_s)
    is_faulty = bool(fault) and not Fault.countdown
    moment.num_faults_left -= is_faulty
    return plan, list(check_plan(plan, moment, world, is_faulty=is_faulty))


def learn(moment: Moment, plan: StepPlan, result: StepResult, world: SmallWorld) -> None:
    if plan.step:
        moment.note(moment.scheduler.update(plan, result, moment.now_s), world)


def tell(world: SmallWorld, actions: list[Action]) -> Iterator[str]:
    """Plays a history again and says what happens, in a line for each event and one for each plan."""
    moment, contents = Moment(world), Contents(world, world.config().block_size)
    try:
        for action in actions:
            yield str(action)
            if action.what != "step":
                act(moment, action, world)
                continue
            plan, _ = plan_step(moment, world, action.fault)
            yield f"    {plan}"
            result = moment.worker.execute(plan, world, contents)
            if action.meanwhile is not None:
                act(moment, action.meanwhile, world)
            learn(moment, plan, result, world)
            for request in moment.alive():
                is_running = request.request_id in moment.scheduler.running
                held = moment.scheduler.kv.block_ids(request.request_id) if is_running else ()
                yield f"        {request} in blocks {list(held)}"
    except Exception as error:
        yield f"    {type(error).__name__}: {error}"
