"""What each tenant was served, counted from plans and results alone, and how far two of them ever drift apart."""

from __future__ import annotations

from itertools import combinations

from noria.config import SchedulerConfig
from noria.core.plan import Limit, StepPlan
from noria.core.scheduler import Scheduler

_OWN_LIMITS = (Limit.PREFIX_BEING_COMPUTED, Limit.GRAMMAR, Limit.ADAPTERS)


def bound(config: SchedulerConfig) -> int:
    """The one in the docstring of `noria.core.policies.fair`."""
    pool = config.num_blocks * config.block_size
    outputs = sum(pool // k for k in range(1, config.num_slots + 1))
    return 2 * (config.fair_prompt_weight * pool + config.fair_output_weight * outputs)


class ServiceMeter:
    """Weighted tokens per tenant, and for each pair the greatest |W_f - W_g| over any interval in which both had
    somebody waiting who could be served.

    Over all intervals within a stretch of time, the greatest change of D = W_f - W_g is its maximum less its minimum
    there. So one look per event suffices for every interval.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._charged_to: dict[str, int] = {}
        self._stretches: dict[tuple[str, str], tuple[int, int]] = {}
        self._held: set[str] = set()
        self.service: dict[str, int] = {}
        self.gaps: dict[tuple[str, str], int] = {}

    @property
    def gap(self) -> int:
        return max(self.gaps.values(), default=0)

    def planned(self, plan: StepPlan) -> None:
        """A plan was made and will be executed; it has not changed any cursor yet."""
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            request = self._scheduler.running.by_id[request_id]
            start = max(request.num_computed, self._charged_to.get(request_id, 0))
            end = min(request.num_computed + num_tokens, request.num_prompt_tokens)
            if end > start:
                self._charged_to[request_id] = end
                self._serve(request.tenant, (end - start) * self._scheduler.config.fair_prompt_weight)
        self._held = {held.request_id for held in plan.held if held.limit in _OWN_LIMITS}
        self.look()

    def generated(self, tenant: str | None, num_tokens: int) -> None:
        self._serve(tenant, num_tokens * self._scheduler.config.fair_output_weight)

    def _serve(self, tenant: str | None, service: int) -> None:
        assert tenant is not None
        self.service[tenant] = self.service.get(tenant, 0) + service

    def look(self) -> None:
        """To be called whenever service was counted or the queue has changed."""
        backlogged = {r.tenant or "" for r in self._scheduler.waiting if r.request_id not in self._held}
        self._stretches = {pair: seen for pair, seen in self._stretches.items() if backlogged.issuperset(pair)}
        for first, second in combinations(sorted(backlogged), 2):
            difference = self.service.get(first, 0) - self.service.get(second, 0)
            least, most = self._stretches.get((first, second), (difference, difference))
            least, most = min(least, difference), max(most, difference)
            self._stretches[first, second] = least, most
            self.gaps[first, second] = max(self.gaps.get((first, second), 0), most - least)
