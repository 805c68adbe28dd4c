"""`noria bench kv`: how much of the KV memory that requests hold is empty, on a real trace, without any model.

The engine's own scheduler serves the trace on a clock that a cost model moves: a step of n tokens takes
`BASE_MS + n x TOKEN_MS`. All requests are there from the start, and the pool holds a share of what `max_num_seqs` of
them grow to, so there is pressure and preemption. After each step the scheduler's record says how many slots are
held and how many of those are filled; both are summed over time. For contrast the same trace is served with blocks as
long as the longest sequence: that is what reserving the maximum length for every request amounts to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from noria.bench.traces import TraceRequest
from noria.config import SchedulerConfig
from noria.core.request import Request
from noria.core.scheduler import Scheduler
from noria.fakes.engine import PacedRunner
from noria.sampling import SamplingParams

BASE_MS = 14.0
TOKEN_MS = 1.5


@dataclass(slots=True)
class KVLedger:
    """Slot-seconds. `waste` is empty slots over filled ones, among those that requests hold."""

    held: float = 0.0
    empty: float = 0.0
    running: float = 0.0
    seconds: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    num_tokens_lost: int = 0
    num_cached_tokens: int = 0

    @property
    def waste(self) -> float:
        filled = self.held - self.empty
        return self.empty / filled if filled else 0.0

    @property
    def mean_running(self) -> float:
        return self.running / self.seconds if self.seconds else 0.0


def serve_trace(
    requests: Sequence[TraceRequest],
    *,
    pool_tokens: int,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int = 2048,
) -> KVLedger:
    """Serves all requests; the ledger of it."""
    num_blocks = max(1, pool_tokens // block_size)
    config = SchedulerConfig(
        max_model_len=num_blocks * block_size,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_queued_reqs=len(requests),
        num_records_kept=1,
    )
    scheduler, runner, ledger = Scheduler(config), PacedRunner((7,), 0.0), KVLedger()
    for number, request in enumerate(requests):
        sampling = SamplingParams(max_tokens=request.num_output_tokens)
        scheduler.add(Request(f"r{number}", request.prompt, sampling), 0.0)
    now_s = 0.0
    while scheduler.has_unfinished:
        plan = scheduler.schedule(now_s)
        step_s = (BASE_MS + TOKEN_MS * plan.num_tokens) / 1000
        now_s += step_s
        # Before the update: requests that end with this step held their blocks while it ran.
        kv = scheduler.kv.usage(scheduler.running.num_computed_tokens + plan.num_tokens)
        ledger.held += kv.num_held * block_size * step_s
        ledger.empty += kv.num_unused_slots * step_s
        ledger.running += len(scheduler.running) * step_s
        ledger.seconds += step_s
        ledger.num_steps += 1
        ledger.num_preemptions += len(plan.preemptions)
        ledger.num_tokens_lost += sum(preemption.num_tokens_lost for preemption in plan.preemptions)
        events = scheduler.update(plan, runner.execute(plan), now_s)
        ledger.num_cached_tokens += sum(event.num_cached_tokens for event in events if event.finish_reason)
    return ledger


def measure_kv(
    requests: Sequence[TraceRequest], *, block_sizes: Sequence[int], max_num_seqs: int, pool_share: float
) -> dict[str, object]:
    """Waste by block size, and for maximum-length reservation."""
    lengths = [len(request.prompt) + request.num_output_tokens for request in requests]
    longest = max(lengths)
    working_set = max_num_seqs * sum(lengths) // len(lengths)
    pool_tokens = max(int(pool_share * working_set), longest + max(block_sizes))
    ledgers = {
        size: serve_trace(requests, pool_tokens=pool_tokens, block_size=size, max_num_seqs=max_num_seqs)
        for size in block_sizes
    }
    reserved = serve_trace(requests, pool_tokens=pool_tokens, block_size=longest, max_num_seqs=max_num_seqs)
    return {
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": sum(request.num_output_tokens for request in requests),
        "max_num_seqs": max_num_seqs,
        "working_set_tokens": working_set,
        "pool_tokens": pool_tokens,
        "step_cost_ms": [BASE_MS, TOKEN_MS],
        "waste": {str(size): round(ledger.waste, 4) for size, ledger in ledgers.items()},
        "waste_max_length": round(reserved.waste, 4),
        "mean_running": {str(size): round(ledger.mean_running, 1) for size, ledger in ledgers.items()},
        "mean_running_max_length": round(reserved.mean_running, 1),
        "preemptions": {str(size): ledger.num_preemptions for size, ledger in ledgers.items()},
        "tokens_lost": {str(size): ledger.num_tokens_lost for size, ledger in ledgers.items()},
        "cached_tokens": {str(size): ledger.num_cached_tokens for size, ledger in ledgers.items()},
    }
