"""The persistent batch against a plain dict, over random plans; and each rule on its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from noria.core.plan import Admitted, Limit, Preemption, StepPlan
from noria.errors import EngineError
from noria.runner.batch import PersistentBatch
from noria.runner.row_params import row_params
from runner.building import admitted

MAX_SEQS, MAX_LEN, BLOCK, POOL, VOCAB = 5, 24, 4, 40, 10


def new_batch(**changes: Any) -> PersistentBatch:
    sizes = {"max_num_seqs": MAX_SEQS, "max_model_len": MAX_LEN, "num_blocks": POOL, "block_size": BLOCK}
    return PersistentBatch(**(sizes | {"vocab_size": VOCAB} | changes))


def plan(preempted: Sequence[str] = (), **fields: Any) -> StepPlan:
    preemptions = tuple(Preemption(request_id, "somebody", Limit.KV_BLOCKS, 0, 0, 1) for request_id in preempted)
    return StepPlan(step=1, num_scheduled_tokens={}, preemptions=preemptions, **fields)


class BatchMachine(RuleBasedStateMachine):
    """Draws plans that a scheduler could make, and keeps what each request should have in a dict."""

    @initialize()
    def start(self) -> None:
        self.batch = new_batch()
        self.rows: dict[str, dict[str, Any]] = {}
        self.waiting: list[Admitted] = []  # preempted: tokens kept, blocks gone
        self.num_created = 0

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        leaving = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True)) if self.rows else []
        cut = data.draw(st.integers(0, len(leaving)))
        finished, preempted = leaving[:cut], leaving[cut:]
        # Every so often a request is preempted and resumed in one plan, or an id ends and comes back at once.
        for request_id in leaving:
            row = self.rows.pop(request_id)
            if request_id in preempted or data.draw(st.booleans()):
                self.waiting.append(row["admitted"])
        unknown = data.draw(st.lists(st.sampled_from(["ghost", "spectre"]), max_size=1))
        newcomers = [self.admit(data) for _ in range(data.draw(st.integers(0, MAX_SEQS - len(self.rows))))]
        grown = {request_id: self.grow(request_id, data) for request_id in self.rows}
        self.batch.apply(
            plan(
                finished=(*unknown, *finished),
                preempted=tuple(preempted),
                admitted=tuple(newcomers),
                new_block_ids={request_id: ids for request_id, ids in grown.items() if ids},
            )
        )

    def admit(self, data: st.DataObject) -> Admitted:
        room = MAX_LEN // BLOCK
        blocks = data.draw(st.lists(st.integers(1, POOL), min_size=1, max_size=room - 1, unique=True))
        if self.waiting and data.draw(st.booleans()):
            known = self.waiting.pop()
            name, tokens, prompt = known.request_id, known.token_ids, known.num_prompt_tokens
        else:
            self.num_created += 1
            name = f"r{self.num_created}"
            tokens = tuple(data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=MAX_LEN // 2)))
            prompt = data.draw(st.integers(1, len(tokens)))
        entry = admitted(
            name, tokens, blocks=blocks, prompt=prompt, seed=self.num_created,
            presence_penalty=data.draw(st.sampled_from((0.0, 1.0))),
        )  # fmt: skip
        self.rows[name] = {"admitted": entry, "tokens": list(tokens), "blocks": list(blocks)}
        return entry

    def grow(self, request_id: str, data: st.DataObject) -> tuple[int, ...]:
        blocks = self.rows[request_id]["blocks"]
        fresh = data.draw(st.lists(st.integers(1, POOL), max_size=MAX_LEN // BLOCK - len(blocks), unique=True))
        fresh = [block for block in fresh if block not in blocks]
        blocks.extend(fresh)
        return tuple(fresh)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def sample_some(self, data: st.DataObject) -> None:
        request_ids = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True))
        request_ids = [request_id for request_id in request_ids if len(self.rows[request_id]["tokens"]) < MAX_LEN]
        token_ids = [data.draw(st.integers(0, VOCAB - 1)) for _ in request_ids]
        rows = np.array([self.batch.row(request_id) for request_id in request_ids], dtype=np.intp)
        self.batch.append_tokens(rows, np.array(token_ids, dtype=np.int32))
        for request_id, token_id in zip(request_ids, token_ids, strict=True):
            row = self.rows[request_id]
            row["tokens"].append(token_id)
            entry = row["admitted"]
            row["admitted"] = admitted(
                request_id, row["tokens"], blocks=entry.block_ids, prompt=entry.num_prompt_tokens, seed=entry.seed,
                presence_penalty=entry.sampling.presence_penalty,
            )  # fmt: skip

    @invariant()
    def same_as_the_dict(self) -> None:
        batch = self.batch
        batch.check()
        assert batch.num_rows == len(self.rows)
        for request_id, row in self.rows.items():
            i = batch.row(request_id)
            assert batch.token_ids[i, : batch.num_tokens[i]].tolist() == row["tokens"]
            assert batch.block_table[i, : batch.num_blocks[i]].tolist() == row["blocks"]
            assert batch.num_prompt_tokens[i] == row["admitted"].num_prompt_tokens
            assert batch.params[i].item() == row_params(row["admitted"])


TestBatchMachine = BatchMachine.TestCase
TestBatchMachine.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


def test_the_last_row_moves_into_the_hole_and_leaves_zeros() -> None:
    batch = new_batch()
    batch.apply(plan(admitted=tuple(admitted(name, [1, 2], blocks=[10 + i, 20 + i]) for i, name in enumerate("abc"))))
    batch.apply(plan(finished=("a",)))
    assert batch.request_ids == ["c", "b"]
    assert batch.block_table[:3, :3].tolist() == [[12, 22, 0], [11, 21, 0], [0, 0, 0]]
    assert not batch.block_table[2:].any(), "a stale table row would be written through"


def test_newcomers_take_the_lowest_hole_and_nobody_else_moves() -> None:
    batch = new_batch()
    batch.apply(plan(admitted=tuple(admitted(name) for name in "abcd")))
    batch.apply(plan(finished=("c", "a"), admitted=(admitted("e"), admitted("f"))))
    assert batch.request_ids == ["e", "b", "f", "d"]


def test_preempted_and_resumed_in_one_plan_replaces_the_blocks() -> None:
    batch = new_batch()
    batch.apply(plan(admitted=(admitted("a", [1, 2, 3], blocks=[7, 8, 9]),)))
    batch.apply(plan(preempted=("a",), admitted=(admitted("a", [1, 2, 3, 4], blocks=[5], prompt=3),)))
    assert batch.block_table[0].tolist() == [5, 0, 0, 0, 0, 0]
    assert batch.num_computed_tokens[0] == 0


def test_resumed_without_a_preemption_notice_replaces_too() -> None:
    batch = new_batch()
    batch.apply(plan(admitted=(admitted("a", [1, 2, 3], blocks=[7, 8, 9]), admitted("b"))))
    batch.apply(plan(admitted=(admitted("a", [1, 2, 3, 4], blocks=[5]),)))
    assert batch.block_table[batch.row("a")].tolist() == [5, 0, 0, 0, 0, 0]
    assert batch.num_rows == 2


def test_an_id_that_ended_may_come_back_in_the_same_plan() -> None:
    batch = new_batch()
    batch.apply(plan(admitted=(admitted("a", [1, 2, 3], blocks=[7, 8]),)))
    batch.apply(plan(finished=("a",), admitted=(admitted("a", [9], blocks=[3]),)))
    assert batch.token_ids[0, : batch.num_tokens[0]].tolist() == [9]
    assert batch.block_table[0].tolist() == [3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"new_block_ids": {"ghost": (1,)}}, "ghost, which has no row"),
        ({"admitted": (admitted("a", blocks=[0]),)}, r"block id of request a is 0, outside 1 \.\. 40"),
        ({"admitted": (admitted("a", blocks=[POOL + 1]),)}, "block id of request a is 41"),
        ({"admitted": (admitted("a", [3, VOCAB]),)}, r"token id of request a is 10, outside 0 \.\. 9"),
        ({"admitted": (admitted("a", [-1]),)}, "token id of request a is -1"),
        ({"admitted": (admitted("a", [2**70]),)}, "token id of request a"),
        ({"admitted": (admitted("a", [1] * (MAX_LEN + 1)),)}, "25 tokens, over max_model_len 24"),
        ({"admitted": (admitted("a", [1, 2], computed=2),)}, "one must be left to compute"),
        ({"admitted": (admitted("a", blocks=range(1, 8)),)}, "7 blocks, more than"),
        ({"admitted": tuple(admitted(f"r{i}") for i in range(MAX_SEQS + 1))}, "r5 has no room: all 5 rows"),
    ],
)
def test_a_plan_that_contradicts_the_batch_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        new_batch().apply(plan(**fields))


@pytest.mark.parametrize("fields", [{"admitted": (admitted("x", [3, VOCAB]),)}, {"new_block_ids": {"b": (POOL + 1,)}}])
def test_after_a_refused_plan_the_other_rows_stand_and_no_room_is_lost(fields: dict[str, Any]) -> None:
    batch = new_batch(max_num_seqs=3)
    newcomers = admitted("a", blocks=[1]), admitted("b", blocks=[2]), admitted("c", [5, 6], blocks=[3])
    batch.apply(plan(admitted=newcomers))
    with pytest.raises(EngineError):
        batch.apply(plan(finished=("a",), **fields))
    batch.apply(plan(finished=("b", "x"), admitted=(admitted("d", blocks=[4]), admitted("e", blocks=[5]))))
    batch.check()
    assert sorted(batch.request_ids) == ["c", "d", "e"]
    row = batch.row("c")
    assert batch.token_ids[row, : batch.num_tokens[row]].tolist() == [5, 6]
    assert batch.block_table[row, 0] == 3


def test_without_a_vocabulary_size_ids_are_bounded_by_int32() -> None:
    with pytest.raises(EngineError, match="token id"):
        new_batch(vocab_size=None).apply(plan(admitted=(admitted("a", [2**31]),)))


def test_check_sees_a_stale_entry() -> None:
    batch = new_batch()
    batch.apply(plan(admitted=(admitted("a", blocks=[3]),)))
    batch.block_table[0, 1] = 4
    with pytest.raises(AssertionError, match="past its end"):
        batch.check()


def test_memory_is_not_touched_before_it_is_used() -> None:
    """64 rows of a million tokens are 256 MiB of addresses, and next to no memory."""
    batch = new_batch(max_num_seqs=64, max_model_len=2**20, num_blocks=2**20, block_size=16)
    batch.apply(plan(admitted=(admitted("a", [1, 2]),)))
    assert batch.token_ids.shape == (64, 2**20)
    assert np.count_nonzero(batch.token_ids[:, :8]) == 2


def test_rows_of_a_model_of_two_groups_forget_what_a_window_has_moved_past():
    """A full group and one with a window of 5; blocks of 4 tokens, column after column."""
    batch = PersistentBatch(max_num_seqs=3, max_model_len=24, num_blocks=40, block_size=4, windows=(None, 5))
    first, second = admitted("a", range(1, 12), blocks=[1, 2, 3, 4, 5, 6]), admitted("b", [7, 8], blocks=[11, 12])
    batch.apply(StepPlan(1, {"a": 11, "b": 2}, admitted=(first, second)))
    rows = np.array([batch.row("a"), batch.row("b")])
    assert batch.num_columns(rows).tolist() == [3, 1]
    batch.drop_passed(rows)
    assert batch.table_of(1)[rows, :3].tolist() == [[2, 4, 6], [12, 0, 0]], "nothing has been computed yet"
    batch.num_computed_tokens[rows[0]] = 8  # the next token, at 8, reads 4 and what follows
    batch.drop_passed(rows)
    assert batch.table_of(0)[rows[0], :3].tolist() == [1, 3, 5]
    assert batch.table_of(1)[rows[0], :3].tolist() == [0, 4, 6]
    batch.apply(StepPlan(2, {"b": 1}, finished=("a",)))  # b moves to the row that a had
    batch.check()
    batch.num_computed_tokens[0] = 2
    batch.apply(StepPlan(3, {"b": 1}, new_block_ids={"b": (2, 1)}))
    batch.drop_passed(np.array([0]))
    assert batch.block_table[0, :4].tolist() == [11, 12, 2, 1]
    batch.check()


def test_a_cached_prefix_comes_with_null_blocks_where_its_window_ends():
    batch = PersistentBatch(max_num_seqs=1, max_model_len=24, num_blocks=40, block_size=4, windows=(None, 5))
    cached = admitted("a", range(1, 12), blocks=[1, 0, 3, 4, 5, 6], computed=8)
    batch.apply(StepPlan(1, {"a": 3}, admitted=(cached,)))
    batch.check()
    assert batch.table_of(1)[0, :3].tolist() == [0, 4, 6]
