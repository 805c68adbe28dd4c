"""The figures of `noria bench overload`: what happened to each request, and what follows from all of them.

It only counts: whether a server did well is for the reader to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, get_args

from noria.bench.timeline import percentile, rounded

Kind = Literal["ordinary", "giant", "urgent"]
Outcome = Literal["open", "finished", "aborted", "refused", "failed", "broken", "hung"]
"""Of a request: not ended yet; ended as it should; cut by us; answered with another status than 200; not answered, or
with an error in the stream; a stream that just ended; not ended when the wait for it was over."""


LULL_S = 0.05
"""A client needs a moment between the end of one request and the next: in so short a time nobody stopped waiting."""


@dataclass(slots=True)
class Call:
    """What happened to one request. Times are in seconds on the run's clock, which starts with the load."""

    kind: Kind
    max_tokens: int
    cut_after: int | None = None
    """The client hangs up after this many tokens."""
    start_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    """When tokens were seen: one entry each, or one for each bunch that arrived together."""
    end_s: float = 0.0
    num_generated: int | None = None
    """As the server counts them, when the stream came that far."""
    outcome: Outcome = "open"
    status: int = 0
    error: str | None = None

    @property
    def first_token_s(self) -> float:
        """When the wait for the first token was over, with or without one."""
        return self.token_times_s[0] if self.token_times_s else self.end_s

    @property
    def tokens_per_time(self) -> float:
        """A chunk may hold several tokens: the server's count is spread over all chunks."""
        if not self.token_times_s or self.num_generated is None:
            return 1.0
        return self.num_generated / len(self.token_times_s)

    @property
    def max_silence_s(self) -> float:
        """The longest time without a token, from the request on and up to its end."""
        return max(b - a for a, b in pairwise([self.start_s, *self.token_times_s, self.end_s]))


def summarise_overload(calls: Sequence[Call], *, duration_s: float, window_s: float) -> dict[str, Any]:
    """The figures of a run that sent for `duration_s`; every call has ended or is marked as hung."""
    outcomes = Counter(call.outcome for call in calls)
    refused = Counter(str(call.status) for call in calls if call.outcome == "refused")
    errors = dict.fromkeys(call.error for call in calls if call.error is not None)
    finished = [call for call in calls if call.outcome == "finished"]
    result: dict[str, Any] = {
        "duration_s": duration_s,
        "wall_s": round(max((call.end_s for call in calls), default=0.0), 2),
        "sent": len(calls),
        "finished": len(finished),
        "short": sum(call.num_generated not in (None, call.max_tokens) for call in finished),
        "aborted": outcomes["aborted"],
        "refused": dict(sorted(refused.items())),
        "failed": outcomes["failed"],
        "broken": outcomes["broken"],
        "hung": outcomes["hung"],
        "errors": list(errors)[:3],
        "gen_tokens": round(sum(call.tokens_per_time * len(call.token_times_s) for call in calls)),
    }
    result |= _summarise_windows(calls, int(duration_s / window_s + 1e-9), window_s)
    result["max_silence_s"] = round(max((call.max_silence_s for call in calls), default=0.0), 3)
    return result | {kind: _summarise_kind([call for call in calls if call.kind == kind]) for kind in get_args(Kind)}


def _summarise_windows(calls: Sequence[Call], num_windows: int, window_s: float) -> dict[str, Any]:
    """Tokens in each whole window of the load. A window is a waiting one when at every moment of it some open request
    had no token yet (lulls of `LULL_S` apart); `worst_window_share` compares these only: elsewhere the server may just
    have had too little to do. Requests preempted after their first token wait too, but a client cannot tell."""
    tokens = [0.0] * num_windows
    for call in calls:
        for time_s in call.token_times_s:
            if time_s < num_windows * window_s:
                tokens[int(time_s / window_s)] += call.tokens_per_time
    waits = _union([(0.0, 0.0)] + [(call.start_s, call.first_token_s) for call in calls])
    waiting = [
        any(begin_s <= index * window_s and (index + 1) * window_s <= end_s for begin_s, end_s in waits)
        for index in range(num_windows)
    ]
    compared = [count for count, waits_throughout in zip(tokens, waiting, strict=True) if waits_throughout]
    best = max(compared, default=0.0)
    return {
        "window_s": window_s,
        "window_tokens": [round(count) for count in tokens],
        "window_waiting": waiting,
        "worst_window_share": round(min(compared) / best, 3) if best else None,
    }


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time in spans that do not overlap; short lulls between them are filled."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1] + LULL_S:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _summarise_kind(calls: Sequence[Call]) -> dict[str, Any]:
    """Of all requests that got tokens, the cut ones too. Time to first token in seconds, gaps in milliseconds."""
    ttft_s = [call.token_times_s[0] - call.start_s for call in calls if call.token_times_s]
    gaps_s = [b - a for call in calls for a, b in pairwise(call.token_times_s)]
    return {
        "sent": len(calls),
        "ttft_p50": rounded(percentile(ttft_s, 50), 3),
        "ttft_p99": rounded(percentile(ttft_s, 99), 3),
        "gap_p50_ms": rounded(percentile(gaps_s, 50), 2, scale=1e3),
        "gap_p99_ms": rounded(percentile(gaps_s, 99), 2, scale=1e3),
    }
