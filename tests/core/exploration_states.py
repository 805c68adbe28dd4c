"""One moment of a small world (`Moment`): how it is copied, what makes two of them the same, what must hold in each.

Copies are made by pickling: the whole object graph of the scheduler, whatever fields it gets, at the speed of C. What
never changes (configuration, parameters) is shared.

Two moments are the same when nothing that is still to come can tell them apart. So the key leaves out what only
people see (step numbers, counts of lost tokens), counts times from now and only as far as anything looks at them,
names held blocks by where they stand and not by their ids, and of blank blocks only counts how many there are.
"""

from __future__ import annotations

import io
import marshal
import pickle
from collections.abc import Iterator
from enum import StrEnum
from hashlib import blake2b
from types import FunctionType
from typing import Any

from exploration_worlds import Contents, ModelWorker, SmallWorld, in_group

from noria.config import SchedulerConfig
from noria.core.events import FinishReason, RequestEvent
from noria.core.gates import GrammarGate
from noria.core.plan import StepPlan
from noria.core.policies.base import arrival_order
from noria.core.policies.fair import FairPolicy
from noria.core.policies.lpm import LongestPrefixPolicy
from noria.core.policies.priority import PriorityPolicy
from noria.core.request import Request, RequestState
from noria.core.scheduler import PauseMode, Scheduler
from noria.fakes.runner import PlanViolation
from noria.sampling import SamplingParams


class Kind(StrEnum):
    """What can be wrong with a scheduler."""

    INVARIANT = "invariant"  # `check()` fails, or something is raised
    PLAN = "plan"  # a plan that cannot be executed, or KV that is not what it is taken for
    LIMITS = "limits"  # more tokens or sequences in a step than allowed
    LEFT_OUT = "left out"  # a request runs, but does not advance in a step
    LONE_VICTIM = "lone victim"  # somebody is preempted, and nobody is left to run
    DISPLACED = "displaced"  # a running request had to go for one that is not more urgent
    LOST = "lost"  # an accepted request neither lives nor has ended just once, or its output is not its own
    LEAK = "leak"  # everybody has ended, but something is left
    DEADLOCK = "deadlock"  # requests wait for each other: steps follow each other in which nothing is executed
    LIVELOCK = "livelock"  # steps follow each other in which work is executed, but nothing comes of it


class Lost(AssertionError):
    """A client was told something that cannot be."""


class Moment:
    """The scheduler, the worker, and what the environment knows."""

    def __init__(self, world: SmallWorld) -> None:
        config = world.config()
        self.scheduler = Scheduler(config, drafter=world.draft if world.drafts else None)
        self.worker = ModelWorker(config.num_blocks, config.block_size, config.kv_windows)
        self.now_s = 0.0
        self.num_arrived = 0
        self.num_faults_left = world.num_faults
        self.num_said = 0
        """Tokens handed to clients so far, by all requests together."""
        self.said: dict[str, int] = {}
        self.ended: dict[str, str] = {}

    def alive(self) -> list[Request]:
        """In order of arrival."""
        both = [*self.scheduler.running, *self.scheduler.waiting]
        return sorted(both, key=lambda request: request.arrival_number)

    @property
    def progress(self) -> int:
        """The measure that must rise: tokens said and requests ended."""
        return self.num_said + len(self.ended)

    def note(self, events: list[RequestEvent], world: SmallWorld) -> None:
        """What clients are told."""
        for event in events:
            request_id, spec = event.request_id, world.requests[event.request_id]
            start = self.said[request_id]
            end = self.said[request_id] = start + len(event.token_ids)
            self.num_said += len(event.token_ids)
            if request_id in self.ended:
                raise Lost(f"{request_id} ended twice")
            if event.token_ids != spec.script[start:end]:
                raise Lost(f"{request_id}'s client got {event.token_ids} in place of {spec.script[start:end]}")
            if event.finish_reason is None:
                continue
            self.ended[request_id] = event.finish_reason.value
            by_itself = event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            if (end == spec.num_said) != by_itself:
                raise Lost(f"{request_id} ended by {event.finish_reason} with {end} of {spec.num_said} tokens")

    def let_go(self) -> None:
        """Breaks the reference cycle, so that the garbage collector has nothing to look for."""
        self.scheduler.waiting._count_cached = None  # type: ignore[assignment]


# --- copies -----------------------------------------------------------------------------------------------------------

_shared: list[Any] = []
_shared_index: dict[int, int] = {}


def _get_shared(index: int) -> Any:
    return _shared[index]


_NEVER_CHANGE = frozenset({SchedulerConfig, SamplingParams, SmallWorld, RequestState, PauseMode, GrammarGate})


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _NEVER_CHANGE or (kind is FunctionType and obj is not _get_shared):
            index = _shared_index.get(id(obj))
            if index is None:
                index = _shared_index[id(obj)] = len(_shared)
                _shared.append(obj)  # kept alive, so its id stays its own
            return _get_shared, (index,)
        return NotImplemented


def freeze(moment: Moment) -> bytes:
    """A copy to be thawed as often as needed."""
    buffer = io.BytesIO()
    _Pickler(buffer, 5).dump(moment)
    return buffer.getvalue()


def forget_the_last_step(moment: Moment) -> None:
    """Between steps nothing depends on these any more, and copies are cheaper without."""
    scheduler = moment.scheduler
    scheduler.last_plan = None
    scheduler._in_flight = None  # type: ignore[assignment]
    scheduler.records.clear()
    scheduler._arrivals.clear()
    scheduler._endings.clear()


def thaw(frozen: bytes) -> Moment:
    moment: Moment = pickle.loads(frozen)
    return moment


# --- sameness ---------------------------------------------------------------------------------------------------------


def key(moment: Moment, world: SmallWorld, contents: Contents) -> bytes:
    """128 bits that are equal for moments with the same future, and for others with next to no probability."""
    scheduler, alive = moment.scheduler, moment.alive()
    running, paused = scheduler.running, scheduler.paused
    parts = (
        moment.num_arrived,
        moment.num_faults_left,
        None if paused is None else paused.value,
        tuple(sorted(scheduler._finished_ids)),
        tuple(vars(scheduler.margin).values()),
        tuple(_request_key(request, moment) for request in alive),
        tuple(running.by_id),
        tuple(running.steady),
        tuple(running.catching_up),
        tuple(tuple(running._turns[(running._tick + i) % len(running._turns)]) for i in range(len(running._turns))),
        _kv_key(moment, contents),
        _policy_key(moment, alive, world),
    )
    return blake2b(marshal.dumps(parts, 2), digest_size=16).digest()


def _request_key(request: Request, moment: Moment) -> tuple[Any, ...]:
    config = moment.scheduler.config
    waits = [
        since_s if since_s is None else min(moment.now_s - since_s, config.lookahead_age_limit_s)
        for since_s in (request.held_for_memory_s, request.held_for_adapter_s)
    ]
    grammar: Any = request.grammar
    has_deadline = config.first_token_deadline_s is not None or config.request_deadline_s is not None
    return (
        request.request_id,
        request.state.value,
        len(request.token_ids),
        request.num_computed,
        min(request.num_preemptions, max(1, config.max_preemptions)),
        *waits,
        request.num_charged,
        len(request.block_hashes),
        request.draft_token_ids,
        moment.now_s - request.arrival_s if has_deadline else 0,
        grammar and grammar.condition,
    )


def _kv_key(moment: Moment, contents: Contents) -> tuple[Any, ...]:
    kv = moment.scheduler.kv
    pool = kv.pool
    label = {name: contents.label.get(name[:32], 0) * 8 + sum(name[32:]) for name in pool._block_of}
    names: dict[int, int] = {}
    tables = []
    for request_id, holding in kv._holdings.items():
        table = []
        for block_id in holding.block_ids:
            block_hash = pool._hash_of[block_id]
            table.append((names.setdefault(block_id, len(names)) if block_id else -1, block_hash and label[block_hash]))
        is_old = holding.epoch != kv.epoch
        windows = tuple((p.num_passed, p.most, p.num_own, tuple(p.not_own)) for p in holding.passings)
        promised = (holding.num_registered, holding.num_claimed, holding.num_owed, is_old, windows, holding.resume_at)
        tables.append((request_id, tuple(table), promised))
    idle = tuple(label[pool._hash_of[block_id]] for block_id in pool._idle)  # type: ignore[index]
    claims = sorted((contents.label.get(block_hash, 0), owner) for block_hash, owner in kv._claims.items())
    cold = tuple(label[pool._hash_of[block_id]] for block_id in pool._cold)  # type: ignore[index]
    return tuple(sorted(tables)), idle, cold, len(pool._blank), tuple(claims)


def _policy_key(moment: Moment, alive: list[Request], world: SmallWorld) -> tuple[Any, ...]:
    policy = moment.scheduler.waiting
    if isinstance(policy, PriorityPolicy):
        # Due times matter among the living, and to newcomers until they are in the past.
        due = [policy.due_s(request) for request in alive]
        ranks = sorted(set(due))
        is_last = moment.num_arrived == len(world.specs)
        return tuple((ranks.index(d), 0.0 if is_last else max(d - moment.now_s, -1.0)) for d in due)
    if isinstance(policy, LongestPrefixPolicy):
        most = policy.config.lpm_max_overtakes
        overtakes = sorted((r, r in policy._window, min(n, most)) for r, n in policy._num_overtakes.items())
        return sum(arrival_order(r) < policy._last_of_window for r in alive), *overtakes
    if isinstance(policy, FairPolicy):
        # Counters and the level they are lifted to only matter relative to each other.
        least = min((tenant.counter for tenant in policy._tenants.values()), default=0)
        tenants = [
            (name or "", t.counter - least, t.num_requests, name in policy._waiting_tenants)
            for name, t in policy._tenants.items()
        ]
        return policy._level - least, *sorted(tenants)
    return ()


# --- what must hold ---------------------------------------------------------------------------------------------------

Finding = tuple[Kind, str]


def check_moment(moment: Moment, world: SmallWorld, contents: Contents) -> Iterator[Finding]:
    """What must hold between steps."""
    scheduler = moment.scheduler
    try:
        scheduler.check()
    except AssertionError as error:
        yield Kind.INVARIANT, str(error) or f"an assertion of {where(error)} fails"
        return
    try:
        _check_worker(moment, contents)
    except PlanViolation as error:
        yield Kind.PLAN, str(error)
    arrived = list(world.requests)[: moment.num_arrived]
    alive = {request.request_id: request for request in moment.alive()}
    for request_id in arrived:
        if (request_id in alive) == (request_id in moment.ended):
            yield Kind.LOST, f"{request_id} " + ("has ended, but lives" if request_id in alive else "is gone")
    for request in alive.values():
        if moment.said[request.request_id] != request.num_output_tokens:
            yield Kind.LOST, f"{request.request_id}'s client has not got all of its tokens"
    if not alive:
        for what, is_left in _leftovers(scheduler).items():
            if is_left:
                yield Kind.LEAK, f"everybody has ended, but left {what}"
        if not scheduler.has_news and moment.worker.rows:
            yield Kind.LEAK, f"the worker was never told to forget {list(moment.worker.rows)}"


def _check_worker(moment: Moment, contents: Contents) -> None:
    """The worker knows what the scheduler believes it to know, and all findable content is what its hash says."""
    scheduler, worker = moment.scheduler, moment.worker
    for request in scheduler.running:
        block_ids = scheduler.kv.block_ids(request.request_id)
        if worker.windows != (None,):  # what a window passes within a block is given up when the block is full
            block_ids = worker.without_passed(block_ids, request.num_computed)
        own = (request.num_tokens, block_ids, request.num_computed)
        row = worker.rows.get(request.request_id)
        if row != own:
            raise PlanViolation(f"{request.request_id}: the worker's row is {row}, the scheduler's {own}")
        worker.check_content(request.request_id, contents)
    strangers = worker.rows.keys() - scheduler.running.by_id.keys() - set(scheduler._finished_ids)
    if strangers:
        raise PlanViolation(f"the worker has rows of {sorted(strangers)}, who do not run")
    size = worker.block_size
    for name, block_id in scheduler.kv.pool._block_of.items():
        kept = tuple(worker.slots[block_id * size : (block_id + 1) * size])
        group = int.from_bytes(name[32:], "big")
        if kept != tuple(in_group(number, group) for number in contents.behind_hash.get(name[:32], ())):
            raise PlanViolation(f"block {block_id} is findable under a hash that its content {kept} does not have")


def _leftovers(scheduler: Scheduler) -> dict[str, Any]:
    """Everything that an idle scheduler has none of."""
    kv, running, policy = scheduler.kv, scheduler.running, scheduler.waiting
    left: dict[str, Any] = {
        "blocks": kv.pool.num_blocks - kv.pool.num_free_blocks,
        "tables": kv._holdings,
        "table entries": kv.num_table_entries,
        "owed blocks": kv.num_owed_blocks,
        "claims": kv._claims,
        "running requests": running.by_id or running.steady or running.catching_up or any(running._turns),
        "computed tokens": running.num_computed_tokens,
        "waiting requests": len(policy),
        "queued tokens": policy.num_queued_tokens,
        "events": scheduler._events,
    }
    if isinstance(policy, LongestPrefixPolicy):
        left["places in the lpm queue"] = policy._window or policy._num_overtakes or len(policy._behind)
    if isinstance(policy, FairPolicy):
        left["tenants at work"] = policy._waiting_tenants or any(t.num_requests for t in policy._tenants.values())
    if isinstance(policy, PriorityPolicy):
        left["classes"] = policy._classes
    return left


def check_plan(plan: StepPlan, moment: Moment, world: SmallWorld, *, is_faulty: bool) -> Iterator[Finding]:
    """What must hold for each plan, seen right after it was made. `is_faulty`: an allocation was made to fail."""
    scheduler, config = moment.scheduler, moment.scheduler.config
    if plan.num_tokens > config.max_num_batched_tokens:
        yield Kind.LIMITS, f"{plan.num_tokens} tokens in one step"
    if len(plan.num_scheduled_tokens) > config.num_slots:
        yield Kind.LIMITS, f"{len(plan.num_scheduled_tokens)} sequences in one step"
    left_out = scheduler.running.by_id.keys() - plan.num_scheduled_tokens.keys()
    if left_out and not is_faulty and scheduler.paused is not PauseMode.KEEP:
        yield Kind.LEFT_OUT, f"{sorted(left_out)} run, but do not advance"
    # Whom a request displaced that an injected failure then kept out is the failure's doing.
    is_excused = is_faulty and not any(preemption.in_favour_of in plan.preempted for preemption in plan.preemptions)
    if plan.preemptions and not scheduler.running and not is_excused:
        yield Kind.LONE_VICTIM, "somebody was preempted, and now nobody runs"
    admitted = {entry.request_id for entry in plan.admitted}
    for preemption in plan.preemptions:
        victim, winner = preemption.request_id, preemption.in_favour_of
        is_urgent = world.requests[winner].priority < world.requests[victim].priority
        is_urgent = is_urgent and isinstance(scheduler.waiting, PriorityPolicy)
        if winner in admitted and not is_urgent:
            yield Kind.DISPLACED, f"{victim} had to go for {winner}, which is not more urgent"
    preempted = {request.request_id for request in moment.alive() if request.state is RequestState.PREEMPTED}
    if not set(plan.preempted) <= preempted:
        yield Kind.LOST, f"not all of {plan.preempted} wait to be resumed"


def where(error: Exception) -> str:
    """The function and line that raised it."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return "?" if traceback is None else f"{traceback.tb_frame.f_code.co_qualname}, line {traceback.tb_lineno}"
