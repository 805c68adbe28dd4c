"""A runner without a model: follows a script, and holds the scheduler to every promise a plan makes.

It keeps a model of KV memory: each slot remembers which token prefix, of which group of layers, its content stands for.
Before a request's tokens are run, every earlier position that a window still reaches must hold exactly the content of
that request's own prefix; so a block that was shared wrongly, registered before it was computed, reused while in use,
given up too early or written by two requests is seen in the step that it happens in. Violations raise `PlanViolation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from noria.core.plan import Admitted, StepPlan, StepResult, TokenLogprobs
from noria.kv_layout import columns_behind

Script = Mapping[str, Sequence[int]]
NextToken = Callable[[Sequence[int]], int]


class PlanViolation(AssertionError):
    """A plan broke the contract of `noria.core.plan`."""


def arithmetic_token(token_ids: Sequence[int]) -> int:
    """A default "model": a token that depends on all tokens before it, between 100 and 1099."""
    value = 17
    for token_id in token_ids:
        value = (value * 31 + token_id + 7) % 1_000_003
    return 100 + value % 1000


@dataclass(slots=True)
class _Row:
    admitted: Admitted
    token_ids: list[int]
    block_ids: list[int]
    num_computed: int

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.admitted.num_prompt_tokens


class ScriptedRunner:
    """Gives request `r` the tokens `script[r]` in order; requests without a script get `next_token(all tokens)`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        script: Script | None = None,
        next_token: NextToken = arithmetic_token,
        *,
        keep_plans: bool = True,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self.plans: list[StepPlan] = []
        self.num_tokens_computed = 0
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._script = script or {}
        self._next_token = next_token
        self._keep_plans = keep_plans
        self._windows = tuple(windows)
        self._rows: dict[str, _Row] = {}
        self._slots: dict[tuple[int, int], int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        if self._keep_plans:
            self.plans.append(plan)
        self._reconcile(plan)
        sampled: dict[str, tuple[int, ...]] = {}
        prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            row = self._rows.get(request_id)
            _require(row is not None, f"{request_id} is scheduled, but has no row")
            assert row is not None
            if drafts := plan.drafts.get(request_id, ()):
                sampled[request_id] = self._verify(row, num_tokens, drafts)
                self._drop_passed(row)  # only now is it known how far it has come
                continue
            first = row.num_computed
            self._compute(row, num_tokens)
            self._drop_passed(row)
            if scores := _prompt_logprobs(row, first):
                prompt_logprobs[request_id] = scores
            if row.num_computed == len(row.token_ids) and row.admitted.sampling.max_tokens != 0:
                sampled[request_id] = (self._append_sample(row),)
        logprobs: dict[str, tuple[TokenLogprobs, ...]] = {
            request_id: tuple(TokenLogprobs(token_id, -1.0, 1) for token_id in token_ids)
            for request_id, token_ids in sampled.items()
            if self._rows[request_id].admitted.sampling.logprobs is not None
        }
        return StepResult(sampled, logprobs, prompt_logprobs)

    def _reconcile(self, plan: StepPlan) -> None:
        for request_id in plan.finished + plan.preempted:
            self._rows.pop(request_id, None)
        for admitted in plan.admitted:
            _require(admitted.request_id not in self._rows, f"{admitted.request_id} is admitted twice")
            _require(
                admitted.num_computed_tokens < len(admitted.token_ids), f"{admitted.request_id} has nothing to compute"
            )
            _require(
                admitted.num_scored is None
                or admitted.num_computed_tokens <= admitted.num_scored
                or admitted.num_scored >= admitted.num_prompt_tokens - 1,
                f"{admitted.request_id} has prompt tokens from the cache that are to be scored",
            )
            row = self._rows[admitted.request_id] = _Row(
                admitted, list(admitted.token_ids), list(admitted.block_ids), admitted.num_computed_tokens
            )
            self._drop_passed(row)
            _require(
                row.block_ids == list(admitted.block_ids), f"{admitted.request_id} has blocks that its windows passed"
            )
        for request_id, block_ids in plan.new_block_ids.items():
            self._rows[request_id].block_ids += block_ids
        for row in self._rows.values():
            held = [block_id for block_id in row.block_ids if block_id]
            _require(len(set(held)) == len(held), f"{row.admitted.request_id} has a block twice")
            _require(all(1 <= b <= self._num_blocks for b in held), "a block id is out of range")

    def _drop_passed(self, row: _Row) -> None:
        """What the windows have moved past belongs to others from now on."""
        for group, first in enumerate(self._first_columns(row)):
            num_groups = len(self._windows)
            places = range(group, first * num_groups, num_groups)
            row.block_ids[group : first * num_groups : num_groups] = [0] * len(places)

    def _first_columns(self, row: _Row) -> list[int]:
        """Of each group: the first column that the row's next token still reads."""
        return [
            0 if window is None else max(0, columns_behind(window, row.num_computed, self._block_size))
            for window in self._windows
        ]

    def _compute(self, row: _Row, num_tokens: int) -> None:
        request_id = row.admitted.request_id
        end = row.num_computed + num_tokens
        _require(num_tokens >= 1, f"{request_id} is scheduled for {num_tokens} tokens")
        _require(end <= len(row.token_ids), f"{request_id} would compute beyond its known tokens")
        num_groups, first_columns = len(self._windows), self._first_columns(row)
        num_places = len(row.block_ids) // num_groups * self._block_size
        _require(end <= num_places, f"{request_id} lacks blocks for {end} tokens")
        prefixes = list(accumulate(row.token_ids[:end], lambda prefix, token_id: hash((prefix, token_id)), initial=0))
        for group, first in enumerate(first_columns):
            for position in range(first * self._block_size, end):
                column, offset = divmod(position, self._block_size)
                block_id, content = row.block_ids[column * num_groups + group], prefixes[position + 1] + group
                if position < row.num_computed:
                    is_own = self._slots.get((block_id, offset)) == content
                    if not is_own:
                        raise PlanViolation(f"{request_id}: the KV at position {position} is not its own")
                else:
                    is_shared = self._is_shared(block_id, row)
                    _require(not is_shared, f"{request_id} writes into block {block_id}, which is shared")
                    self._slots[block_id, offset] = content
        row.num_computed = end
        self.num_tokens_computed += num_tokens

    def _verify(self, row: _Row, num_tokens: int, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Runs the newest token and the drafts behind it; keeps those that it would have said itself, and one more."""
        request_id, num_known = row.admitted.request_id, len(row.token_ids)
        _require(num_tokens == num_known - row.num_computed + len(drafts), f"{request_id}'s drafts are not all planned")
        row.token_ids += drafts
        self._compute(row, num_tokens)
        del row.token_ids[num_known:]
        accepted = [self._append_sample(row)]
        for draft in drafts:
            if accepted[-1] != draft:
                break
            accepted.append(self._append_sample(row))
        row.num_computed = len(row.token_ids) - 1  # what stands behind is overwritten when its turn comes
        return tuple(accepted)

    def _append_sample(self, row: _Row) -> int:
        token_id = self._sample(row)
        row.token_ids.append(token_id)
        return token_id

    def _is_shared(self, block_id: int, writer: _Row) -> bool:
        return any(row is not writer and block_id in row.block_ids for row in self._rows.values())

    def _sample(self, row: _Row) -> int:
        script = self._script.get(row.admitted.request_id)
        if script is not None and row.num_output_tokens < len(script):
            return script[row.num_output_tokens]
        return self._next_token(row.token_ids)


def _prompt_logprobs(row: _Row, first: int) -> tuple[TokenLogprobs, ...]:
    """For the prompt tokens behind positions `first` .. `num_computed` - 1 that are to be scored: their own position,
    negative, in place of a log-probability."""
    admitted = row.admitted
    if admitted.num_scored is None:
        return ()
    positions = range(max(first, admitted.num_scored), min(row.num_computed, admitted.num_prompt_tokens - 1))
    return tuple(TokenLogprobs(row.token_ids[p + 1], -float(p + 1), 1) for p in positions)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise PlanViolation(message)
