"""A clock that moves only when told."""

from __future__ import annotations


class ManualClock:
    """Call it for the time in seconds; `advance` moves it."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
