"""What the checks found: a table for people, one JSON object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from noria.conformance.client import Server
from noria.conformance.contract import Outcome, Source
from noria.conformance.run import Result

NOT_STANDARD = (Source.EXTENSION, Source.OURS)
"""Sources that are no standard: what they expect is counted apart."""


def count_outcomes(results: Sequence[Result]) -> dict[str, dict[str, int]]:
    """How many passed, failed, are not supported: of the standards, of extensions, of our own choices."""
    groups = {
        "standard": [result for result in results if result.source not in NOT_STANDARD],
        "common extension": [result for result in results if result.source is Source.EXTENSION],
        "our own choice": [result for result in results if result.source is Source.OURS],
    }
    return {
        name: {outcome.value: sum(result.outcome is outcome for result in group) for outcome in Outcome}
        for name, group in groups.items()
    }


def as_json(server: Server, results: Sequence[Result]) -> dict[str, Any]:
    return {"url": server.url, "model": server.model, "counts": count_outcomes(results), "checks": list(results)}


def as_lines(result: Result, width: int) -> str:
    """A check's outcome and expectation, and the reason where it did not pass. Names are filled up to `width`."""
    mark = " (our own choice)" if result.source is Source.OURS else ""
    lines = f"  {result.outcome.value:<13}  {result.name:<{width}}  {result.expected}{mark}"
    return f"{lines}\n  {'':<13}  {'':<{width}}  -> {result.reason}" if result.reason else lines


def summary(results: Sequence[Result]) -> str:
    """The counts, one line for each group of sources."""
    return "\n".join(
        f"{name:<17} " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        for name, counts in count_outcomes(results).items()
    )
