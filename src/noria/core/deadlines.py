"""When requests are out of time: a heap of deadlines, of which only the next is looked at in each step.

Owned by `noria.core.scheduler`, which ends whoever is overdue. Entries of requests that ended in time stay until
their moment comes or until they are the larger part of the heap.
"""

from __future__ import annotations

import heapq

from noria.core.request import Request, RequestState


class Deadlines:
    """Both limits in seconds from arrival, or None. `first_token_s` ends requests that have no output by then."""

    def __init__(self, first_token_s: float | None, total_s: float | None) -> None:
        self._first_token_s = first_token_s
        self._total_s = total_s
        self._heap: list[tuple[float, int, bool, Request]] = []

    @property
    def next_s(self) -> float | None:
        """When somebody may be overdue next."""
        return self._heap[0][0] if self._heap else None

    def add(self, request: Request) -> None:
        for limit_s, is_total in ((self._first_token_s, False), (self._total_s, True)):
            if limit_s is not None:
                entry = (request.arrival_s + limit_s, request.arrival_number, is_total, request)
                heapq.heappush(self._heap, entry)

    def pop_overdue(self, now_s: float) -> list[tuple[Request, str]]:
        """Requests whose time is over, each once, with the words to tell them."""
        overdue: dict[str, tuple[Request, str]] = {}
        while self._heap and self._heap[0][0] <= now_s:
            _, _, is_total, request = heapq.heappop(self._heap)
            if self._is_met(request, is_total) or request.request_id in overdue:
                continue
            what = "its end" if is_total else "its first token"
            limit_s = self._total_s if is_total else self._first_token_s
            overdue[request.request_id] = (
                request,
                f"the request waited {now_s - request.arrival_s:.1f} s for {what}, over the server's limit of "
                f"{limit_s:g} s; it has {request.num_output_tokens} output tokens and was {request.state.value}",
            )
        return list(overdue.values())

    def note_ending(self, num_unfinished: int) -> None:
        """A request ended; drops what is stale when that has become the larger part."""
        if len(self._heap) > 64 + 4 * num_unfinished:
            self._heap = [entry for entry in self._heap if not self._is_met(entry[3], entry[2])]
            heapq.heapify(self._heap)

    @staticmethod
    def _is_met(request: Request, is_total: bool) -> bool:
        return request.state is RequestState.FINISHED or (not is_total and request.num_output_tokens > 0)
