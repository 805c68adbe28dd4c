"""Making room for an urgent request: what the pool, the slots and the budget would be if some running ones gave way.

`Displacement` adds and removes candidates one at a time, each at the cost of its own blocks, so that looking for the
fewest victims stays cheap however many requests run. It changes nothing. Used by `noria.core.admitting`.
"""

from __future__ import annotations

from noria.core.draft import PlanDraft
from noria.core.request import Request
from noria.kv.manager import KVManager, WithoutSome


class Displacement:
    """The step as it would be without `victims`."""

    def __init__(self, kv: KVManager, draft: PlanDraft) -> None:
        self.victims: dict[str, Request] = {}
        self.kv = WithoutSome(kv)
        self.num_planned_tokens = 0
        """What this step had planned for them: it would be free for others."""
        self.num_tokens_ahead = 0
        """What they may still come to need."""
        self._draft = draft

    def add(self, victim: Request) -> None:
        self.victims[victim.request_id] = victim
        self.kv.add(victim.request_id)
        self.num_planned_tokens += self._draft.num_planned(victim.request_id)
        self.num_tokens_ahead += victim.max_num_tokens - victim.num_computed

    def remove(self, victim: Request) -> None:
        del self.victims[victim.request_id]
        self.kv.remove(victim.request_id)
        self.num_planned_tokens -= self._draft.num_planned(victim.request_id)
        self.num_tokens_ahead -= victim.max_num_tokens - victim.num_computed
