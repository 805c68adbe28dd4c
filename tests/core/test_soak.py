"""Soak: 100,000 random operations on the scheduler, a share of them under each policy.

Invariants are checked every so often, all of them at the end; and nothing may have grown: every container that hangs
on the scheduler is back at its size of the start, except those that `may_grow` names, with their bounds.
"""

from __future__ import annotations

import random

import pytest
from histories import STOP_IDS, FakeGrammar, assert_nothing_is_held, guess_unevenly, prompt_of, said_alone, sizes
from worlds import EOS

from noria.config import SchedulerConfig
from noria.core.events import FinishReason, RequestEvent
from noria.core.plan import StepPlan
from noria.core.request import Request
from noria.core.scheduler import Drafter, PauseMode, Scheduler
from noria.errors import ContextLengthError, UnavailableError
from noria.fakes import ManualClock, ScriptedRunner
from noria.kv.events import AllCleared, BlockRemoved, BlockStored, KVEvent
from noria.kv.prefix import PrefixKey
from noria.sampling import SamplingParams

POLICIES = ["fcfs", "priority", "lpm", "fair"]
TENANTS = [None, "t0", "t1", "t2", "t3", "t4"]
NUM_OPERATIONS = 100_000
CHECK_EVERY = 25
"""Operations between two full checks."""


class Soak:
    """One scheduler and its surroundings. Keeps no more of a request than the scheduler does, once it has ended."""

    def __init__(self, policy: str, drafter: Drafter | None, seed: int) -> None:
        self.random = random.Random(seed)
        self.config = SchedulerConfig(
            num_blocks=26,
            block_size=4,
            max_num_batched_tokens=32,
            max_num_seqs=8,
            max_model_len=96,
            scheduling_policy=policy,
            priority_aging_s=20.0,
            lpm_max_overtakes=4,
            lpm_window=8,
            long_prefill_token_threshold=self.random.choice([0, 12]),
            watermark=self.random.choice([0.0, 0.04]),
            adaptive_watermark=False,
            max_num_queued_reqs=30,
            max_num_queued_tokens=600,
            first_token_deadline_s=150,
            request_deadline_s=200,
            max_adapters=2,
            eos_token_ids=(EOS,),
            num_records_kept=16,
        )
        self.scheduler = Scheduler(self.config, drafter=drafter)
        self.start_sizes = sizes(self.scheduler)
        self.runner = ScriptedRunner(self.config.num_blocks, self.config.block_size, keep_plans=False)
        self.clock = ManualClock()
        self.plan: StepPlan | None = None
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended_outside: set[str] = set()
        self.compiling: list[FakeGrammar] = []
        self.findable: set[bytes] = set()
        self.scheduler.kv.subscribe(self._hear)
        self.num_arrived = self.num_steps = self.num_finished = self.num_preemptions = self.num_refused = 0

    # --- operations, and how often each is drawn ---

    def operate(self) -> None:
        operations = [self.arrive, self.step, self.half_step, self.end_one, self.disturb, self.resume, self.compile]
        self.random.choices(operations, weights=[28, 50, 8, 6, 1, 3, 4])[0]()

    def arrive(self) -> None:
        draw = self.random
        family = draw.randrange(4) * 1000
        prompt = [family + t for t in range(draw.choice([0, 8, 20, 36]))]
        prompt += [draw.randrange(5000, 9000) for _ in range(draw.randrange(1, 24))]
        grammar = FakeGrammar() if draw.random() < 0.05 else None
        num_sequences = 4 if draw.random() < 0.05 else 1
        key = PrefixKey(
            tenant=draw.choice(TENANTS),
            adapter=draw.choice([None, None, "a", "b", "c"]),
            salt="s" if draw.random() < 0.1 else None,
        )
        sampling = SamplingParams(max_tokens=draw.randrange(1, 60), stop_token_ids=draw.choice([(), STOP_IDS]))
        priority = draw.randrange(3)
        for index in range(num_sequences):
            request_id = f"r{self.num_arrived}"
            request = Request(
                request_id, prompt, sampling, index=index, priority=priority, prefix_key=key, grammar=grammar
            )
            try:
                self.scheduler.add(request, self.clock())
            except (ContextLengthError, UnavailableError):
                self.num_refused += 1
                continue
            self.num_arrived += 1
            self.requests[request_id], self.outputs[request_id] = request, []
        if grammar is not None:
            self.compiling.append(grammar)

    def step(self) -> None:
        if self.plan is None:
            self.half_step()
        self.half_step()

    def half_step(self) -> None:
        """Plans, or executes what was planned; other operations may come between."""
        if self.plan is None:
            self.plan = self.scheduler.schedule(self.clock())
            return
        plan, self.plan = self.plan, None
        self.num_steps += 1
        self.num_preemptions += len(plan.preemptions)
        if self.random.random() < 0.001:
            events = self.scheduler.abandon(plan, self.clock(), "out of smoke")
        else:
            result = self.runner.execute(plan)
            self.clock.advance(1.0)
            events = self.scheduler.update(plan, result, self.clock())
        for event in events:
            self.note(event)
        assert self.findable == self.scheduler.kv.pool._block_of.keys(), "a subscriber believes something else"

    def end_one(self) -> None:
        if self.requests:
            request_id = self.random.choice(list(self.requests))
            self.ended_outside.add(request_id)
            event = self.scheduler.finish(
                request_id, self.random.choice([FinishReason.ABORT, FinishReason.STOP]), self.clock()
            )
            if event is None:  # it has ended by itself, which nobody has been told yet
                self.ended_outside.discard(request_id)
            else:
                self.note(event)

    def disturb(self) -> None:
        match self.random.randrange(8):
            case 0:
                ended = [r.request_id for r in [*self.scheduler.running, *self.scheduler.waiting]]
                self.ended_outside.update(ended)
                for event in self.scheduler.pause(PauseMode.ABORT, self.clock()):
                    self.note(event)
            case 1 | 2:
                self.scheduler.pause(PauseMode.WAIT, self.clock())
            case 3 | 4:
                self.scheduler.pause(PauseMode.KEEP, self.clock())
            case _:
                self.scheduler.reset_prefix_cache()

    def resume(self) -> None:
        self.scheduler.resume()

    def compile(self) -> None:
        for grammar in self.compiling:
            grammar.state = "failed" if self.random.random() < 0.1 else "ready"
        self.compiling.clear()

    # --- what is seen of it ---

    def note(self, event: RequestEvent) -> None:
        output = self.outputs[event.request_id]
        output += event.token_ids
        if event.finish_reason is None:
            return
        request = self.requests.pop(event.request_id)
        del self.outputs[event.request_id]
        alone = said_alone(prompt_of(request), request.max_tokens, request.sampling.stop_token_ids)
        was_cut = event.finish_reason in (FinishReason.ERROR, FinishReason.TIMEOUT)
        if event.request_id in self.ended_outside or was_cut:
            assert output == alone[0][: len(output)]
            self.ended_outside.discard(event.request_id)
        else:
            assert (output, event.finish_reason) == alone
            self.num_finished += 1

    def _hear(self, events: tuple[KVEvent, ...]) -> None:
        for event in events:
            match event:
                case BlockStored(block_hash):
                    self.findable.add(block_hash)
                case BlockRemoved(block_hash):
                    self.findable.remove(block_hash)
                case AllCleared():
                    self.findable.clear()

    def wind_down(self) -> None:
        """Ends everything in the usual way, lets all deadlines pass, empties the cache."""
        self.compile()
        self.scheduler.resume()
        for _ in range(5000):
            if not (self.scheduler.has_unfinished or self.scheduler.has_news or self.plan):
                break
            self.step()
        assert not self.requests, "somebody never ended"
        self.clock.advance(10_000.0)
        self.scheduler.reset_prefix_cache()
        self.step()
        assert_nothing_is_held(self.scheduler)


def may_grow(config: SchedulerConfig) -> dict[str, int]:
    """Containers that keep something when all is over, and how much at most: by the last parts of their paths."""
    return {
        "records": config.num_records_kept,
        "_heap": 64,  # entries of requests that were taken out; they are dropped when they come up or are too many
        "_order": 64,
        "_tenants": len(TENANTS),  # those seen lately
    }


def assert_nothing_grew(soak: Soak) -> None:
    bounds = may_grow(soak.config)
    now = sizes(soak.scheduler)
    kept = {path for path in now if any(f".{name}" in path for name in bounds)}
    for path in kept:
        name = path.rpartition(".")[2]
        if name in bounds:
            assert now[path] <= bounds[name], path
    grown = {path: size for path, size in now.items() if path not in kept and size != soak.start_sizes.get(path, 0)}
    assert not grown


def soak(policy: str, drafter: Drafter | None, num_operations: int, seed: int = 0) -> Soak:
    world = Soak(policy, drafter, seed)
    for i in range(num_operations):
        world.operate()
        if i % CHECK_EVERY == 0:
            world.scheduler.check()
    world.wind_down()
    assert_nothing_grew(world)
    return world


def report(world: Soak) -> None:
    print(
        f"soak: {world.num_steps} steps, {world.num_arrived} arrivals, {world.num_refused} refused, "
        f"{world.num_finished} finished by themselves, {world.num_preemptions} preemptions"
    )


@pytest.mark.parametrize("drafter", [None, guess_unevenly], ids=["plain", "drafts"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_hundred_thousand_random_operations_leave_nothing_behind(policy, drafter):
    world = soak(policy, drafter, NUM_OPERATIONS // 8)
    report(world)
    assert world.num_preemptions > 100, "the pressure is real"
    assert world.num_finished > 500


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("drafter", [None, guess_unevenly], ids=["plain", "drafts"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_million_random_operations_leave_nothing_behind(policy, drafter, seed):
    report(soak(policy, drafter, 10 * NUM_OPERATIONS // 16, seed))
