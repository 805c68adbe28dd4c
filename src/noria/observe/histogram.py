"""Histograms as a metrics page wants them, and the buckets that dashboards expect."""

from __future__ import annotations

from bisect import bisect_left

TTFT_BUCKETS_S = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
    2560.0,
)  # fmt: skip
GAP_BUCKETS_S = (
    .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS_S = (
    .3, .5, .8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TOKEN_BUCKETS = tuple(m * 10**e for e in range(7) for m in (1, 2, 5))
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)


class Histogram:
    """Counts per bucket, an observation falling into the first bucket whose bound is not below it."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def up_to(self, limit: float) -> Histogram:
        """The same observations in fewer buckets: those beyond `limit`, which no observation exceeds, are left out."""
        kept = Histogram(tuple(bound for bound in self.bounds if bound <= limit))
        kept.counts = self.counts[: len(kept.bounds)]
        kept.counts.append(sum(self.counts[len(kept.bounds) :]))
        kept.sum = self.sum
        return kept
