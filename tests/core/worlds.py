"""A small world for scheduler tests: a scheduler, a scripted runner that checks every plan, and a clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from noria.config import SchedulerConfig
from noria.core.draft import PlanDraft
from noria.core.events import FinishReason, RequestEvent
from noria.core.gates import Grammar
from noria.core.plan import Limit, StepPlan, StepResult
from noria.core.request import Request
from noria.core.scheduler import Drafter, Scheduler
from noria.fakes import ManualClock, ScriptedRunner
from noria.kv.prefix import PrefixKey
from noria.kv_layout import KVLayout
from noria.sampling import SamplingParams

EOS = 2


def longest_sequence(num_blocks: int, block_size: int, max_chunk: int, config: Mapping[str, Any]) -> int:
    """What a pool has room for; with sliding windows no more than it would hold with full attention everywhere."""
    layout = KVLayout(block_size, config.get("kv_windows", (None,)), max_chunk)
    return layout.longest(num_blocks, num_blocks * block_size)


class World:
    """Runs steps and checks invariants after each; collects every request's output and end."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_batched_tokens: int = 64,
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        script: Mapping[str, Sequence[int]] | None = None,
        drafter: Drafter | None = None,
        **config: Any,
    ) -> None:
        self.config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len or longest_sequence(num_blocks, block_size, max_num_batched_tokens, config),
            eos_token_ids=(EOS,),
            **config,
        )
        self.scheduler = Scheduler(self.config, drafter=drafter)
        self.runner = ScriptedRunner(num_blocks, block_size, script, windows=self.config.kv_windows)
        self.clock = ManualClock()
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.scores: dict[str, list[int]] = {}
        """Positions of prompt tokens whose log-probabilities were told: the scripted runner writes them into those."""
        self.reasons: dict[str, FinishReason] = {}

    def add(
        self,
        request_id: str,
        prompt: Sequence[int] | int,
        *,
        max_tokens: int | None = 4,
        prefix_key: PrefixKey | None = None,
        priority: int = 0,
        tenant: str | None = None,
        grammar: Grammar | None = None,
        parent_id: str | None = None,
        **sampling: Any,
    ) -> Request:
        """Adds a request; a number stands for a prompt of that many tokens, unlike any other request's."""
        if isinstance(prompt, int):
            first = 10_000 * (len(self.requests) + 1)
            prompt = range(first, first + prompt)
        request = Request(
            request_id,
            list(prompt),
            SamplingParams(max_tokens=max_tokens, **sampling),
            prefix_key=prefix_key or PrefixKey(tenant=tenant),
            priority=priority,
            grammar=grammar,
            parent_id=parent_id,
        )
        self.scheduler.add(request, self.clock())
        self.requests[request_id] = request
        self.outputs[request_id], self.scores[request_id] = [], []
        return request

    def schedule(self) -> StepPlan:
        return self.scheduler.schedule(self.clock())

    def update(self, plan: StepPlan, failed: Sequence[str] = ()) -> list[RequestEvent]:
        """Executes the plan, in which the requests `failed` come to grief, and tells the scheduler."""
        result = self.runner.execute(plan)
        if failed:
            token_ids = {request_id: ids for request_id, ids in result.token_ids.items() if request_id not in failed}
            result = StepResult(token_ids, failed=dict.fromkeys(failed, "out of smoke"))
        self.clock.advance(1.0)
        events = self.scheduler.update(plan, result, self.clock())
        for event in events:
            self.note(event)
        self.scheduler.check()
        return events

    def note(self, event: RequestEvent) -> None:
        self.outputs[event.request_id] += event.token_ids
        self.scores[event.request_id] += [int(-position.logprob) for position in event.prompt_logprobs]
        if event.finish_reason is not None:
            assert event.request_id not in self.reasons, "a request ended twice"
            self.reasons[event.request_id] = event.finish_reason

    def step(self) -> StepPlan:
        plan = self.schedule()
        self.update(plan)
        return plan

    def finish(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> RequestEvent | None:
        event = self.scheduler.finish(request_id, reason, self.clock())
        if event is not None:
            self.note(event)
        self.scheduler.check()
        return event

    def preempt(self, request_id: str) -> None:
        """Takes everything from a running request between two steps, as memory pressure would in one."""
        draft = PlanDraft(0)
        request = self.requests[request_id]
        self.scheduler.preempt(request, request, Limit.KV_BLOCKS, draft)
        self.runner.execute(draft.freeze(0, []))
        self.scheduler.check()

    def run(self, max_steps: int = 10_000) -> list[StepPlan]:
        """Steps until nothing is left; fails if that takes too long."""
        plans = []
        while self.scheduler.has_unfinished:
            assert len(plans) < max_steps, f"still unfinished after {max_steps} steps: {plans[-1]}"
            plans.append(self.step())
        return plans


def solo_output(prompt: Sequence[int], **kwargs: Any) -> list[int]:
    """What a request says when it has a roomy world to itself."""
    world = World(num_blocks=512, max_num_batched_tokens=4096)
    world.add("solo", prompt, **kwargs)
    world.run()
    return world.outputs["solo"]
