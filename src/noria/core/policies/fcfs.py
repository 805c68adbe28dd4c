"""First come, first served; work that was begun and preempted goes before work that never started."""

from __future__ import annotations

from noria.config import SchedulerConfig
from noria.core.policies.base import CountCached, OrderedQueue, Policy
from noria.core.request import Request


class FcfsPolicy(Policy):
    """In order of arrival. Under memory pressure the latest arrival gives way."""

    def __init__(self, config: SchedulerConfig, count_cached: CountCached) -> None:
        super().__init__(config, count_cached)
        self._queue = OrderedQueue()

    def _enqueue(self, request: Request) -> None:
        self._queue.push(request)

    def _dequeue(self) -> Request:
        return self._queue.pop()

    def _discard(self, request: Request) -> None:
        self._queue.remove(request)
