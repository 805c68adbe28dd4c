"""The scheduler over random histories: arrivals, steps, endings, pauses and resets in any order, under every policy
and any setting of the limits, in small pools.

After every rule all invariants hold; the runner checks every plan against a model of KV memory; in the end every
request that was accepted has finished, with the output it would have had alone.
"""

from typing import Any

import pytest
from histories import (
    STOP_IDS,
    FakeGrammar,
    assert_nothing_is_held,
    assert_said_as_alone,
    end_of_all,
    guess_half_right,
    guess_right,
    guess_rubbish,
    guess_unevenly,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from worlds import World

from noria.core.events import FinishReason
from noria.core.plan import Limit, StepPlan
from noria.core.request import RequestState
from noria.core.scheduler import PauseMode
from noria.errors import ContextLengthError, UnavailableError
from noria.kv.prefix import PrefixKey

PROMPTS = [list(range(50, 50 + n)) for n in range(1, 30)]  # prefixes of each other: sharing is common
OTHER_PROMPTS = [list(range(50, 50 + n // 2)) + list(range(900, 900 + n - n // 2)) for n in range(1, 30)]
DRAFTERS = [guess_right, guess_half_right, guess_rubbish, guess_unevenly]

LIMITS = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(4, 14),
        "block_size": st.sampled_from([4, 2, 1]),
        "max_num_batched_tokens": st.integers(1, 24),
        "max_num_seqs": st.integers(1, 5),
        "scheduling_policy": st.sampled_from(["fcfs", "priority", "lpm", "fair"]),
    },
    optional={
        "enable_prefix_caching": st.booleans(),
        "enable_chunked_prefill": st.booleans(),
        "long_prefill_token_threshold": st.integers(0, 6),
        "max_prefill_share": st.sampled_from([0.05, 0.3, 1.0]),
        "priority_aging_s": st.sampled_from([0.01, 1.0, 10.0]),
        "lpm_max_overtakes": st.integers(0, 3),
        "lpm_window": st.integers(1, 3),
        "fair_prompt_weight": st.integers(0, 3),
        "fair_output_weight": st.integers(0, 3),
        "reserve_full_sequence": st.booleans(),
        "watermark": st.sampled_from([0.1, 0.5, 1.0]),
        "adaptive_watermark": st.booleans(),
        "max_preemptions": st.integers(0, 2),
        "admission_lookahead": st.integers(0, 3),
        "lookahead_age_limit_s": st.sampled_from([0.0, 2.0, 1e9]),
        "max_num_queued_reqs": st.sampled_from([0, 2, 6]),
        "max_num_queued_tokens": st.sampled_from([1, 30, 100]),
        "first_token_deadline_s": st.integers(1, 60),
        "request_deadline_s": st.integers(1, 100),
        "max_adapters": st.integers(1, 2),
        "max_num_looks": st.integers(1, 4),
    },
)

REQUESTS = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(PROMPTS + OTHER_PROMPTS),
        "max_tokens": st.integers(0, 16),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
        "num_sequences": st.sampled_from([1, 1, 1, 4]),
        "prefix_key": st.builds(
            PrefixKey,
            salt=st.sampled_from([None, None, None, "s"]),
            tenant=st.sampled_from([None, "t", "u"]),
            adapter=st.sampled_from([None, None, "a", "b", "c"]),
        ),
        "priority": st.integers(-1, 2),
        "stop_token_ids": st.sampled_from([(), STOP_IDS]),
        "has_grammar": st.sampled_from([False] * 7 + [True]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.plan: StepPlan | None = None
        self.ended_outside: set[str] = set()
        self.grammars: list[FakeGrammar] = []

    @initialize(
        limits=LIMITS,
        drafter=st.sampled_from([*[None] * 4, *DRAFTERS]),
        requests=st.lists(REQUESTS, min_size=2, max_size=8),
    )
    def build(self, limits: dict[str, Any], drafter: Any, requests: list[dict[str, Any]]) -> None:
        self._begin(limits, drafter, requests)

    def _begin(self, limits: dict[str, Any], drafter: Any, requests: list[dict[str, Any]]) -> None:
        if not limits.get("enable_chunked_prefill", True):
            limits["max_num_batched_tokens"] = max(24, limits["num_blocks"] * limits["block_size"])
        self.world = World(drafter=drafter, **limits)
        self.arrive(requests)

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def arrive(self, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            has_grammar, num_sequences = request.pop("has_grammar"), request.pop("num_sequences")
            for _ in range(num_sequences):
                self._arrive(FakeGrammar() if has_grammar else None, **request)

    def _arrive(self, grammar: FakeGrammar | None, *, prompt: list[int], max_tokens: int, **request: Any) -> None:
        fits = len(prompt) + max_tokens <= self.world.config.max_model_len
        has_place = self._has_place(len(prompt))
        request_id = f"r{len(self.world.requests)}"
        try:
            self.world.add(request_id, prompt, max_tokens=max_tokens, grammar=grammar, **request)
        except ContextLengthError:
            assert not fits
        except UnavailableError:
            assert fits
            assert not has_place
        else:
            assert fits
            assert has_place
            if grammar is not None:
                self.grammars.append(grammar)

    def _has_place(self, num_prompt: int) -> bool:
        """Whether draining and the queue's caps let one more request in; counted from the requests themselves."""
        config = self.world.config
        alive = [r for r in self.world.requests.values() if r.state is not RequestState.FINISHED]
        queued = [r.num_prompt_tokens for r in alive if r.state is RequestState.WAITING]
        most = config.max_num_queued_tokens
        return (
            not self.world.scheduler.is_draining
            and len(alive) < config.num_slots + config.max_num_queued_reqs
            and (most is None or not queued or sum(queued) + num_prompt <= most)
        )

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self) -> None:
        scheduler = self.world.scheduler
        self.plan = plan = self.world.schedule()
        config = self.world.config
        assert plan.num_tokens <= config.max_num_batched_tokens
        if scheduler.paused is PauseMode.KEEP:
            assert plan.is_empty
            return
        assert plan.num_scheduled_tokens.keys() == scheduler.running.by_id.keys(), "somebody runs and stands still"
        running = [self.world.requests[request_id] for request_id in plan.num_scheduled_tokens]
        if config.max_adapters is not None:
            assert len({r.adapter for r in running} - {None}) <= config.max_adapters
        if scheduler.paused is not None:
            assert all(self.world.requests[a.request_id].num_preemptions for a in plan.admitted)
        elif plan.is_empty:
            assert len({h.request_id for h in plan.held}) == min(len(scheduler.waiting), config.max_num_looks)
            assert all(h.limit is Limit.GRAMMAR for h in plan.held), f"there is work, but nothing moves: {plan}"

    @precondition(lambda self: self.plan is not None)
    @rule(fails=st.sampled_from([False] * 9 + [True]))
    def update(self, fails: bool) -> None:
        plan, self.plan = self.plan, None
        if not fails:
            self.world.update(plan)
            return
        for event in self.world.scheduler.abandon(plan, self.world.clock(), "out of smoke"):
            self.world.note(event)

    @precondition(lambda self: self.plan is None and self.world.scheduler.has_unfinished)
    @rule(num_steps=st.integers(2, 12))
    def several_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.schedule()
            self.update(fails=False)

    @rule(seconds=st.sampled_from([0.5, 3.0, 15.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @precondition(lambda self: self.world.scheduler.has_unfinished)
    @rule(data=st.data())
    def end_from_outside(self, data: st.DataObject) -> None:
        alive = [r.request_id for r in [*self.world.scheduler.running, *self.world.scheduler.waiting]]
        request_id = data.draw(st.sampled_from(alive))
        self.world.finish(request_id, data.draw(st.sampled_from([FinishReason.ABORT, FinishReason.STOP])))
        self.ended_outside.add(request_id)

    @precondition(lambda self: len(self.world.requests) > 2)
    @rule(what=st.sampled_from(["keep", "wait", "keep", "wait", "abort", "drain", "reset", "reset"]))
    def disturb(self, what: str) -> None:
        """One rule for what happens seldom, or little else would happen."""
        scheduler = self.world.scheduler
        if what == "reset":
            scheduler.reset_prefix_cache()
        elif what == "drain":
            scheduler.drain()
        else:
            for event in scheduler.pause(PauseMode(what), self.world.clock()):
                self.world.note(event)
                self.ended_outside.add(event.request_id)

    @precondition(lambda self: self.world.scheduler.paused is not None)
    @rule()
    def resume(self) -> None:
        self.world.scheduler.resume()

    @precondition(lambda self: any(g.state == "compiling" for g in self.grammars))
    @rule(data=st.data(), state=st.sampled_from(["ready", "ready", "failed"]))
    def grammar_is_compiled(self, data: st.DataObject, state: str) -> None:
        compiling = [g for g in self.grammars if g.state == "compiling"]
        data.draw(st.sampled_from(compiling)).state = state

    @invariant()
    def nobody_is_lost(self) -> None:
        scheduler, requests = self.world.scheduler, self.world.requests
        alive = {r.request_id for r in scheduler.running} | {r.request_id for r in scheduler.waiting}
        assert alive == {r for r in requests if requests[r].state is not RequestState.FINISHED}
        untold = {event.request_id for event in scheduler._events if event.finish_reason is not None}
        assert alive | untold == requests.keys() - self.world.reasons.keys()
        scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        if self.plan is not None:
            self.world.update(self.plan)
        for grammar in self.grammars:
            if grammar.state == "compiling":
                grammar.state = "ready"
        end_of_all(self.world, max_steps=3000)
        assert_said_as_alone(self.world, self.ended_outside)
        assert_nothing_is_held(self.world.scheduler)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)


class HybridMachine(SchedulerMachine):
    """The same over several groups of layers."""

    @initialize(
        limits=LIMITS,
        windows=st.sampled_from([(None, 6), (5,), (None, 3, 3), (9, None, 1)]),
        drafter=st.sampled_from([*[None] * 4, *DRAFTERS]),
        requests=st.lists(REQUESTS, min_size=2, max_size=8),
    )
    def build(
        self, limits: dict[str, Any], windows: tuple[int | None, ...], drafter: Any, requests: list[dict[str, Any]]
    ) -> None:
        several = {"kv_windows": windows, "num_blocks": limits["num_blocks"] * len(windows)}
        self._begin(limits | several, drafter, requests)


TestHybridMachine = HybridMachine.TestCase
TestHybridMachine.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


@pytest.mark.full
class TestHybridMachineAtLength(HybridMachine.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=80, deadline=None)


@pytest.mark.full
class TestSchedulerMachineAtLength(SchedulerMachine.TestCase):
    settings = settings(max_examples=4000, stateful_step_count=80, deadline=None)
