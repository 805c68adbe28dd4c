"""Finding stop strings in a text that arrives in pieces.

Used by `noria.text.stream`. Knows characters only: which token a character came from is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Automaton:
    """Knuth-Morris-Pratt for one stop string: how much of it the text so far ends with."""

    __slots__ = ("_fallback", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        # _fallback[k]: length of the longest proper prefix of stop[:k + 1] that is also its suffix.
        self._fallback = [0] * len(stop)
        length = 0
        for position in range(1, len(stop)):
            while length and stop[position] != stop[length]:
                length = self._fallback[length - 1]
            length += stop[position] == stop[length]
            self._fallback[position] = length

    def let_pass(self) -> None:
        """The stop string that is complete does not count; its end may be the beginning of the next."""
        self.num_matched = self._fallback[-1]

    def advance(self, character: str) -> bool:
        """Read one character; true when it completes the stop string (only after `let_pass` may more be read)."""
        while self.num_matched and self.stop[self.num_matched] != character:
            self.num_matched = self._fallback[self.num_matched - 1]
        self.num_matched += self.stop[self.num_matched] == character
        return self.num_matched == len(self.stop)


class StopStrings:
    """Passes text through until a stop string completes.

    The stop string that completes first in the text wins, wherever it begins; of several that complete with the
    same character, the longest, so that no part of a stop string is ever given out. The text is cut before it, or
    after it with `include_stop`. Held back is exactly what may still become part of a stop string that is cut away.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Text that may be given out, and the stop string if one completed (the end: push nothing more).

        Without `may_stop` it is too early for one that completes in this text; one that begins in it may still come.
        """
        if not self._automata:
            return text, None
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            completed = [a for a in self._automata if a.advance(character)]
            if completed and may_stop:
                stop = max((a.stop for a in completed), key=len)
                self._held = ""
                return pending[: end if self._include_stop else end - len(stop)], stop
            for automaton in completed:
                automaton.let_pass()
        num_held = 0 if self._include_stop else max(a.num_matched for a in self._automata)
        released = len(pending) - num_held
        self._held = pending[released:]
        return pending[:released], None

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held
