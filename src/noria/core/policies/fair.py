"""Fair shares between tenants, counted in tokens: virtual token counters (Sheng et al., OSDI 2024).

Each tenant has a counter of the service it got: `fair_prompt_weight` for each prompt token computed for it,
`fair_output_weight` for each token generated. The waiting tenant with the smallest counter is served next, its
requests in order of arrival. Prompt tokens found in the cache cost nothing. Recomputing what a preemption threw away
is never charged: a request pays for each position once. The same order shares a step among unfinished prompts, and
the tenant with the largest counter gives way first under memory pressure.

The *level* is the greatest counter at which somebody was admitted. Nobody who could be served is below it, and a
tenant that begins to wait is lifted to it, so that idling saves nothing up. Waiting for a grammar, an adapter or a
prefix is idling too: if others are admitted past all that a tenant has waiting, it is lifted just the same (else it
would have the machine to itself later, and so would newcomers who were lifted no higher than to its counter).

The bound. Let M = `num_blocks x block_size` be the pool in tokens, S the number of slots, and w the weights. While
two tenants both have requests waiting that nothing but budget, slots and memory holds back,

    |W_f - W_g| <= 2 x (w_prompt x M + w_output x (M/1 + M/2 + ... + M/S))   (each quotient rounded down)

for the service W that each gets over any such interval, whatever is preempted meanwhile; W counts a prompt position
when it is computed for the first time, and an output when it is generated. Why: no counter ever rises above the level
by more than half of that, and the two are never below it. When a tenant is served (admitted or resumed) its counter
is the level at most, so what it is charged above that goes to requests that it has running by then. Their unfinished
prompts all have their room in the pool, since admission keeps it for whole sequences, and each charged position is
computed into a slot of its own: M prompt tokens. Their outputs: everybody who runs computes at least one token in
each step, so when the first of k of them ends or is preempted after n steps, k x n slots have been filled, and n, the
most that it can have generated, is at most M/k; the next, with k - 1 left, M/(k - 1), and so on. The published bound,
2 x max(w_prompt x L, w_output x M) with L the longest prompt, is for a server that reserves room for whole outputs
at admission; ours does not, which is what the sum is for. It holds without drafts, with `reserve_full_sequence`,
and while the engine is not paused. Nobody is admitted past a request that waits for memory here: it would break it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from noria.config import SchedulerConfig
from noria.core.policies.base import CountCached, OrderedQueue, Policy
from noria.core.request import Request

_NUM_IDLE_TENANTS_KEPT = 512
_Turn = tuple[int, int, str | None]
"""A tenant's counter, the arrival number of its next request, and its name."""


class _Tenant:
    def __init__(self) -> None:
        self.counter = 0
        self.waiting = OrderedQueue()
        self.num_requests = 0
        """Waiting or admitted."""


class FairPolicy(Policy):
    """Serves the waiting tenant with the smallest counter. Requests without a tenant share one."""

    looks_ahead = False
    charges_outputs = True

    def __init__(self, config: SchedulerConfig, count_cached: CountCached) -> None:
        super().__init__(config, count_cached)
        self._tenants: dict[str | None, _Tenant] = {}
        self._waiting_tenants: dict[str | None, _Tenant] = {}
        self._order: list[_Turn] = []  # a heap; stale entries are replaced as they come up
        self._level = 0
        self._num_tenants_to_tidy = 2 * _NUM_IDLE_TENANTS_KEPT

    def counter(self, tenant: str | None) -> int:
        """Weighted tokens of service so far, lifts included."""
        return self._tenants[tenant].counter

    def note_arrival(self, request: Request) -> None:
        if request.tenant not in self._tenants:
            self._forget_the_idle()
            self._tenants[request.tenant] = _Tenant()
        self._tenants[request.tenant].num_requests += 1

    def note_admitted(self, request: Request) -> None:
        least = self.counter(request.tenant)
        if self._waiting_tenants:
            least = min(least, self._next().counter)
        self._level = max(self._level, least)

    def note_ended(self, request: Request) -> None:
        self._tenants[request.tenant].num_requests -= 1

    def _enqueue(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        if request.tenant not in self._waiting_tenants:
            tenant.counter = max(tenant.counter, self._level)
            self._waiting_tenants[request.tenant] = tenant
        tenant.waiting.push(request)
        heapq.heappush(self._order, self._turn(request.tenant, tenant))
        if len(self._order) > 64 + 4 * len(self._waiting_tenants):
            self._order = [self._turn(name, tenant) for name, tenant in self._waiting_tenants.items()]
            heapq.heapify(self._order)

    @staticmethod
    def _turn(name: str | None, tenant: _Tenant) -> _Turn:
        return tenant.counter, tenant.waiting.peek().arrival_number, name

    def _next(self) -> _Tenant:
        """The waiting tenant with the smallest counter; there is one. A turn only ever moves back by itself, so what
        stands first is either right or stale."""
        while True:
            turn = self._order[0]
            tenant = self._waiting_tenants.get(turn[2])
            if tenant is None:
                heapq.heappop(self._order)
            elif self._turn(turn[2], tenant) == turn:
                return tenant
            else:
                heapq.heapreplace(self._order, self._turn(turn[2], tenant))

    def _forget_the_idle(self) -> None:
        """Drops those who owe least, now and then. One that returns starts at the level instead of above it, which is
        worth at most half of the bound, once."""
        if len(self._tenants) >= self._num_tenants_to_tidy:
            idle = sorted((n for n, t in self._tenants.items() if not t.num_requests), key=self.counter)
            for name in idle[: max(0, len(idle) - _NUM_IDLE_TENANTS_KEPT)]:
                del self._tenants[name]
            self._num_tenants_to_tidy = len(self._tenants) + _NUM_IDLE_TENANTS_KEPT

    def _dequeue(self) -> Request:
        request = self._next().waiting.peek()
        self._discard(request)
        return request

    def _discard(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.waiting.remove(request)
        if not len(tenant.waiting):
            del self._waiting_tenants[request.tenant]

    def victim(self, running: Iterable[Request]) -> Request:
        """From the tenant with the largest counter."""
        candidates = list(running)
        worst = max(candidates, key=lambda r: (self.counter(r.tenant), r.arrival_number)).tenant
        return max((r for r in candidates if r.tenant == worst), key=self.victim_order)

    def prefill_order(self, unfinished: Sequence[Request]) -> list[Request]:
        return sorted(unfinished, key=lambda r: self.counter(r.tenant))

    def check(self) -> None:
        super().check()
        assert {n for n, t in self._tenants.items() if len(t.waiting)} == self._waiting_tenants.keys()

    def charge_prompt(self, request: Request, start: int, end: int) -> None:
        start, end = max(start, request.num_charged), min(end, request.num_prompt_tokens)
        if end > start:
            self._tenants[request.tenant].counter += (end - start) * self.config.fair_prompt_weight
            request.num_charged = end

    def charge_output(self, request: Request, num_tokens: int) -> None:
        self._tenants[request.tenant].counter += num_tokens * self.config.fair_output_weight
