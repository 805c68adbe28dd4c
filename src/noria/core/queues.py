"""Waiting requests in order of service, and the choice of a victim: first come, first served.

The scheduler asks a policy two questions: who is next, and who gives way. Preempted requests go back in front of
those that never started. Everything here is constant time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from noria.core.request import Request


class _Requests:
    """Requests by id, in an order."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def remove(self, request_id: str) -> Request:
        return self._requests.pop(request_id)


class FcfsQueue(_Requests):
    """Waiting requests, first come first served."""

    def push(self, request: Request) -> None:
        """A new request: last in line."""
        self._requests[request.request_id] = request

    def push_front(self, request: Request) -> None:
        """A request that was at the front before: preempted, or looked at and held."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def pop(self) -> Request:
        """The request whose turn it is."""
        return self._requests.popitem(last=False)[1]


class RunningList(_Requests):
    """Admitted requests in order of admission. Under memory pressure the last one gives way."""

    def append(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def pop_victim(self) -> Request:
        return self._requests.popitem()[1]
