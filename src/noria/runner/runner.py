"""One engine step on one worker: arrays from the batch, forward, one token for each row that reached its end.

`ModelRunner.execute` is what the engine calls between `Scheduler.schedule` and `Scheduler.update`. It follows the
five steps that `noria.core.plan` lists, decides nothing, and knows neither model nor tensor library: those are the
`Executor`'s. Work is per array, not per token.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from noria.core.plan import StepPlan, StepResult
from noria.errors import EngineError, OptionError
from noria.runner.batch import PersistentBatch
from noria.runner.constraints import step_constraints
from noria.runner.executor import (
    NOTHING_ALLOWED,
    Executor,
    Float32Array,
    ForwardBatch,
    GroupBlocks,
    Int32Array,
    SamplingBatch,
    StepConstraints,
)
from noria.runner.sampler import NumpySampler
from noria.runner.scoring import PromptScores, Scored

_UNUSABLE_LOGITS = "the model returned unusable logits (NaN or infinite)"
_NOTHING_ALLOWED = "allowed_token_ids, bad_words and min_tokens together allow no next token"


class ModelRunner:
    """Runs plans on an executor, whose KV pool it allocates.

    `num_blocks` does not count the null block. `windows`: of the executor's groups. `vocab_size`, when given, bounds
    the token ids that may reach the executor from the first step on; without it only negative ids are refused.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        windows: tuple[int | None, ...] = (None,),
        vocab_size: int | None = None,
    ) -> None:
        if (num_blocks + 1) * block_size > np.iinfo(np.int32).max:
            raise OptionError(f"a pool of {num_blocks} blocks x {block_size} tokens has more slots than an int32 names")
        self.batch = PersistentBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            windows=windows,
            vocab_size=vocab_size,
        )
        self._executor = executor
        self._sampler = executor.sampler or NumpySampler()
        executor.allocate_kv(num_blocks, block_size)

    def execute(self, plan: StepPlan) -> StepResult:
        """Executes one plan. A plan without tokens only brings the batch up to date.

        A request whose logits are unusable fails alone. Raises `EngineError` when the plan contradicts the batch or the
        executor returns logits of another shape, and passes on what the executor raises. The plan's requests must then
        be finished (`Scheduler.abandon` does that) with the next plan; rows that it did not schedule are as they were.
        """
        self.batch.apply(plan)
        if plan.is_empty:
            return StepResult(token_ids={})
        batch = self.batch
        request_ids = list(plan.num_scheduled_tokens)
        rows = np.array([batch.row(request_id) for request_id in request_ids], dtype=np.intp)
        counts = np.array(list(plan.num_scheduled_tokens.values()), dtype=np.int32)
        self._check_schedule(request_ids, rows, counts)
        batch.drop_passed(rows)

        if batch.scoring:
            return self._run_scoring(request_ids, rows, counts)
        at_end, logits = self._run(request_ids, rows, counts)
        if not len(at_end):
            return StepResult(token_ids={})
        return self._sample(logits, rows[at_end], [request_ids[i] for i in at_end.tolist()])

    def _run(
        self, request_ids: list[str], rows: npt.NDArray[np.intp], counts: Int32Array, scored: Scored | None = None
    ) -> tuple[npt.NDArray[np.intp], Float32Array]:
        """One forward pass over the next `counts` tokens of each row. Returns which of the rows are to sample, and
        logits: first theirs, then those that are wanted for prompt tokens."""
        batch = self.batch
        context_len = batch.num_computed_tokens[rows] + counts
        at_end = np.flatnonzero(context_len == batch.num_tokens[rows])
        if batch.silent:
            at_end = np.array([i for i in at_end.tolist() if request_ids[i] not in batch.silent], dtype=np.intp)
        num_logits = len(at_end) if scored is None else len(at_end) + scored.total
        logits = self._executor.forward(self._forward_batch(rows, counts, context_len, at_end, scored))
        if logits.ndim != 2 or len(logits) != num_logits:
            raise EngineError(f"the executor returned logits of shape {logits.shape} for {num_logits} rows")
        batch.num_computed_tokens[rows] = context_len
        return at_end, logits

    def _run_scoring(self, request_ids: list[str], rows: npt.NDArray[np.intp], counts: Int32Array) -> StepResult:
        """A step in which somebody wants the log-probabilities of prompt tokens."""
        scores = PromptScores(self.batch, self._sampler, request_ids, rows)
        ahead, counts = scores.portions(counts)
        for place, num_tokens in ahead:
            one, alone = slice(place, place + 1), np.full(len(rows), num_tokens, dtype=np.int32)
            scored = scores.scored(alone, place)
            _, logits = self._run(request_ids[one], rows[one], alone[one], scored)
            scores.take(logits, scored)
        scored = scores.scored(counts)
        at_end, logits = self._run(request_ids, rows, counts, scored)
        scores.take(logits[len(at_end) :], scored)
        self.batch.end_scoring()
        usable = [i for i in at_end.tolist() if request_ids[i] not in scores.unusable]
        kept = np.isin(at_end, usable)
        result = StepResult(token_ids={})
        if usable:
            result = self._sample(logits[: len(at_end)][kept], rows[usable], [request_ids[i] for i in usable])
        failed = {request_id: f"{_UNUSABLE_LOGITS} for request {request_id}" for request_id in scores.unusable}
        return msgspec.structs.replace(result, prompt_logprobs=scores.results(), failed=result.failed | failed)

    def _check_schedule(self, request_ids: list[str], rows: npt.NDArray[np.intp], counts: Int32Array) -> None:
        """Raises `EngineError` unless every row can run its tokens: they are known, and have blocks."""
        batch = self.batch
        ends = batch.num_computed_tokens[rows] + counts
        rules = (
            (counts < 1, "is scheduled for no tokens"),
            (ends > batch.num_tokens[rows], "is scheduled past its known tokens"),
            (ends > batch.num_columns(rows) * batch.block_size, "is scheduled past its blocks"),
            (self._at_limit(request_ids, ends), "would sample past max_model_len"),
        )
        for broken, what in rules:
            if broken.any():
                first = int(np.flatnonzero(broken)[0])
                raise EngineError(
                    f"request {request_ids[first]} {what}: {counts[first]} tokens scheduled, "
                    f"{batch.num_computed_tokens[rows[first]]} computed, {batch.num_tokens[rows[first]]} known, "
                    f"{batch.num_blocks[rows[first]]} blocks of {batch.block_size}, max_model_len {batch.max_model_len}"
                )

    def _at_limit(self, request_ids: list[str], ends: Int32Array) -> npt.NDArray[np.bool_]:
        """Which rows come to the end of the context, except those that may: they sample nothing there."""
        is_at_limit: npt.NDArray[np.bool_] = ends >= self.batch.max_model_len
        if self.batch.silent:
            is_at_limit &= [request_id not in self.batch.silent for request_id in request_ids]
        return is_at_limit

    def _forward_batch(
        self,
        rows: npt.NDArray[np.intp],
        counts: Int32Array,
        context_len: Int32Array,
        at_end: npt.NDArray[np.intp],
        scored: Scored | None,
    ) -> ForwardBatch:
        """The step's input. `rows`, `counts` and `context_len` are [num_rows]; `at_end` picks those that sample."""
        batch, block_size = self.batch, self.batch.block_size
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        row_of_token = np.repeat(rows, counts)
        # The token at offset i of its row has position num_computed + i.
        first_position = batch.num_computed_tokens[rows]
        positions = np.arange(query_start[-1], dtype=np.int32) + np.repeat(first_position - query_start[:-1], counts)
        column, offset = np.divmod(positions, block_size)
        num_used_columns = -(-context_len // block_size)
        groups = []
        for group in range(batch.num_groups):
            own_table = batch.table_of(group)
            slots = own_table[row_of_token, column] * block_size + offset
            block_table = own_table[rows, : num_used_columns.max()]
            # A row may own blocks beyond this step's context; the executor sees none of them.
            block_table[np.arange(block_table.shape[1]) >= num_used_columns[:, None]] = 0
            groups.append(GroupBlocks(slots, block_table))
        logit_tokens = query_start[at_end + 1] - 1
        if scored is not None:
            logit_tokens = np.concatenate((logit_tokens, scored.tokens(query_start)))
        return ForwardBatch(
            token_ids=batch.token_ids[row_of_token, positions],
            positions=positions,
            slots=groups[0].slots,
            query_start=query_start,
            context_len=context_len,
            block_table=groups[0].block_table,
            logit_tokens=logit_tokens,
            other_groups=tuple(groups[1:]),
        )

    def _sample(self, logits: Float32Array, rows: npt.NDArray[np.intp], request_ids: list[str]) -> StepResult:
        """One token for each of `rows`, whose logits are [rows, vocab_size]; appends it to the row."""
        batch = self.batch
        sampling = SamplingBatch(
            params=batch.params[rows],
            token_ids=batch.token_ids,
            rows=rows,
            num_tokens=batch.num_tokens[rows],
            num_prompt_tokens=batch.num_prompt_tokens[rows],
            constraints=self._constraints(rows, request_ids, logits.shape[1]) if batch.constraints else None,
        )
        sampled = self._sampler.sample(logits, sampling)
        token_ids: dict[str, tuple[int, ...]]
        token_ids = dict(zip(request_ids, zip(sampled.token_ids.tolist(), strict=True), strict=True))
        usable = sampled.token_ids >= 0
        failed: dict[str, str] = {}
        refused: set[str] = set()
        if not usable.all():
            for row in np.flatnonzero(~usable).tolist():
                request_id = request_ids[row]
                if sampled.token_ids[row] == NOTHING_ALLOWED:
                    failed[request_id] = _NOTHING_ALLOWED
                    refused.add(request_id)
                else:
                    failed[request_id] = f"{_UNUSABLE_LOGITS} for request {request_id}"
                del token_ids[request_id]
        batch.append_tokens(rows[usable], sampled.token_ids[usable])
        return StepResult(
            token_ids=token_ids,
            logprobs={request_ids[row]: (logprobs,) for row, logprobs in sampled.logprobs.items()},
            failed=failed,
            refused=frozenset(refused),
        )

    def _constraints(
        self, rows: npt.NDArray[np.intp], request_ids: list[str], vocab_size: int
    ) -> StepConstraints | None:
        """Those of the rows that sample; None if none of them has any."""
        batch = self.batch
        of_row = [batch.constraints.get(request_id) for request_id in request_ids]
        if not any(of_row):
            return None
        outputs = [batch.token_ids[row, batch.num_prompt_tokens[row] : batch.num_tokens[row]] for row in rows.tolist()]
        return step_constraints(of_row, outputs, vocab_size)
