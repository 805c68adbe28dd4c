"""Incremental detokenisation: ids in, text out, never part of a character.

Used by `Tokenizer.decode` (all at once) and by `noria.text.stream` (as tokens arrive), so both give the same text
however the ids are bunched. Does not know stop strings and keeps no text that it has handed out.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

MAX_UTF8_BYTES = 4


class TokenBytes(Protocol):
    """The part of a tokenizer that is needed to turn ids into text."""

    @property
    def special_token_ids(self) -> tuple[int, ...]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def opening_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """Bytes of tokens through an incremental UTF-8 decoder.

    Held back is only the beginning of a character that further bytes may still complete (at most three bytes);
    each maximal piece that can no longer become a character is one U+FFFD, as everywhere on the web.
    """

    def __init__(self, tokenizer: TokenBytes, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.special_token_ids) if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._opening = True

    def continue_from(self, context_ids: Sequence[int]) -> None:
        """Take up after `context_ids` (a prompt) without giving their text again.

        What follows is then no longer the opening of a text, and completes a character that the context began.
        """
        tail: list[bytes] = []
        num_bytes = 0
        for token_id in reversed(context_ids):
            data = b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)
            if data:
                self._opening = False
                tail.append(data)
                num_bytes += len(data)
            if num_bytes >= MAX_UTF8_BYTES:
                break
        self._utf8.decode(b"".join(reversed(tail)))

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        pieces: list[bytes] = []
        for token_id in token_ids:
            if token_id in self._skipped:
                continue
            data = self._tokenizer.token_bytes(token_id)
            if self._opening and data:
                data = self._tokenizer.opening_bytes(token_id)
                self._opening = False
            pieces.append(data)
        return self._utf8.decode(b"".join(pieces))

    def flush(self) -> str:
        """The end of the text: what is left of an unfinished character, as U+FFFD. Nothing may follow."""
        return self._utf8.decode(b"", final=True)
