"""Longest cached prefix first: with a deep queue and a small pool, requests that share a prefix run back to back.

Only the `lpm_window` earliest waiting requests are compared, and each is looked up again only when the cache has
changed: a step's cost does not grow with the queue, but it does with the window and the length of what is cached.

The bound: a request is overtaken by at most `lpm_max_overtakes` later arrivals, after which it goes first. (Requests
that wait for memory can be overtaken within the limits of the look-ahead besides, as under every policy.)
"""

from __future__ import annotations

from noria.config import SchedulerConfig
from noria.core.policies.base import CountCached, OrderedQueue, Policy, arrival_order
from noria.core.request import Request


class LongestPrefixPolicy(Policy):
    """Of the earliest waiting requests, the one with the most cached tokens; on ties the earliest."""

    def __init__(self, config: SchedulerConfig, count_cached: CountCached) -> None:
        super().__init__(config, count_cached)
        self._window: dict[str, Request] = {}
        self._behind = OrderedQueue()  # everybody here comes after everybody in the window
        self._last_of_window = (False, 0)  # an upper bound of the window's order
        self._num_overtakes: dict[str, int] = {}

    def _enqueue(self, request: Request) -> None:
        self._num_overtakes.setdefault(request.request_id, 0)
        if self._window and arrival_order(request) < self._last_of_window:
            self._window[request.request_id] = request
        else:
            self._behind.push(request)

    def _dequeue(self) -> Request:
        while len(self._behind) and len(self._window) < self.config.lpm_window:
            request = self._behind.pop()
            self._window[request.request_id] = request
            self._last_of_window = arrival_order(request)
        chosen = min(self._window.values(), key=self._turn)
        del self._window[chosen.request_id]
        return chosen

    def _turn(self, request: Request) -> tuple[int, int, tuple[bool, int]]:
        if request.num_preemptions or self._num_overtakes[request.request_id] >= self.config.lpm_max_overtakes:
            return 0, 0, arrival_order(request)
        return 1, -self._count_cached(request), arrival_order(request)

    def _discard(self, request: Request) -> None:
        if self._window.pop(request.request_id, None) is None:
            self._behind.remove(request)

    def note_ended(self, request: Request) -> None:
        self._num_overtakes.pop(request.request_id, None)

    def note_admitted(self, request: Request) -> None:
        self._num_overtakes.pop(request.request_id, None)
        for other in self._window.values():
            if arrival_order(other) < arrival_order(request):
                self._num_overtakes[other.request_id] += 1

    def check(self) -> None:
        super().check()
        assert self._num_overtakes.keys() == self._waiting.keys()
        assert self._window.keys() | {r.request_id for r in self._behind} == self._waiting.keys()
        if self._window and len(self._behind):
            assert max(map(arrival_order, self._window.values())) < arrival_order(self._behind.peek())
