"""Questions that a request must pass before it is admitted, beyond tokens, slots and memory.

A gate answers one question: may this request be admitted now (None), or which limit does it wait for? A request
that can never be admitted gets `Refused` raised: it ends with that error. Gates are asked in each step anew and keep
no list of requests; whoever waits for a gate is passed over, and others go by. "Later" must come true by itself or
by the ending of something that runs. A gate that raises anything but `Refused` ends the request too, with that error.

New capabilities (grammars, adapters, remote KV) enter here, one class each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from noria.core.plan import Limit

if TYPE_CHECKING:
    from noria.core.request import Request


class Refused(Exception):
    """The request can never be admitted, for a reason found only now; the message says it."""


class Grammar(Protocol):
    """A constraint on a request's output, prepared outside the scheduler."""

    @property
    def is_ready(self) -> bool:
        """Whether it has been compiled. Raises `Refused` if it cannot be."""


class Gate(Protocol):
    """`running` are the ids and requests admitted so far, those of this step included."""

    def ask(self, request: Request, running: dict[str, Request]) -> Limit | None: ...


class GrammarGate:
    """A request with a grammar waits until that is compiled; nobody waits for it."""

    def ask(self, request: Request, running: dict[str, Request]) -> Limit | None:
        grammar = request.grammar
        return None if grammar is None or grammar.is_ready else Limit.GRAMMAR


class AdapterGate:
    """At most `max_adapters` different adapters are in one step: all that run advance in every step.

    Requests for adapters that run go past one that waits for a place, until that has waited too long
    (`noria.core.admitting`).
    """

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters = max_adapters

    def ask(self, request: Request, running: dict[str, Request]) -> Limit | None:
        if request.adapter is None:
            return None
        others = {r.adapter for r in running.values()} - {None, request.adapter}
        return Limit.ADAPTERS if len(others) >= self._max_adapters else None
