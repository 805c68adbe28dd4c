"""Whole steps: the arrays an executor gets, who samples, and that a request's tokens are its own.

`HashExecutor` reads its context back through real paged KV, so a wrong slot, table or position changes the tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.core.plan import Admitted, Limit, Preemption, StepPlan, StepResult
from noria.errors import EngineError, OptionError
from noria.fakes.executor import HashExecutor
from noria.runner.executor import Float32Array, ForwardBatch
from noria.runner.runner import ModelRunner
from runner import oracle
from runner.building import admitted

BLOCK, NUM_BLOCKS, MAX_LEN, VOCAB = 4, 60, 48, 64


class Recorder(HashExecutor):
    """Keeps the last batch it was given and the logits it returned."""

    def forward(self, batch: ForwardBatch) -> Float32Array:
        self.batch = batch
        self.logits = super().forward(batch)
        return self.logits


def new_runner(executor: HashExecutor | None = None, **changes: Any) -> ModelRunner:
    sizes = {"max_num_seqs": 6, "max_model_len": MAX_LEN, "num_blocks": NUM_BLOCKS, "block_size": BLOCK}
    return ModelRunner(executor or HashExecutor(VOCAB), **(sizes | {"vocab_size": VOCAB} | changes))


class Driver:
    """A hand-driven scheduler: says what runs, hands out blocks, keeps each request's tokens."""

    def __init__(self) -> None:
        self.runner = new_runner()
        self.free = list(range(1, NUM_BLOCKS + 1))
        self.requests: dict[str, Admitted] = {}
        self.tokens: dict[str, list[int]] = {}
        self.blocks: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.gone: list[str] = []

    def add(self, request: Admitted) -> None:
        self.requests[request.request_id] = request
        self.tokens[request.request_id] = list(request.token_ids)

    def preempt(self, request_id: str) -> None:
        self.free += self.blocks.pop(request_id)  # to the end: it will resume with other blocks
        del self.computed[request_id]
        self.gone.append(request_id)

    def step(self, counts: dict[str, int]) -> StepResult:
        entries, fresh = [], {}
        for request_id, count in counts.items():
            is_new = request_id not in self.computed
            if is_new:
                self.computed[request_id], self.blocks[request_id] = 0, []
            table = self.blocks[request_id]
            needed = -(-(self.computed[request_id] + count) // BLOCK) - len(table)
            taken = tuple(self.free.pop(0) for _ in range(needed))
            table.extend(taken)
            if is_new:
                request = self.requests[request_id]
                entries.append(
                    Admitted(
                        request_id, tuple(self.tokens[request_id]), request.num_prompt_tokens, 0, taken,
                        request.sampling, request.seed, request.index,
                    )
                )  # fmt: skip
            elif taken:
                fresh[request_id] = taken
        plan = StepPlan(
            step=1,
            num_scheduled_tokens=counts,
            admitted=tuple(entries),
            new_block_ids=fresh,
            preemptions=tuple(Preemption(request_id, "somebody", Limit.KV_BLOCKS, 0, 0, 1) for request_id in self.gone),
        )
        self.gone = []
        result = self.runner.execute(plan)
        self.runner.batch.check()
        for request_id, count in counts.items():
            self.computed[request_id] += count
            at_end = self.computed[request_id] == len(self.tokens[request_id])
            assert (request_id in result.token_ids) == at_end, "exactly the rows at their end sample"
        for request_id, token_ids in result.token_ids.items():
            self.tokens[request_id].extend(token_ids)
        return result

    def left(self, request_id: str) -> int:
        return len(self.tokens[request_id]) - self.computed.get(request_id, 0)


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 1.0, "min_p": 0.1},
)
NUM_OUTPUT = 14


def request(i: int) -> Admitted:
    prompt = [(7 * i + 3 * j) % VOCAB for j in range(1 + 5 * i)]
    return admitted(f"r{i}", prompt, seed=100 + i // 2, index=i % 2, **KINDS[i])


def alone(i: int) -> list[int]:
    driver = Driver()
    driver.add(request(i))
    name = f"r{i}"
    while len(driver.tokens[name]) < len(request(i).token_ids) + NUM_OUTPUT:
        driver.step({name: driver.left(name)})
    return driver.tokens[name]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The tokens of each request when nobody else is there and it is never cut short."""
    return [alone(i) for i in range(len(KINDS))]


def test_the_six_requests_differ(expected: list[list[int]]) -> None:
    """Else the comparisons below would say little."""
    outputs = [tuple(tokens[-NUM_OUTPUT:]) for tokens in expected]
    assert len(set(outputs)) == len(outputs)
    assert all(len(set(output)) > 3 for output in outputs)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_same_tokens_batched_chunked_left_out_and_preempted(expected: list[list[int]], data: st.DataObject) -> None:
    """Any schedule: some rows run, in chunks or whole, some wait, some are preempted and resume elsewhere."""
    driver = Driver()
    for i in range(len(KINDS)):
        driver.add(request(i))
    done: set[str] = set()
    for _ in range(300):
        unfinished = [name for name in driver.tokens if name not in done]
        if not unfinished:
            break
        if data.draw(st.integers(0, 9)) < 2 and driver.computed:
            victim = data.draw(st.sampled_from(sorted(driver.computed)))
            driver.preempt(victim)  # it may come back in this very step
        names = data.draw(st.lists(st.sampled_from(unfinished), unique=True, min_size=1))
        chunk = data.draw(st.sampled_from((1, 3, 100)))
        driver.step({name: min(chunk, driver.left(name)) for name in names})
        for i in range(len(KINDS)):
            if len(driver.tokens[f"r{i}"]) >= len(expected[i]):
                done.add(f"r{i}")
    for name in driver.tokens:  # whatever the draws left over
        while len(driver.tokens[name]) < len(expected[int(name[1:])]):
            driver.step({name: driver.left(name)})
    assert [driver.tokens[f"r{i}"][: len(expected[i])] for i in range(len(KINDS))] == expected


def test_preempted_at_every_position_and_resumed_with_other_blocks(expected: list[list[int]]) -> None:
    for i in range(len(KINDS)):
        driver, name = Driver(), f"r{i}"
        driver.add(request(i))
        while len(driver.tokens[name]) < len(expected[i]):
            driver.step({name: driver.left(name)})
            driver.preempt(name)
        assert driver.tokens[name] == expected[i]


def test_the_executor_gets_what_the_plan_says() -> None:
    """A chunk in the middle of a prompt, a decode, and a cached prefix, with their positions, slots and tables."""
    executor = Recorder(VOCAB)
    runner = new_runner(executor)
    first = runner.execute(
        StepPlan(
            step=1,
            num_scheduled_tokens={"a": 3, "b": 2},
            admitted=(
                admitted("a", [10, 11, 12, 13, 14, 15], blocks=[9, 4, 30]),  # the third block is for later
                admitted("b", [20, 21], blocks=[2, 7], temperature=0),  # and so is this one's second
            ),
        )
    )
    assert list(first.token_ids) == ["b"], "a is in the middle of its prompt"
    # Another row reads b's block as its cached prefix; b's own next token is the sampled one.
    sampled = first.token_ids["b"][0]
    runner.execute(
        StepPlan(
            step=2,
            num_scheduled_tokens={"b": 1, "a": 3, "c": 3},
            admitted=(admitted("c", [10, 11, 12, 31, 32, 33], computed=3, blocks=[9, 8]),),
        )
    )
    batch = executor.batch
    assert batch.token_ids.tolist() == [sampled, 13, 14, 15, 31, 32, 33]
    assert batch.positions.tolist() == [2, 3, 4, 5, 3, 4, 5]
    assert batch.slots.tolist() == [2 * 4 + 2, 9 * 4 + 3, 4 * 4 + 0, 4 * 4 + 1, 9 * 4 + 3, 8 * 4 + 0, 8 * 4 + 1]
    assert batch.query_start.tolist() == [0, 1, 4, 7]
    assert batch.context_len.tolist() == [3, 6, 6]
    assert batch.block_table.tolist() == [[2, 0], [9, 4], [9, 8]], "blocks past the context are not shown"
    assert batch.logit_tokens.tolist() == [0, 3, 6]
    for array in (batch.token_ids, batch.positions, batch.slots, batch.query_start, batch.context_len):
        assert array.dtype == np.int32
    assert batch.block_table.dtype == batch.logit_tokens.dtype == np.int32


def test_the_random_counter_is_the_output_position_and_the_sequence_index() -> None:
    executor = Recorder(VOCAB)
    runner = new_runner(executor)
    # Resumed with two outputs: the next is output 2, whatever the prompt's length.
    entry = admitted("a", [1, 2, 3, 4, 5], prompt=3, blocks=[1, 2, 3], seed=2**63 + 5, index=1, temperature=1.5)
    step = StepPlan(step=1, num_scheduled_tokens={"a": 5}, admitted=(entry,))
    for position in range(2, 6):
        found = runner.execute(step).token_ids["a"]
        choice = oracle.choose(executor.logits[0].tolist(), entry.sampling)
        expected, distance = choice.pick(oracle.uniform(2**63 + 5, position, 1))
        assert distance > 1e-5, "too near a border to compare; choose other tokens"
        assert found == (expected,)
        step = StepPlan(step=1, num_scheduled_tokens={"a": 1})


def test_a_plan_without_tokens_only_forgets_rows() -> None:
    executor = HashExecutor(VOCAB)
    runner = new_runner(executor)
    runner.execute(StepPlan(step=1, num_scheduled_tokens={"a": 1}, admitted=(admitted("a"),)))
    result = runner.execute(StepPlan(step=2, num_scheduled_tokens={}, finished=("a",)))
    assert result == StepResult(token_ids={})
    assert runner.batch.num_rows == 0
    assert executor.num_forwards == 1


def test_logprobs_for_those_who_ask() -> None:
    runner = new_runner()
    tokens = [5, 6, 7]
    result = runner.execute(
        StepPlan(
            step=1,
            num_scheduled_tokens={"none": 3, "zero": 3, "three": 3},
            admitted=(
                admitted("none", tokens, blocks=[1]),
                admitted("zero", tokens, blocks=[2], logprobs=0, temperature=0),
                # A penalty and a temperature change the token, not the reported probabilities.
                admitted("three", tokens, blocks=[3], logprobs=3, temperature=0, repetition_penalty=50.0),
            ),
        )
    )
    assert list(result.logprobs) == ["zero", "three"]
    (zero,), (three,) = result.logprobs["zero"], result.logprobs["three"]
    assert zero.token_id == result.token_ids["zero"][0]
    assert zero.top == ()
    assert zero.rank == 1
    assert len(three.top) == 3
    assert three.top[0] == (zero.token_id, zero.logprob)


GOOD = admitted("a", [1, 2, 3, 4, 5], blocks=[1])


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"ghost": 1}, "ghost, which has no row"),
        ({"a": 0}, "request a is scheduled for no tokens"),
        ({"a": 6}, "request a is scheduled past its known tokens"),
        ({"a": 5}, "request a is scheduled past its blocks: 5 tokens scheduled, 0 computed, 5 known, 1 blocks of 4"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(counts: dict[str, int], message: str) -> None:
    executor = HashExecutor(VOCAB)
    runner = new_runner(executor)
    with pytest.raises(EngineError, match=message):
        runner.execute(StepPlan(step=1, num_scheduled_tokens=counts, admitted=(GOOD,)))
    assert executor.num_forwards == 0


def test_a_full_context_samples_no_more() -> None:
    runner = new_runner()
    full = admitted("a", [1] * MAX_LEN, blocks=range(1, MAX_LEN // BLOCK + 1))
    with pytest.raises(EngineError, match="would sample past max_model_len"):
        runner.execute(StepPlan(step=1, num_scheduled_tokens={"a": MAX_LEN}, admitted=(full,)))


def test_the_last_token_of_the_context_is_kept() -> None:
    runner = new_runner()
    nearly = admitted("a", [1] * (MAX_LEN - 1), blocks=range(1, MAX_LEN // BLOCK + 1))
    result = runner.execute(StepPlan(step=1, num_scheduled_tokens={"a": MAX_LEN - 1}, admitted=(nearly,)))
    assert runner.batch.token_ids[0, -1] == result.token_ids["a"][0]


def test_logits_of_the_wrong_shape_are_refused() -> None:
    class Short(HashExecutor):
        def forward(self, batch: ForwardBatch) -> Float32Array:
            return super().forward(batch)[:-1]

    with pytest.raises(EngineError, match=r"logits of shape \(0, 64\) for 1 rows"):
        new_runner(Short(VOCAB)).execute(StepPlan(step=1, num_scheduled_tokens={"a": 1}, admitted=(admitted("a"),)))


class Broken(HashExecutor):
    """Its logits are NaN from `first` on."""

    first = 0

    def forward(self, batch: ForwardBatch) -> Float32Array:
        logits = super().forward(batch)
        logits[self.first :, 7] = np.nan
        return logits


def test_unusable_logits_cost_their_requests_alone() -> None:
    executor = Broken(VOCAB)
    executor.first = 1
    runner = new_runner(executor)
    rows = tuple(admitted(name, blocks=[i + 1], logprobs=0) for i, name in enumerate("abc"))
    result = runner.execute(StepPlan(step=1, num_scheduled_tokens=dict.fromkeys("abc", 1), admitted=rows))
    assert list(result.token_ids) == list(result.logprobs) == ["a"]
    assert list(result.failed) == ["b", "c"]
    assert result.failed["b"] == "the model returned unusable logits (NaN or infinite) for request b"
    assert runner.batch.num_tokens[:3].tolist() == [2, 1, 1]
    runner.batch.check()


def test_a_prompt_in_the_same_step_does_not_pay_for_unusable_logits() -> None:
    """Nor when nobody else samples: `b` is in the middle of its prompt."""
    rows = (admitted("a", blocks=[1]), admitted("b", [1, 2, 3, 4], blocks=[2]))
    runner = new_runner(Broken(VOCAB))
    result = runner.execute(StepPlan(step=1, num_scheduled_tokens={"a": 1, "b": 2}, admitted=rows))
    assert (list(result.failed), result.token_ids) == (["a"], {})
    assert runner.batch.num_computed_tokens[runner.batch.row("b")] == 2


def test_a_pool_beyond_int32_slots_is_refused() -> None:
    with pytest.raises(OptionError, match="int32"):
        new_runner(num_blocks=2**29)


def test_the_hash_executor_notices_kv_that_is_not_there() -> None:
    """The fake must be able to fail: a prefix that nobody computed, and another row's block."""
    claimed = admitted("a", [1, 2, 3, 4, 5], computed=4, blocks=[1, 2])
    with pytest.raises(EngineError, match="is not in its slot"):
        new_runner().execute(StepPlan(step=1, num_scheduled_tokens={"a": 1}, admitted=(claimed,)))

    outputs = []
    for prefix_block in (1, 2):
        runner = new_runner()
        runner.execute(
            StepPlan(
                step=1,
                num_scheduled_tokens={"x": 4, "y": 4},
                admitted=(admitted("x", [1, 2, 3, 4], blocks=[1]), admitted("y", [9, 9, 9, 9], blocks=[2])),
            )
        )
        reader = admitted("a", [1, 2, 3, 4, 5], computed=4, blocks=[prefix_block, 3], logprobs=5)
        result = runner.execute(StepPlan(step=2, num_scheduled_tokens={"a": 1}, admitted=(reader,)))
        outputs.append(result.logprobs["a"][0].top)
    assert outputs[0] != outputs[1]
