"""What every scheduling policy answers: `Policy`, and the ordered queue that most of them are made of.

A policy owns the waiting requests and their order. The scheduler asks it four questions: who is next, who gives
way, may this one displace those, and in which order do unfinished prompts share a step. It moves nothing else: no
blocks, no cursors, no states.

For the scheduler to be live a policy must promise one thing: there is always a running request that `victim` does not
name while another runs, and which one it is changes only finitely often between two generated tokens. Then that one
gets its token in the end. Here it is the least of an order that changes in two ways only: a request reaches
`max_preemptions`, which happens to each once, and tenants are charged for prompt tokens, each of which is charged once.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from noria.config import SchedulerConfig
from noria.core.request import Request, RequestState
from noria.core.running import RunningSet

CountCached = Callable[[Request], int]
"""How many leading tokens of a waiting request are in the prefix cache now."""


class Policy(ABC):
    """Base of all policies. Waiting requests are `WAITING` or `PREEMPTED`."""

    looks_ahead: ClassVar[bool] = True
    """Whether others may be admitted past a request that waits for memory (within the configured limits)."""

    def __init__(self, config: SchedulerConfig, count_cached: CountCached) -> None:
        self.config = config
        self._count_cached = count_cached
        self._waiting: dict[str, Request] = {}
        self.num_queued_tokens = 0
        """Prompt tokens of the waiting requests that have never run; a prompt of several sequences counts once."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in no order that matters; see `order`."""
        return iter(self._waiting.values())

    def get(self, request_id: str) -> Request | None:
        return self._waiting.get(request_id)

    # --- waiting ---

    def push(self, request: Request) -> None:
        """A request begins to wait: it is new, or it was preempted."""
        self._waiting[request.request_id] = request
        if request.num_preemptions == 0:
            self.num_queued_tokens += request.num_queued_tokens
        self._enqueue(request)

    def put_back(self, request: Request) -> None:
        """A request that `pop` gave out was looked at and not admitted."""
        self.push(request)

    def pop(self) -> Request:
        """Takes out the request whose turn it is."""
        return self._taken(self._dequeue())

    def pop_resumed(self) -> Request | None:
        """Takes out the earliest preempted request, if there is one: for pauses, which let nobody else in."""
        preempted = [r for r in self._waiting.values() if r.state is RequestState.PREEMPTED]
        return self.remove(min(preempted, key=arrival_order).request_id) if preempted else None

    def remove(self, request_id: str) -> Request:
        request = self._waiting[request_id]
        self._discard(request)
        return self._taken(request)

    def _taken(self, request: Request) -> Request:
        del self._waiting[request.request_id]
        if request.num_preemptions == 0:
            self.num_queued_tokens -= request.num_queued_tokens
        return request

    @abstractmethod
    def _enqueue(self, request: Request) -> None:
        """Puts a request into the order."""

    @abstractmethod
    def _dequeue(self) -> Request:
        """Takes the next request out of the order; there is one."""

    @abstractmethod
    def _discard(self, request: Request) -> None:
        """Takes any request out of the order."""

    def order(self) -> list[Request]:
        """All waiting requests as they would be served now. For people who ask; the scheduler does not."""
        popped = [self.pop() for _ in range(len(self))]
        for request in reversed(popped):
            self.put_back(request)
        return popped

    # --- news ---

    def note_arrival(self, request: Request) -> None:
        """A request was accepted; `push` follows."""

    def note_admitted(self, request: Request) -> None:
        """A request taken by `pop` has been admitted."""

    def note_ended(self, request: Request) -> None:
        """A request is over, in whatever state it was."""

    # --- running ---

    def victim(self, running: Iterable[Request]) -> Request:
        """Who gives its memory back when there is too little: the latest, those preempted often enough last."""
        return max(running, key=self.victim_order)

    def victim_order(self, request: Request) -> Any:
        """The greatest gives way first. Whoever was preempted `max_preemptions` times comes last in its class."""
        return request.num_preemptions < self.config.max_preemptions, request.arrival_number

    def can_displace(self, running: RunningSet) -> bool:
        """Whether some waiting request may have the place of some running one; asked often, so cheap. By default no."""
        return False

    def displaceable(self, urgent: Request, running: RunningSet) -> list[Request]:
        """Running requests that may be preempted only to admit `urgent`, in that order."""
        return []

    def prefill_order(self, unfinished: Sequence[Request]) -> Sequence[Request]:
        """In which order unfinished prompts, given in order of admission, take their share of a step."""
        return unfinished

    # --- accounting ---

    charges_outputs: ClassVar[bool] = False
    """Whether `charge_output` wants to be called."""

    def charge_prompt(self, request: Request, start: int, end: int) -> None:
        """A step has been planned that computes the request's tokens at positions `start` .. `end - 1`."""

    def charge_output(self, request: Request, num_tokens: int) -> None:
        """The request has generated so many tokens."""

    def check(self) -> None:
        """Asserts the invariants; for tests."""
        never_ran = [r for r in self._waiting.values() if r.num_preemptions == 0]
        assert self.num_queued_tokens == sum(r.num_queued_tokens for r in never_ran)


def arrival_order(request: Request) -> tuple[bool, int]:
    """First come, first served, but work that was begun goes first."""
    return request.num_preemptions == 0, request.arrival_number


class OrderedQueue:
    """Requests in the order of a fixed key: a heap. Removed entries stay until they come up or are too many."""

    def __init__(self, key: Callable[[Request], Any] = arrival_order) -> None:
        self._key = key
        self._heap: list[tuple[Any, int, Request]] = []
        self._entries: dict[str, tuple[Any, int, Request]] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (entry[2] for entry in sorted(self._entries.values()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def push(self, request: Request) -> None:
        self._num_pushed += 1
        entry = (self._key(request), self._num_pushed, request)
        self._entries[request.request_id] = entry
        heapq.heappush(self._heap, entry)

    def peek(self) -> Request:
        """The least; there is one."""
        while True:
            entry = self._heap[0]
            if self._entries.get(entry[2].request_id) is entry:
                return entry[2]
            heapq.heappop(self._heap)

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        del self._entries[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        del self._entries[request.request_id]
        if len(self._heap) > 64 + 2 * len(self._entries):
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
