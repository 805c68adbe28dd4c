"""A step plan while it is being made. Private to `noria.core`; what leaves it is a frozen `StepPlan`."""

from __future__ import annotations

from dataclasses import dataclass

from noria.core.plan import AdmissionEnd, Admitted, Held, Limit, Preemption, StepPlan
from noria.core.request import Request


@dataclass(slots=True)
class Chunk:
    """What one request that is not steady runs in this step. `num_tokens` includes its drafts."""

    request: Request
    num_tokens: int
    limit: Limit
    """Why it is not more, if it is less than the request could use."""

    @property
    def num_left_out(self) -> int:
        return self.request.num_remaining - self.num_tokens


class PlanDraft:
    """Spends one token budget and notes who was held back by what."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens_left = num_tokens
        self.chunks: dict[str, Chunk] = {}
        self.has_steady = False
        self.preemptions: list[Preemption] = []
        self._num_scheduled: dict[str, int] = {}
        self._admitted: dict[str, Admitted] = {}
        self._new_block_ids: dict[str, tuple[int, ...]] = {}
        self._held: dict[str, Held] = {}
        self._admission_end: AdmissionEnd | None = None

    def is_scheduled(self, request_id: str) -> bool:
        return request_id in self._num_scheduled

    def is_newcomer(self, request_id: str) -> bool:
        """Whether it has been admitted in this step."""
        return request_id in self._admitted

    def num_planned(self, request_id: str) -> int:
        return self._num_scheduled.get(request_id, 0)

    def advance_steady(self, steady: dict[str, int]) -> None:
        """All steady requests compute their next token. Comes first."""
        self._num_scheduled = steady.copy()
        self.num_tokens_left -= len(steady)
        self.has_steady = True

    def add_blocks(self, request: Request, block_ids: tuple[int, ...]) -> None:
        if block_ids:
            self._new_block_ids[request.request_id] = self._new_block_ids.get(request.request_id, ()) + block_ids

    def advance(self, request: Request, num_tokens: int, limit: Limit, new_block_ids: tuple[int, ...]) -> None:
        """A request that is not steady computes its next `num_tokens` tokens; called again, so many more."""
        request_id = request.request_id
        self.num_tokens_left -= num_tokens
        if request_id in self.chunks:
            num_tokens += self.chunks[request_id].num_tokens
        self.chunks[request_id] = Chunk(request, num_tokens, limit)
        self._num_scheduled[request_id] = num_tokens
        self.add_blocks(request, new_block_ids)

    def admit(self, request: Request, num_tokens: int, limit: Limit, block_ids: tuple[int, ...]) -> None:
        """A waiting request gets a row and computes its first tokens after those found in the cache."""
        self._admitted[request.request_id] = Admitted(
            request_id=request.request_id,
            token_ids=tuple(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed,
            block_ids=block_ids,
            sampling=request.sampling,
            seed=request.seed,
            index=request.index,
            num_scored=request.num_scored,
            stop_ids=tuple(sorted(request.stop_ids)) if request.sampling.min_tokens else (),
        )
        self.advance(request, num_tokens, limit, ())

    def unplan(self, request: Request) -> None:
        """Takes back whatever has been planned for a running request: its tokens can go to others."""
        request_id = request.request_id
        self.num_tokens_left += self._num_scheduled.pop(request_id, 0)
        self.chunks.pop(request_id, None)
        self._new_block_ids.pop(request_id, None)
        assert request_id not in self._admitted, "a newcomer gives way to nobody"

    def hold(self, request: Request, limit: Limit, detail: str = "") -> None:
        self._held[request.request_id] = Held(request.request_id, limit, detail)

    def is_held_by(self, request_id: str, limit: Limit) -> bool:
        held = self._held.get(request_id)
        return held is not None and held.limit is limit

    def unhold(self, request_id: str) -> None:
        """The request is looked at again."""
        del self._held[request_id]

    def end_admission(self, limit: Limit, num_behind: int, queue: str, position: int) -> None:
        """Nobody further back in the queue was looked at."""
        if num_behind:
            self._admission_end = AdmissionEnd(limit, num_behind, queue, position)

    def freeze(self, step: int, finished: list[str]) -> StepPlan:
        drafts: dict[str, tuple[int, ...]] = {}
        for request_id, chunk in self.chunks.items():
            if chunk.num_left_out > 0:
                num_wanted = chunk.num_tokens + chunk.num_left_out
                self.hold(chunk.request, chunk.limit, f"{chunk.num_tokens} of {num_wanted} tokens")
            if chunk.request.draft_token_ids:
                drafts[request_id] = chunk.request.draft_token_ids
        return StepPlan(
            step=step,
            num_scheduled_tokens=self._num_scheduled,
            admitted=tuple(self._admitted.values()),
            new_block_ids=self._new_block_ids,
            preemptions=tuple(self.preemptions),
            drafts=drafts,
            finished=tuple(finished),
            held=tuple(self._held.values()),
            admission_end=self._admission_end,
        )
