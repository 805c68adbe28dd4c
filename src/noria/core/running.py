"""Admitted requests, and which of them need looking at in a step.

Most running requests decode: one token in every step, nothing else. They are *steady*, and cost a step nothing of
their own here: their part of the plan is one dictionary that is copied, and since all of them advance together, the
step in which each will need its next KV block is known beforehand. Steady requests are filed by that step, modulo
the block size, and only those whose turn it is are looked at. Everybody else is *catching up*: unfinished prompts,
resumed requests, and requests with drafts.

Owned by `noria.core.scheduler`. Decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from noria.core.request import Request


class RunningSet:
    """Running requests by id, in order of admission."""

    def __init__(self, block_size: int) -> None:
        self.by_id: dict[str, Request] = {}
        self.steady: dict[str, int] = {}
        """What steady requests add to a plan: one token each."""
        self.catching_up: dict[str, Request] = {}
        self.num_computed_tokens = 0
        """Of all running requests together."""
        self.num_tokens_at_most = 0
        """Likewise: what they may come to, prompts and outputs."""
        self._num_of_class: dict[int, int] = {}
        self._block_size = block_size
        self._turns: list[dict[str, Request]] = [{} for _ in range(block_size)]
        self._tick = 0

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def num_tokens_ahead(self) -> int:
        """How many tokens running requests may still compute, all together."""
        return self.num_tokens_at_most - self.num_computed_tokens

    def __iter__(self) -> Iterator[Request]:
        return iter(self.by_id.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.by_id

    @property
    def lowest_class(self) -> int | None:
        """The greatest priority number that runs."""
        return max(self._num_of_class, default=None)

    def get(self, request_id: str) -> Request | None:
        return self.by_id.get(request_id)

    def add(self, request: Request) -> None:
        self.by_id[request.request_id] = request
        self.catching_up[request.request_id] = request
        self._num_of_class[request.priority] = self._num_of_class.get(request.priority, 0) + 1
        self.num_computed_tokens += request.num_computed
        self.num_tokens_at_most += request.max_num_tokens

    def remove(self, request: Request) -> None:
        self._leave_steady(request)
        del self.by_id[request.request_id]
        self._num_of_class[request.priority] -= 1
        if not self._num_of_class[request.priority]:
            del self._num_of_class[request.priority]
        self.catching_up.pop(request.request_id, None)
        self.num_computed_tokens -= request.num_computed
        self.num_tokens_at_most -= request.max_num_tokens

    def settle(self, request: Request) -> None:
        """From the next step on the request advances by one token in every step."""
        del self.catching_up[request.request_id]
        self.steady[request.request_id] = 1
        request.phase = (self._tick - request.num_computed) % self._block_size
        self._turns[request.phase][request.request_id] = request

    def unsettle(self, request: Request) -> None:
        """The request will not advance in this step, or by more than one token."""
        self._leave_steady(request)
        self.catching_up[request.request_id] = request

    def _leave_steady(self, request: Request) -> None:
        if request.phase is not None:
            del self.steady[request.request_id]
            del self._turns[request.phase][request.request_id]
            request.phase = None

    def at_block_end(self) -> list[Request]:
        """Steady requests whose blocks are full: their next token needs another one."""
        return list(self._turns[self._tick % self._block_size].values())

    def filling_a_block(self) -> list[Request]:
        """Steady requests that fill a block by their next token."""
        return list(self._turns[(self._tick + 1) % self._block_size].values())

    def tick(self) -> None:
        """All steady requests have advanced by one token."""
        self._tick += 1
        self.num_computed_tokens += len(self.steady)

    def check(self) -> None:
        assert self._num_of_class == dict(Counter(request.priority for request in self))
        assert self.steady.keys() | self.catching_up.keys() == self.by_id.keys()
        assert not self.steady.keys() & self.catching_up.keys()
        assert self.num_computed_tokens == sum(request.num_computed for request in self)
        assert self.num_tokens_at_most == sum(request.max_num_tokens for request in self)
        filed = {r.request_id: phase for phase, turn in enumerate(self._turns) for r in turn.values()}
        assert filed == {r.request_id: r.phase for r in self if r.phase is not None}
        assert filed.keys() == self.steady.keys()
        for request_id, phase in filed.items():
            num_computed = self.by_id[request_id].num_computed
            assert (self._tick - num_computed) % self._block_size == phase, "a steady request missed a step"
