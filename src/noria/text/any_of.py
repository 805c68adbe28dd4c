"""A regular expression for any of many texts: `any_of`.

Used to look for special tokens, of which some vocabularies have thousands that begin alike (`<unused0>`, ...). A plain
list of alternatives would be tried one after another wherever a text has a "<".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

MAX_DEPTH = 50
"""Branches within branches; beyond, what may follow is tried one after another. A file's tokens may each begin with the
one before, and neither this nor `re` gets deeper than Python's stack."""


def any_of(texts: Iterable[str]) -> str:
    """Matches the longest of `texts` that stands at a place; nothing, if there are none. Empty texts do not count.

    What texts begin with alike is written once, so that one character decides between all that may follow.
    """
    return _branch(sorted({text for text in texts if text}), MAX_DEPTH) or r"(?!)"


def _branch(texts: list[str], most_depth: int) -> str:
    """Of sorted texts; if the empty one is among them the rest may be missing."""
    if most_depth == 0:
        return f"(?:{'|'.join(re.escape(text) for text in sorted(texts, key=len, reverse=True))})"
    may_end = bool(texts) and texts[0] == ""
    endings: list[str] = []
    singles: list[str] = []
    for first, group in groupby(texts[may_end:], key=lambda text: text[0]):
        alike = list(group)
        shared = _beginning(alike[0], alike[-1])  # of all: they are sorted
        if alike == [first]:
            singles.append(re.escape(first))
        else:
            endings.append(re.escape(shared) + _branch([text[len(shared) :] for text in alike], most_depth - 1))
    if len(singles) > 1:
        endings.append(f"[{''.join(singles)}]")
    else:
        endings += singles
    if not endings:
        return ""
    if len(endings) == 1 and not may_end:
        return endings[0]
    return f"(?:{'|'.join(endings)}){'?' if may_end else ''}"


def _beginning(first: str, second: str) -> str:
    """What both begin with."""
    return first[: next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))]
