"""What happened to each request of a measured run, and the figures that follow: shared by all benchmarks.

The names in the result are those that load tests of servers report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from noria.bench.workload import WorkloadRequest


@dataclass(slots=True)
class Timeline:
    """What happened to one request. Times are in seconds on the run's clock."""

    request: WorkloadRequest
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated: int = 0
    start_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    """When tokens were seen: one entry each, or one for each bunch that arrived together over HTTP."""
    error: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None and bool(self.token_times_s)


def summarise_timelines(timelines: Sequence[Timeline], wall_s: float, label: str) -> dict[str, Any]:
    """The figures of a run: throughput in tokens per second; time to first token in seconds; time per output token and
    gap between tokens in milliseconds. Those of failed requests count only as failures."""
    ok = [timeline for timeline in timelines if timeline.is_ok]
    num_prompt = sum(timeline.num_prompt_tokens for timeline in ok)
    num_generated = sum(timeline.num_generated for timeline in ok)
    ttft_s = [timeline.token_times_s[0] - timeline.start_s for timeline in ok]
    tpot_s = [
        (timeline.token_times_s[-1] - timeline.token_times_s[0]) / (timeline.num_generated - 1)
        for timeline in ok
        if timeline.num_generated > 1
    ]
    gaps_s = gaps_between_tokens(timelines)
    errors = dict.fromkeys(timeline.error or "no tokens" for timeline in timelines if not timeline.is_ok)
    return {
        "label": label,
        "ok": len(ok),
        "failed": len(timelines) - len(ok),
        "short": sum(timeline.num_generated != timeline.request.max_tokens for timeline in ok),
        "wall_s": round(wall_s, 2),
        "prompt_tokens": num_prompt,
        "gen_tokens": num_generated,
        "gen_tok_s": round(num_generated / wall_s, 1),
        "total_tok_s": round((num_generated + num_prompt) / wall_s, 1),
        "ttft_p50": rounded(percentile(ttft_s, 50), 3),
        "ttft_p99": rounded(percentile(ttft_s, 99), 3),
        "tpot_p50_ms": rounded(percentile(tpot_s, 50), 2, scale=1e3),
        "tpot_p99_ms": rounded(percentile(tpot_s, 99), 2, scale=1e3),
        "itl_p99_ms": rounded(percentile(gaps_s, 99), 2, scale=1e3),
        "errors": list(errors)[:3],
    }


def gaps_between_tokens(timelines: Sequence[Timeline]) -> list[float]:
    """In seconds; of requests that failed none."""
    times_s = [timeline.token_times_s for timeline in timelines if timeline.is_ok]
    return [b - a for each in times_s for a, b in pairwise(each)]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value at the nearest rank; None of nothing."""
    ordered = sorted(values)
    return ordered[round(percent / 100 * (len(ordered) - 1))] if ordered else None


def rounded(value: float | None, digits: int, *, scale: float = 1.0) -> float | None:
    """The value times `scale`; None stays None."""
    return None if value is None else round(value * scale, digits)


def significant(value: float) -> float:
    """The value to six significant digits, however small or large it is."""
    return float(f"{value:.6g}")
