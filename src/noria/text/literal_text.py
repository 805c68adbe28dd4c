"""Marks in client-supplied text, so that it cannot spell a special token.

Used by `noria.text.chat`. A chat template pours messages into a text that is then searched for special tokens, and
whoever writes "<|im_end|>" into a message must not end the turn. So before rendering, a marker character (a Unicode
noncharacter that nobody used) is put inside whatever could become a special token: `Tokenizer.encode_rendered`
takes it out again after the search. A marker is put only there, because templates look into messages
(`'</think>' in content`) and must find what is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from noria.text.any_of import any_of

NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Code points that Unicode sets aside for use inside a program, never for text."""


def choose_markers(number: int, *values: Any) -> Sequence[str]:
    """So many noncharacters that occur in none of the strings in `values` (nested lists and mappings), or none."""
    used: set[str] = set()
    for text in _strings(values):
        used.update(re.findall("[\ufdd0-\ufdef]", text))
    unused = [c for c in NONCHARACTERS if c not in used]
    return unused[:number] if len(unused) >= number else ()


class Lookalikes:
    """Finds the places in a string where one of the special tokens could otherwise arise from it."""

    def __init__(self, special_token_texts: Iterable[str]) -> None:
        self._specials = [text for text in special_token_texts if text]
        self._anywhere = re.compile(f"(?={any_of(self._specials)})")
        self._max_length = max(map(len, self._specials), default=0)
        self._beginnings = {text[:length] for text in self._specials for length in range(1, len(text))}
        self._endings = {text[-length:] for text in self._specials for length in range(1, len(text))}

    def break_in(self, value: Any, marker: str, *, whole_values: bool = True) -> Any:
        """A copy of `value` with every string in it broken; keys too. Numbers and the like stay as they are."""
        if isinstance(value, str):
            return self.break_text(value, marker, whole_value=whole_values)
        if isinstance(value, Mapping):
            return {
                self.break_in(key, marker, whole_values=False): self.break_in(item, marker, whole_values=whole_values)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.break_in(item, marker, whole_values=whole_values) for item in value]
        return value

    def break_text(self, text: str, marker: str, *, whole_value: bool = True) -> str:
        """`text` with a marker at each place where a special token would lie, wholly or in part.

        Wholly: the token stands in the text. In part: the text ends as a token begins, or begins as one ends, and
        the template may put the rest next to it (two text parts side by side). With `whole_value` also when the
        text stands inside a token, which a template could complete on both sides ('<|' + text + '|>').
        """
        cuts: set[int] = set()
        for found in self._anywhere.finditer(text):
            cuts.add(found.start() + 1)
        for length in range(1, min(self._max_length - 1, len(text)) + 1):
            if text[-length:] in self._beginnings:
                cuts.add(len(text) - length + 1)
            if text[:length] in self._endings:
                cuts.add(length - 1)
        if (
            whole_value
            and 0 < len(text) < self._max_length
            and any(text in special[1:-1] for special in self._specials)
        ):
            cuts.add(1)
        if not cuts:
            return text
        bounds = [0, *sorted(cuts), len(text)]
        return marker.join(text[start:end] for start, end in pairwise(bounds))


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for item in value:
            yield from _strings(item)
