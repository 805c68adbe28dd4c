"""Fair shares between tenants, counted in tokens: virtual token counters (Sheng et al., OSDI 2024).

Each tenant has a counter of the service it got: `fair_prompt_weight` for each prompt token computed for it,
`fair_output_weight` for each token generated. The waiting tenant with the smallest counter is served next, its
requests in order of arrival. Prompt tokens found in the cache cost nothing. Recomputing what a preemption threw away
is never charged: a request pays for each position once. A tenant that comes back after it had nothing waiting is
lifted to the smallest counter of those that wait (or, if nobody does, of the one that left last), so that idling
saves nothing up. The same order shares a step among unfinished prompts, and the tenant with the largest counter
gives way first under memory pressure.

The bound. Let M = `num_blocks x block_size` be the pool in tokens, S = `max_num_seqs`, and w the weights. While two
tenants both have requests waiting that nothing but budget, slots and memory holds back,

    |W_f - W_g| <= 2 x (w_prompt x M + w_output x (M/1 + M/2 + ... + M/S))   (each quotient rounded down)

for the service W that each gets over any such interval, whatever was preempted meanwhile. Why: the counters of two
such tenants never drift apart by more than half of that. A tenant is only served (admitted or resumed) while its
counter is the smallest, so what it is charged beyond another's counter goes to requests that it already had running
then. Their prompts all fit into the pool, since admission keeps room for whole sequences: M prompt tokens. Their
outputs: all that run advance together, so when the first of k of them ends all k have room in the pool, and it has
got at most M/k tokens; the next, with k - 1 left, at most M/(k - 1), and so on. The published bound,
2 x max(w_prompt x L, w_output x M) with L the longest prompt, is for a server that reserves room for whole outputs
at admission; ours does not, which is what the sum is for. Both hold without drafts and with `reserve_full_sequence`.
Nobody is admitted past a request that waits for memory here: it would break the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from noria.config import SchedulerConfig
from noria.core.policies.base import CountCached, OrderedQueue, Policy
from noria.core.request import Request

_MAX_IDLE_TENANTS = 1024


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
        self._last_to_leave: _Tenant | None = None
        self._num_tenants_to_tidy = _MAX_IDLE_TENANTS

    def counter(self, tenant: str | None) -> int:
        """Weighted tokens of service so far, lifts included."""
        return self._tenants[tenant].counter

    def note_arrival(self, request: Request) -> None:
        if request.tenant not in self._tenants:
            self._forget_the_idle()
            self._tenants[request.tenant] = _Tenant()
        self._tenants[request.tenant].num_requests += 1

    def note_ended(self, request: Request) -> None:
        self._tenants[request.tenant].num_requests -= 1

    def _enqueue(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        if request.tenant not in self._waiting_tenants:
            tenant.counter = max(tenant.counter, self._least_counter())
        self._restore(request)

    def _restore(self, request: Request) -> None:
        tenant = self._waiting_tenants[request.tenant] = self._tenants[request.tenant]
        tenant.waiting.push(request)

    def _least_counter(self) -> int:
        if self._waiting_tenants:
            return min(tenant.counter for tenant in self._waiting_tenants.values())
        return self._last_to_leave.counter if self._last_to_leave is not None else 0

    def _forget_the_idle(self) -> None:
        """Drops tenants whom the lift would treat as new anyway, now and then."""
        if len(self._tenants) >= self._num_tenants_to_tidy:
            least = self._least_counter()
            self._tenants = {n: t for n, t in self._tenants.items() if t.num_requests or t.counter > least}
            self._num_tenants_to_tidy = max(_MAX_IDLE_TENANTS, 2 * len(self._tenants))

    def _dequeue(self) -> Request:
        tenant = min(self._waiting_tenants.values(), key=lambda t: (t.counter, t.waiting.peek().arrival_number))
        request = tenant.waiting.peek()
        self._discard(request)
        return request

    def _discard(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.waiting.remove(request)
        if not len(tenant.waiting):
            del self._waiting_tenants[request.tenant]
            self._last_to_leave = tenant

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
