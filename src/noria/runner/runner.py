"""One engine step on one worker: arrays from the batch, forward, one token for each row that reached its end.

`ModelRunner.execute` is what the engine calls between `Scheduler.schedule` and `Scheduler.update`. It follows the
five steps that `noria.core.plan` lists, decides nothing, and knows neither model nor tensor library: those are the
`Executor`'s. Work is per array, not per token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from noria.core.plan import StepPlan, StepResult
from noria.errors import EngineError, OptionError
from noria.runner.batch import PersistentBatch
from noria.runner.executor import UNUSABLE, Executor, Float32Array, ForwardBatch, Int32Array, SamplingBatch
from noria.runner.sampler import NumpySampler

_UNUSABLE_LOGITS = "the model returned unusable logits (NaN or infinite)"


class ModelRunner:
    """Runs plans on an executor, whose KV pool it allocates.

    `num_blocks` does not count the null block. `vocab_size`, when given, bounds the token ids that may reach the
    executor from the first step on; without it only negative ids are refused.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        vocab_size: int | None = None,
    ) -> None:
        if (num_blocks + 1) * block_size > np.iinfo(np.int32).max:
            raise OptionError(f"a pool of {num_blocks} blocks x {block_size} tokens has more slots than an int32 names")
        self.batch = PersistentBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
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

        context_len = batch.num_computed_tokens[rows] + counts
        at_end = np.flatnonzero(context_len == batch.num_tokens[rows])
        logits = self._executor.forward(self._forward_batch(rows, counts, context_len, at_end))
        if logits.ndim != 2 or len(logits) != len(at_end):
            raise EngineError(f"the executor returned logits of shape {logits.shape} for {len(at_end)} rows")
        batch.num_computed_tokens[rows] = context_len
        if not len(at_end):
            return StepResult(token_ids={})
        return self._sample(logits, rows[at_end], [request_ids[i] for i in at_end.tolist()])

    def _check_schedule(self, request_ids: list[str], rows: npt.NDArray[np.intp], counts: Int32Array) -> None:
        """Raises `EngineError` unless every row can run its tokens: they are known, and have blocks."""
        batch = self.batch
        ends = batch.num_computed_tokens[rows] + counts
        rules = (
            (counts < 1, "is scheduled for no tokens"),
            (ends > batch.num_tokens[rows], "is scheduled past its known tokens"),
            (ends > batch.num_blocks[rows] * batch.block_size, "is scheduled past its blocks"),
            (ends >= batch.max_model_len, "would sample past max_model_len"),
        )
        for broken, what in rules:
            if broken.any():
                first = int(np.flatnonzero(broken)[0])
                raise EngineError(
                    f"request {request_ids[first]} {what}: {counts[first]} tokens scheduled, "
                    f"{batch.num_computed_tokens[rows[first]]} computed, {batch.num_tokens[rows[first]]} known, "
                    f"{batch.num_blocks[rows[first]]} blocks of {batch.block_size}, max_model_len {batch.max_model_len}"
                )

    def _forward_batch(
        self, rows: npt.NDArray[np.intp], counts: Int32Array, context_len: Int32Array, at_end: npt.NDArray[np.intp]
    ) -> ForwardBatch:
        """The step's input. `rows`, `counts` and `context_len` are [num_rows]; `at_end` picks those that sample."""
        batch, block_size = self.batch, self.batch.block_size
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        row_of_token = np.repeat(rows, counts)
        # The token at offset i of its row has position num_computed + i.
        first_position = batch.num_computed_tokens[rows]
        positions = np.arange(query_start[-1], dtype=np.int32) + np.repeat(first_position - query_start[:-1], counts)
        slots = batch.block_table[row_of_token, positions // block_size] * block_size + positions % block_size

        num_used_blocks = -(-context_len // block_size)
        block_table = batch.block_table[rows, : num_used_blocks.max()]
        # A row may own blocks beyond this step's context; the executor sees none of them.
        block_table[np.arange(block_table.shape[1]) >= num_used_blocks[:, None]] = 0
        return ForwardBatch(
            token_ids=batch.token_ids[row_of_token, positions],
            positions=positions,
            slots=slots,
            query_start=query_start,
            context_len=context_len,
            block_table=block_table,
            logit_tokens=query_start[at_end + 1] - 1,
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
        )
        sampled = self._sampler.sample(logits, sampling)
        token_ids: dict[str, tuple[int, ...]]
        token_ids = dict(zip(request_ids, zip(sampled.token_ids.tolist(), strict=True), strict=True))
        usable = sampled.token_ids != UNUSABLE
        failed: dict[str, str] = {}
        if not usable.all():
            failed = {
                request_ids[row]: f"{_UNUSABLE_LOGITS} for request {request_ids[row]}"
                for row in np.flatnonzero(~usable).tolist()
            }
            for request_id in failed:
                del token_ids[request_id]
        batch.append_tokens(rows[usable], sampled.token_ids[usable])
        return StepResult(
            token_ids=token_ids,
            logprobs={request_ids[row]: (logprobs,) for row, logprobs in sampled.logprobs.items()},
            failed=failed,
        )
