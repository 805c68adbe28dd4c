"""How fast requests end, lately: `Pace`. A full queue tells those that it has no place for when to come back."""

from __future__ import annotations

from collections import deque

WINDOW = 64
"""Endings that are looked at, at most."""


class Pace:
    """Endings of a time in which there always was something to do. Times in seconds, on one clock."""

    def __init__(self) -> None:
        self._ended_s: deque[float] = deque(maxlen=WINDOW)
        self._began_s: float | None = None

    def note_busy(self, now_s: float) -> None:
        """There is something to do."""
        if self._began_s is None:
            self._began_s = now_s

    def note_ending(self, now_s: float) -> None:
        """A request has come to its end."""
        if len(self._ended_s) == WINDOW:
            self._began_s = self._ended_s[0]  # which falls out: from there on so many have ended
        self._ended_s.append(now_s)

    def note_idle(self) -> None:
        """Nothing is left: how long it stays so says nothing about what comes later."""
        self._ended_s.clear()
        self._began_s = None

    def seconds_for(self, num_endings: int, now_s: float) -> float:
        """How long it takes until so many more have ended; where none has yet, at least as long as it has been."""
        if self._began_s is None:
            return 0.0
        return num_endings * max(0.0, now_s - self._began_s) / max(1, len(self._ended_s))
