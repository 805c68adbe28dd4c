"""Whether a worker's result is what the plan asked for, before anything is believed."""

from __future__ import annotations

from collections.abc import Mapping

from noria.core.draft import Chunk
from noria.core.plan import StepPlan, StepResult
from noria.errors import EngineError


def check_result(plan: StepPlan, result: StepResult, chunks: Mapping[str, Chunk]) -> None:
    """Raises `EngineError` unless just those have new tokens that were to reach the end of their known ones, may have
    a token at all, and did not fail.

    A request that is owed a token and gets none would wait for ever. One comparison of sets for all; who disagrees is
    worked out only when somebody does.
    """
    scheduled, sampled = plan.num_scheduled_tokens, result.token_ids
    unfinished = {
        request_id for request_id, chunk in chunks.items() if chunk.num_left_out > 0 or chunk.request.max_tokens == 0
    }
    if failed := result.failed:
        if wrong := [request_id for request_id in failed if request_id not in scheduled or request_id in sampled]:
            raise EngineError(f"the worker's result has {wrong} fail, which the plan did not run or which have tokens")
        scheduled = {request_id: n for request_id, n in scheduled.items() if request_id not in failed}
        unfinished -= failed.keys()
    if (
        len(sampled) == len(scheduled) - len(unfinished)
        and sampled.keys() <= scheduled.keys()
        and unfinished.isdisjoint(sampled)
        and set(map(len, sampled.values())) <= {1}
    ):
        return
    for request_id, num_tokens in scheduled.items():
        num_sampled, num_drafts = len(sampled.get(request_id, ())), len(plan.drafts.get(request_id, ()))
        most = 0 if request_id in unfinished else 1 + num_drafts
        if not min(1, most) <= num_sampled <= most:
            raise EngineError(
                f"the worker's result and the plan disagree on whether {request_id} has a new token: {num_tokens} "
                f"tokens with {num_drafts} drafts were to run, {num_sampled} came back, of at most {most}"
            )
    if strangers := [request_id for request_id in sampled if request_id not in scheduled]:
        raise EngineError(f"the worker's result has tokens for {strangers}, which the plan did not run")
