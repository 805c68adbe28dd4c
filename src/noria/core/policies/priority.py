"""Smaller priority first; urgent requests may take the place of strictly lower classes; nobody starves.

Every request has a *due time*: its arrival plus `priority x priority_aging_s`. Waiting makes a request more urgent
at the rate of one class per `priority_aging_s`, which is the same as saying that due times do not change, so this
order is total and costs no upkeep.

The bound: a request of class p that arrives at t is overtaken or displaced only by requests of a class q < p that
arrive before t + (p - q) x priority_aging_s, and overtaken by requests that had already run. (While it waits for
memory, others may pass within the limits of the look-ahead besides, as under every policy; and whoever waits for a
grammar, an adapter or a prefix is passed by all.)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from noria.config import SchedulerConfig
from noria.core.policies.base import CountCached, OrderedQueue, Policy
from noria.core.request import Request
from noria.core.running import RunningSet

_Due = tuple[float, int]
"""When, and the arrival number, which decides between equal times."""


class PriorityPolicy(Policy):
    """One queue per class, in which resumed work goes first; the class whose oldest request is due first is next."""

    def __init__(self, config: SchedulerConfig, count_cached: CountCached) -> None:
        super().__init__(config, count_cached)
        self._classes: dict[int, _Class] = {}
        self._order: list[tuple[_Due, int]] = []  # (when, class); stale entries are dropped as they come up

    def due_s(self, request: Request) -> float:
        return request.arrival_s + request.priority * self.config.priority_aging_s

    def _enqueue(self, request: Request) -> None:
        members = self._classes.get(request.priority)
        if members is None:
            members = self._classes[request.priority] = _Class()
        members.push(request)
        self._offer(request.priority)

    def _dequeue(self) -> Request:
        while True:
            due, priority = self._order[0]
            members = self._classes.get(priority)
            if members is not None and self._class_due(priority) == due:
                request = members.in_turn.peek()
                self._discard(request)
                return request
            heapq.heappop(self._order)

    def _discard(self, request: Request) -> None:
        members = self._classes[request.priority]
        members.remove(request)
        if not len(members.in_turn):
            del self._classes[request.priority]
        else:
            self._offer(request.priority)

    def _class_due(self, priority: int) -> _Due:
        """A class is due when its oldest member is."""
        return self._due(self._classes[priority].by_age.peek())

    def _due(self, request: Request) -> _Due:
        return self.due_s(request), request.arrival_number

    def _offer(self, priority: int) -> None:
        entry = (self._class_due(priority), priority)
        if not self._order or self._order[0] != entry:
            heapq.heappush(self._order, entry)
        if len(self._order) > 64 + 4 * len(self._waiting):
            self._order = [(self._class_due(p), p) for p in self._classes]
            heapq.heapify(self._order)

    def victim(self, running: Iterable[Request]) -> Request:
        """From the class of the request that is due last."""
        candidates = list(running)
        last = max(candidates, key=self._due)
        return max((r for r in candidates if r.priority == last.priority), key=self.victim_order)

    def can_displace(self, running: RunningSet) -> bool:
        lowest = running.lowest_class
        return lowest is not None and any(priority < lowest for priority in self._classes)

    def displaceable(self, urgent: Request, running: RunningSet) -> list[Request]:
        """Strictly lower classes that are due later: the lowest class first, in it the usual victim."""
        lowest = running.lowest_class
        if lowest is None or lowest <= urgent.priority:
            return []
        lower = [r for r in running if r.priority > urgent.priority and self.due_s(r) > self.due_s(urgent)]
        return sorted(lower, key=lambda r: (r.priority, *self.victim_order(r)), reverse=True)

    def prefill_order(self, unfinished: Sequence[Request]) -> list[Request]:
        return sorted(unfinished, key=self._due)


class _Class:
    """Waiting requests of one priority, in two orders."""

    def __init__(self) -> None:
        self.in_turn = OrderedQueue()
        self.by_age = OrderedQueue(lambda request: request.arrival_number)

    def push(self, request: Request) -> None:
        self.in_turn.push(request)
        self.by_age.push(request)

    def remove(self, request: Request) -> None:
        self.in_turn.remove(request)
        self.by_age.remove(request)
