"""Why a request is where it is: the last plan's reasons, expanded for one request when somebody asks.

A plan names the limit of every request that was looked at and did not advance as far as it could, and one limit for
all that stand behind the point where admission ended. Called by the engine's owner; costs nothing until then.
"""

from __future__ import annotations

import msgspec

from noria.core.plan import Limit, StepPlan
from noria.core.scheduler import Scheduler


class Explanation(msgspec.Struct, frozen=True):
    """Where one request stands after the last planned step."""

    request_id: str
    state: str
    num_computed: int
    num_tokens: int
    limit: Limit | None = None
    """What held it back in that step; None if nothing did, or if it came after."""
    detail: str = ""
    queue: str | None = None
    """The policy whose queue it waits in."""
    position: int | None = None
    """Its place in that queue as it would be served now, 0 being next."""
    num_preemptions: int = 0

    def __str__(self) -> str:
        text = f"{self.request_id}: {self.state}, {self.num_computed} of {self.num_tokens} tokens computed"
        if self.position is not None:
            text += f", number {self.position + 1} in the {self.queue} queue"
        if self.limit is not None:
            text += f"; held by {self.limit}" + (f" ({self.detail})" if self.detail else "")
        return text


def explain(scheduler: Scheduler, request_id: str) -> Explanation | None:
    """None if there is no such request (any more)."""
    request = scheduler.running.get(request_id) or scheduler.waiting.get(request_id)
    if request is None:
        return None
    queue = position = None
    if request_id in scheduler.waiting:
        queue = scheduler.config.scheduling_policy
        position = [r.request_id for r in scheduler.waiting.order()].index(request_id)
    was_there = request.arrival_number <= scheduler.num_arrived_at_plan
    limit, detail = _why(scheduler.last_plan, request_id) if was_there else (None, "")
    return Explanation(
        request_id=request_id,
        state=str(request.state.value),
        num_computed=request.num_computed,
        num_tokens=request.num_tokens,
        limit=limit,
        detail=detail,
        queue=queue,
        position=position,
        num_preemptions=request.num_preemptions,
    )


def _why(plan: StepPlan | None, request_id: str) -> tuple[Limit | None, str]:
    if plan is None:
        return None, ""
    for held in plan.held:
        if held.request_id == request_id:
            return held.limit, held.detail
    for preemption in plan.preemptions:
        if preemption.request_id == request_id:
            return preemption.limit, f"gave way to {preemption.in_favour_of}"
    if request_id not in plan.num_scheduled_tokens and plan.admission_end is not None:
        looked_at = plan.admission_end.position
        detail = (
            f"only the first {looked_at} of the queue were looked at"
            if looked_at
            else "nobody in the queue was admitted"
        )
        return plan.admission_end.limit, detail
    return None, ""
