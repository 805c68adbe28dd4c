"""The persistent batch: one row per resident request, in preallocated arrays, brought up to date by each plan.

Owned and called by `ModelRunner`. A row keeps its tokens, block table and sampling parameters from step to step,
scheduled or not; a plan touches only what it changes. Rows in use are always 0 .. num_rows - 1: `apply` moves the
last row into a hole, so a row's number is not stable, and nothing outside this module may keep one.

Not here: positions, slots and other arrays of one step (`noria.runner.runner`), and any decision. Block ids are
believed to be the request's own (or shared, read-only prefixes): the scheduler's `check()` watches that.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from noria.core.plan import Admitted, StepPlan
from noria.errors import EngineError
from noria.kv_layout import columns_behind
from noria.runner.constraints import Constraints, constraints_of
from noria.runner.executor import Int32Array
from noria.runner.row_params import ROW_PARAMS, row_params


class PersistentBatch:
    """Rows of resident requests. Arrays are public to read; only the methods write.

    | array | shape | content |
    |---|---|---|
    | `token_ids` | [max_num_seqs, max_model_len] | known tokens; past `num_tokens` whatever was there before |
    | `block_table` | [max_num_seqs, max_blocks] | block ids, column after column, each one for every group of layers;
    past `num_blocks` always 0, the null block, and where a group's window has moved past |
    | `num_tokens`, `num_prompt_tokens`, `num_computed_tokens`, `num_blocks` | [max_num_seqs] | 0 in unused rows |
    | `params` | [max_num_seqs] | `ROW_PARAMS` records |

    Memory is committed as rows are first used. What few requests have is kept by request id: `constraints`; `scoring`,
    from which position on the log-probabilities of prompt tokens are wanted, and `num_top_of`, with how many
    alternatives; `silent`, those that may have no token.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        windows: tuple[int | None, ...] = (None,),
        vocab_size: int | None = None,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self._num_pool_blocks = num_blocks
        self.vocab_size = vocab_size
        self.token_ids: Int32Array = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.num_groups = len(windows)
        self._sliding = [(group, window) for group, window in enumerate(windows) if window is not None]
        width = -(-max_model_len // block_size) * self.num_groups
        self.block_table: Int32Array = np.zeros((max_num_seqs, width), dtype=np.int32)
        self._num_passed: Int32Array = np.zeros((max_num_seqs, self.num_groups), dtype=np.int32)  # columns
        self.num_tokens: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt_tokens: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_computed_tokens: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_blocks: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self.params = np.zeros(max_num_seqs, dtype=ROW_PARAMS)
        self.constraints: dict[str, Constraints] = {}
        self.scoring: dict[str, int] = {}
        self.num_top_of: dict[str, int] = {}
        self.silent: set[str] = set()
        self.request_ids: list[str | None] = []  # None marks a hole, which only exists inside apply()
        self._rows: dict[str, int] = {}

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def row(self, request_id: str) -> int:
        """The row of a request until the next `apply`. Raises `EngineError` when it has none."""
        try:
            return self._rows[request_id]
        except KeyError:
            raise EngineError(f"the plan names request {request_id}, which has no row in the batch") from None

    def apply(self, plan: StepPlan) -> None:
        """Brings the rows up to date with `plan`: remove, admit, append blocks, condense.

        Raises `EngineError` when the plan contradicts the batch. The rows of requests that the plan admits or gives
        blocks to are then in doubt and must be finished; all others are as they were.
        """
        try:
            self._apply(plan)
        finally:
            self._condense()

    def _apply(self, plan: StepPlan) -> None:
        holes: list[int] = []  # a heap, so that newcomers take the lowest
        for request_id in (*plan.finished, *plan.preempted):
            if request_id in self._rows:  # the worker may never have known one that ended while it waited
                heapq.heappush(holes, self._remove(request_id))
        for admitted in plan.admitted:
            if admitted.request_id in self._rows:
                # Resumed without having been reported as preempted: its blocks replace those it had.
                heapq.heappush(holes, self._remove(admitted.request_id))
            self._admit(admitted, heapq.heappop(holes) if holes else len(self.request_ids))
        for request_id, block_ids in plan.new_block_ids.items():
            self._append_blocks(self.row(request_id), request_id, block_ids)

    def table_of(self, group: int) -> Int32Array:
        """One group's block table, [max_num_seqs, max_columns]: a view."""
        return self.block_table[:, group :: self.num_groups]

    def num_columns(self, rows: npt.NDArray[np.intp]) -> Int32Array:
        """For how many blocks of tokens the rows have room."""
        num_columns: Int32Array = self.num_blocks[rows] // self.num_groups
        return num_columns

    def drop_passed(self, rows: npt.NDArray[np.intp]) -> None:
        """Forgets the blocks that the windows of `rows` have moved past: they may be somebody else's by now."""
        for group, window in self._sliding:
            passed = columns_behind(window, self.num_computed_tokens[rows], self.block_size)
            for i in np.flatnonzero(passed > self._num_passed[rows, group]).tolist():
                self.table_of(group)[rows[i], : passed[i]] = 0
                self._num_passed[rows[i], group] = passed[i]

    def append_tokens(self, rows: npt.NDArray[np.intp], token_ids: Int32Array) -> None:
        """Adds a sampled token to each of `rows` [n], all different. The caller has checked that there is room."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def end_scoring(self) -> None:
        """Forgets who wants log-probabilities of prompt tokens and has had all."""
        for request_id in list(self.scoring):
            row = self._rows[request_id]
            if self.num_computed_tokens[row] >= self.num_prompt_tokens[row] - 1:
                del self.scoring[request_id], self.num_top_of[request_id]

    def _remove(self, request_id: str) -> int:
        row = self._rows.pop(request_id)
        self.request_ids[row] = None
        self._clear(row)
        self.constraints.pop(request_id, None)
        self.scoring.pop(request_id, None)
        self.num_top_of.pop(request_id, None)
        self.silent.discard(request_id)
        return row

    def _clear(self, row: int) -> None:
        # A stale block id would be read or written through after its block has gone to somebody else.
        self.block_table[row, : self.num_blocks[row]] = 0
        self._num_passed[row] = 0
        for counts in (self.num_tokens, self.num_prompt_tokens, self.num_computed_tokens, self.num_blocks):
            counts[row] = 0

    def _admit(self, admitted: Admitted, row: int) -> None:
        request_id = admitted.request_id
        num_tokens = len(admitted.token_ids)
        if num_tokens > self.max_model_len:
            raise EngineError(f"request {request_id} has {num_tokens} tokens, over max_model_len {self.max_model_len}")
        if not 0 <= admitted.num_computed_tokens < num_tokens or not 1 <= admitted.num_prompt_tokens <= num_tokens:
            raise EngineError(
                f"request {request_id} was admitted with {num_tokens} tokens, {admitted.num_prompt_tokens} of the "
                f"prompt and {admitted.num_computed_tokens} computed; one must be left to compute"
            )
        if row == self.max_num_seqs:
            raise EngineError(f"request {request_id} has no room: all {self.max_num_seqs} rows are taken")
        if row == len(self.request_ids):
            self.request_ids.append(None)
        self.request_ids[row] = request_id
        self._rows[request_id] = row
        self.token_ids[row, :num_tokens] = self._checked(
            admitted.token_ids, 0, self.vocab_size, f"token id of request {request_id}"
        )
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = admitted.num_prompt_tokens
        self.num_computed_tokens[row] = admitted.num_computed_tokens
        self.params[row] = row_params(admitted)
        self._note_rarities(admitted)
        self._append_blocks(row, request_id, admitted.block_ids)

    def _note_rarities(self, admitted: Admitted) -> None:
        """What few requests have; all others cost nothing for it later."""
        request_id, sampling = admitted.request_id, admitted.sampling
        if (constraints := constraints_of(admitted, self.vocab_size)) is not None:
            self.constraints[request_id] = constraints
        if admitted.num_scored is not None:
            self.scoring[request_id] = admitted.num_scored
            self.num_top_of[request_id] = sampling.prompt_logprobs or 0
        if sampling.max_tokens == 0:
            self.silent.add(request_id)

    def _append_blocks(self, row: int, request_id: str, block_ids: Sequence[int]) -> None:
        start = int(self.num_blocks[row])
        end = start + len(block_ids)
        if end > self.block_table.shape[1]:
            raise EngineError(
                f"request {request_id} was given {end} blocks, more than max_model_len {self.max_model_len} can use"
            )
        self.block_table[row, start:end] = self._checked(
            block_ids, 0 if self._sliding else 1, self._num_pool_blocks + 1, f"block id of request {request_id}"
        )
        self.num_blocks[row] = end

    @staticmethod
    def _checked(ids: Sequence[int], low: int, end: int | None, what: str) -> Int32Array:
        """The ids as an array, all of them in low .. end - 1 (no upper bound but int32's if `end` is None)."""
        if not ids:
            return np.zeros(0, dtype=np.int32)
        last = np.iinfo(np.int32).max if end is None else end - 1
        smallest, greatest = min(ids), max(ids)
        if smallest < low or greatest > last:
            raise EngineError(f"{what} is {smallest if smallest < low else greatest}, outside {low} .. {last}")
        return np.array(ids, dtype=np.int32)

    def _condense(self) -> None:
        """Moves the last row into the lowest hole until the rows in use are 0 .. num_rows - 1."""
        self._drop_holes_at_end()
        for hole in [row for row, request_id in enumerate(self.request_ids) if request_id is None]:
            if hole < len(self.request_ids):
                self._move(len(self.request_ids) - 1, hole)
                self._drop_holes_at_end()

    def _drop_holes_at_end(self) -> None:
        while self.request_ids and self.request_ids[-1] is None:
            self.request_ids.pop()

    def _move(self, source: int, target: int) -> None:
        num_tokens, num_blocks = self.num_tokens[source], self.num_blocks[source]
        self.token_ids[target, :num_tokens] = self.token_ids[source, :num_tokens]
        self.block_table[target, :num_blocks] = self.block_table[source, :num_blocks]
        self._num_passed[target] = self._num_passed[source]
        for counts in (self.num_tokens, self.num_prompt_tokens, self.num_computed_tokens, self.num_blocks):
            counts[target] = counts[source]
        self.params[target] = self.params[source]
        request_id = self.request_ids[source]
        assert request_id is not None, "only rows in use are moved"
        self.request_ids[target] = request_id
        self.request_ids[source] = None
        self._rows[request_id] = target
        self._clear(source)

    def check(self) -> None:
        """Asserts the invariants; for tests, after each step."""
        used = self.num_rows
        assert self.request_ids == sorted(self._rows, key=self._rows.__getitem__), "rows are not dense"
        assert [self._rows[r] for r in self.request_ids if r is not None] == list(range(used))
        for kept in (self.constraints, self.scoring, self.num_top_of, self.silent):
            assert set(kept) <= set(self._rows), "something is kept of a request that has no row"
        columns = np.arange(self.block_table.shape[1])
        stale = self.block_table[columns >= self.num_blocks[:, None]]
        assert not stale.any(), "a table holds block ids past its end"
        for counts in (self.num_tokens, self.num_prompt_tokens, self.num_computed_tokens, self.num_blocks):
            assert not counts[used:].any(), "an unused row has a count"
        assert (self.num_computed_tokens <= self.num_tokens).all()
        assert (self.num_prompt_tokens <= self.num_tokens).all()
        for row in range(used):
            self._check_row(row)

    def _check_row(self, row: int) -> None:
        table = self.block_table[row, : self.num_blocks[row]].tolist()
        blocks = [block for block in table if block] if self._sliding else table
        assert all(1 <= b <= self._num_pool_blocks for b in blocks), f"row {row} holds a block outside the pool"
        assert len(set(blocks)) == len(blocks), f"row {row} holds a block twice"
        num_places = len(table) // self.num_groups * self.block_size
        assert self.num_computed_tokens[row] <= num_places, f"row {row} computed past its blocks"
