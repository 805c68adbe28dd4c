"""An engine whose requests are held or refused by a gate, for a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from noria.core.gates import Refused
from noria.core.plan import Limit
from noria.core.request import Request
from noria.engine.core import EngineCore
from noria.fakes.engine import build_scripted_engine

HELD, REFUSED = 7, 8
"""A prompt that begins with one of these never passes the gate: it waits for ever, or is told that it never will."""


class FirstTokenGate:
    def ask(self, request: Request, running: dict[str, Request]) -> Limit | None:
        if request.token_ids[0] == REFUSED:
            raise Refused("nobody ever passes with this token")
        return Limit.GRAMMAR if request.token_ids[0] == HELD else None


def build_gated_engine(report: Callable[[str], None], **arguments: Any) -> EngineCore:
    core = build_scripted_engine(report, **arguments)
    core.scheduler._gates.append(FirstTokenGate())
    return core
