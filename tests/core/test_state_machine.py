"""The scheduler over random histories: arrivals, steps and endings in any order, in small pools.

After every rule all invariants hold; the runner checks every plan against a model of KV memory; in the end every
request that was accepted has finished, with the output it would have had alone.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from worlds import World, solo_output

from noria.core.events import FinishReason
from noria.core.plan import StepPlan
from noria.errors import ContextLengthError
from noria.kv.prefix import PrefixKey

PROMPTS = [list(range(50, 50 + n)) for n in range(1, 30)]  # prefixes of each other: sharing is common
OTHER_PROMPTS = [list(range(50, 50 + n // 2)) + list(range(900, 900 + n - n // 2)) for n in range(1, 30)]


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.plan: StepPlan | None = None
        self.num_steps_without_progress = 0

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_batched_tokens=st.integers(1, 24),
        max_num_seqs=st.integers(1, 5),
        enable_prefix_caching=st.booleans(),
    )
    def build(self, **config: int) -> None:
        self.world = World(**config)

    @rule(
        prompt=st.sampled_from(PROMPTS + OTHER_PROMPTS),
        max_tokens=st.integers(1, 12),
        salt=st.sampled_from([None, None, "s"]),
    )
    def arrive(self, prompt: list[int], max_tokens: int, salt: str | None) -> None:
        fits = len(prompt) + max_tokens <= self.world.config.max_model_len
        request_id = f"r{len(self.world.requests)}"
        try:
            self.world.add(request_id, prompt, max_tokens=max_tokens, prefix_key=PrefixKey(salt=salt))
        except ContextLengthError:
            assert not fits
        else:
            assert fits

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self) -> None:
        self.plan = self.world.schedule()
        assert self.plan.num_tokens <= self.world.config.max_num_batched_tokens
        if self.world.scheduler.has_unfinished:
            assert not self.plan.is_empty, f"there is work, but nothing moves: {self.plan}"

    @precondition(lambda self: self.plan is not None)
    @rule()
    def update(self) -> None:
        plan, self.plan = self.plan, None
        self.world.update(plan)

    @precondition(lambda self: self.world.scheduler.has_unfinished)
    @rule(data=st.data())
    def end_from_outside(self, data: st.DataObject) -> None:
        alive = [r for r in self.world.requests if r not in self.world.reasons]
        self.world.finish(
            data.draw(st.sampled_from(alive)), data.draw(st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
        )

    @invariant()
    def nobody_is_lost(self) -> None:
        scheduler = self.world.scheduler
        alive = {r.request_id for r in scheduler.running} | {r.request_id for r in scheduler.waiting}
        assert alive == set(self.world.requests) - set(self.world.reasons)
        scheduler.kv.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        if self.plan is not None:
            self.world.update(self.plan)
        self.world.run(max_steps=3000)
        for request_id, output in self.world.outputs.items():
            request = self.world.requests[request_id]
            prompt = request.token_ids[: request.num_prompt_tokens]
            alone = solo_output(prompt, max_tokens=request.max_tokens)
            assert output == alone[: len(output)]
            if self.world.reasons[request_id] is FinishReason.LENGTH:
                assert output == alone
        assert self.world.scheduler.kv.pool.num_free_blocks == self.world.config.num_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
