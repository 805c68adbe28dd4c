"""All checks, by theme, in the order in which they run: what others build upon first, what may do harm last."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from noria.conformance import (
    checks_answers,
    checks_chat,
    checks_completions,
    checks_extensions,
    checks_fields,
    checks_logprobs,
    checks_protocol,
    checks_robustness,
    checks_stop,
    checks_streaming,
)
from noria.conformance.contract import Check
from noria.errors import OptionError

THEMES = (
    checks_protocol.THEME,
    checks_answers.THEME,
    checks_stop.THEME,
    checks_streaming.THEME,
    checks_logprobs.THEME,
    checks_completions.THEME,
    checks_chat.THEME,
    checks_extensions.THEME,
    checks_fields.THEME,
    checks_robustness.THEME,
)
CHECKS: tuple[Check, ...] = tuple(check for theme in THEMES for check in theme.checks)


def choose(patterns: Sequence[str]) -> tuple[Check, ...]:
    """Those whose name or theme matches one of the patterns; all if there are none. Raises `OptionError` for a typo."""
    for pattern in patterns:
        if not any(_matches(check, pattern) for check in CHECKS):
            raise OptionError(f"--only: no check and no theme is called {pattern!r} (* stands for any text)")
    return tuple(check for check in CHECKS if not patterns or any(_matches(check, pattern) for pattern in patterns))


def _matches(check: Check, pattern: str) -> bool:
    return fnmatchcase(check.name, pattern) or fnmatchcase(check.theme, pattern)
