"""A step plan while it is being made. Private to `noria.core.scheduler`; what leaves it is a frozen `StepPlan`."""

from __future__ import annotations

from noria.core.plan import AdmissionEnd, Admitted, Held, Limit, StepPlan
from noria.core.request import Request


class PlanDraft:
    """Spends one token budget and notes who was held back by what."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens_left = num_tokens
        self.preempted: list[str] = []
        self._num_scheduled: dict[str, int] = {}
        self._admitted: list[Admitted] = []
        self._new_block_ids: dict[str, tuple[int, ...]] = {}
        self._held: list[Held] = []
        self._admission_end: AdmissionEnd | None = None

    def is_scheduled(self, request_id: str) -> bool:
        return request_id in self._num_scheduled

    def advance(self, request: Request, num_tokens: int, new_block_ids: tuple[int, ...]) -> None:
        """A running request computes its next `num_tokens` tokens."""
        self._num_scheduled[request.request_id] = num_tokens
        self.num_tokens_left -= num_tokens
        if new_block_ids:
            self._new_block_ids[request.request_id] = new_block_ids
        if num_tokens < request.num_remaining:
            self.hold(request, Limit.TOKEN_BUDGET, f"{num_tokens} of {request.num_remaining} tokens")

    def admit(self, request: Request, num_tokens: int, block_ids: tuple[int, ...]) -> None:
        """A waiting request gets a row and computes its first tokens after those found in the cache."""
        self._admitted.append(
            Admitted(
                request_id=request.request_id,
                token_ids=tuple(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed,
                block_ids=block_ids,
                sampling=request.sampling,
                seed=request.seed,
                index=request.index,
            )
        )
        self.advance(request, num_tokens, ())

    def preempt(self, request: Request) -> None:
        """A running request loses its row. It is behind everybody planned so far, so nothing is taken back."""
        assert not self.is_scheduled(request.request_id)
        self.preempted.append(request.request_id)

    def hold(self, request: Request, limit: Limit, detail: str = "") -> None:
        self._held.append(Held(request.request_id, limit, detail))

    def end_admission(self, limit: Limit, num_behind: int) -> None:
        """Nobody further back in the queue was looked at."""
        if num_behind:
            self._admission_end = AdmissionEnd(limit, num_behind)

    def freeze(self, step: int, finished: list[str]) -> StepPlan:
        return StepPlan(
            step=step,
            num_scheduled_tokens=self._num_scheduled,
            admitted=tuple(self._admitted),
            new_block_ids=self._new_block_ids,
            preempted=tuple(self.preempted),
            finished=tuple(finished),
            held=tuple(self._held),
            admission_end=self._admission_end,
        )
