"""`noria bench latency`: one stream at a time in this process: time to the first token, and time per token.

Beside it stands the floor of a token (`noria.bench.floor`), with the machine's speed in the same run: reading the
weights of all products and the KV of its context, or computing with them where that takes longer.
"""

from __future__ import annotations

import random
import statistics
from typing import Any

from noria.assembly import Assembled
from noria.bench.machine import MachineWatch
from noria.bench.throughput import run_workload
from noria.bench.timeline import Timeline, percentile, rounded
from noria.bench.watched import StepLog
from noria.bench.workload import WorkloadRequest
from noria.errors import OptionError


def run_streams(assembled: Assembled, *, prompt_tokens: int, new_tokens: int, num_runs: int) -> list[Timeline]:
    """Streams of random prompts, one after the other; the prompts differ, so that none is found in a cache."""
    if min(prompt_tokens, num_runs) < 1 or new_tokens < 2:
        raise OptionError(
            "--prompt-tokens and --runs must be at least 1, and --new-tokens at least 2, "
            f"not {prompt_tokens}, {num_runs} and {new_tokens}"
        )
    numbers = random.Random(1)
    timelines = []
    for _ in range(num_runs):
        prompt = tuple(numbers.randrange(assembled.files.config.vocab_size) for _ in range(prompt_tokens))
        [timeline] = run_workload(assembled, [WorkloadRequest(prompt, new_tokens)]).timelines
        if timeline.error is not None:
            raise OptionError(f"{prompt_tokens} prompt tokens and {new_tokens} new ones: {timeline.error}")
        timelines.append(timeline)
    return timelines


def summarise_latency(timelines: list[Timeline], log: StepLog, machine: MachineWatch) -> dict[str, Any]:
    """Milliseconds. The floor is that of a decoded token: the median over the logged steps that decode."""
    gaps_s = [b - a for t in timelines for a, b in zip(t.token_times_s, t.token_times_s[1:], strict=False)]
    ttft_s = [timeline.token_times_s[0] - timeline.start_s for timeline in timelines]
    median_s = statistics.median(gaps_s)
    floors = log.floors(machine)
    decoding = [
        sum(floor.values()) for step, floor in zip(log.steps, floors, strict=False) if step.shape.num_tokens == 1
    ]
    floor_s = statistics.median(decoding) if decoding else None
    return {
        "runs": len(timelines),
        "prompt_tokens": timelines[0].num_prompt_tokens,
        "new_tokens": timelines[0].num_generated,
        "ms_per_token": rounded(median_s, 3, scale=1e3),
        "ms_per_token_p99": rounded(percentile(gaps_s, 99), 3, scale=1e3),
        "ms_per_token_mean": rounded(statistics.fmean(gaps_s), 3, scale=1e3),
        "ttft_ms": rounded(statistics.median(ttft_s), 2, scale=1e3),
        "floor_ms_per_token": rounded(floor_s, 3, scale=1e3),
        "floor_ratio": None if floor_s is None else round(median_s / floor_s, 3),
    }
