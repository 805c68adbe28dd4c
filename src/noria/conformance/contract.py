"""What a check is, where its expectation comes from, and how it says that the expectation is not met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from noria.conformance.client import Server
    from noria.conformance.endpoints import Endpoint


class Source(StrEnum):
    """Whose word an expectation is."""

    OPENAI = "OpenAI API reference"
    SDK = "OpenAI SDK"
    SSE = "SSE (WHATWG HTML)"
    HTTP = "HTTP (RFC 9110, 9112)"
    JSON = "JSON (RFC 8259)"
    EXTENSION = "common extension"
    """A field or route that OpenAI's API does not have, but several servers do, with one meaning."""
    OURS = "our own choice"


class Outcome(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    NOT_SUPPORTED = "not supported"


class Unmet(Exception):
    """The server did not do what was expected; the message says what it did."""


class NotSupported(Exception):
    """The server has refused, in so many words, something optional that the check needs."""


def expect(holds: object, reason: str) -> None:
    """Raises `Unmet` with that reason unless it holds."""
    if not holds:
        fail(reason)


def fail(reason: str) -> NoReturn:
    raise Unmet(reason)


@dataclass(frozen=True, slots=True)
class Check:
    """One expectation. `run` returns if it is met and raises `Unmet` or `NotSupported` if not.

    `needs` are the optional fields or routes that it uses: a server which refuses one of them, naming it, does not
    support it, and has not failed.
    """

    name: str
    theme: str
    expected: str
    source: Source
    run: Callable[[Server], None]
    needs: tuple[str, ...] = ()


class Theme:
    """The checks of one module, in the order in which they stand there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.checks: list[Check] = []

    def add(
        self, name: str, expected: str, source: Source, run: Callable[[Server], None], needs: tuple[str, ...] = ()
    ) -> None:
        self.checks.append(Check(name, self.name, expected, source, run, needs))

    def check(
        self, expected: str, source: Source, *, needs: tuple[str, ...] = ()
    ) -> Callable[[Callable[[Server], None]], Callable[[Server], None]]:
        """Makes a function a check; its name is the function's, with hyphens."""

        def register(run: Callable[[Server], None]) -> Callable[[Server], None]:
            self.add(run.__name__.replace("_", "-"), expected, source, run, needs)
            return run

        return register

    def check_each(
        self, expected: str, source: Source, *endpoints: Endpoint, needs: tuple[str, ...] = ()
    ) -> Callable[[Callable[[Server, Endpoint], None]], Callable[[Server, Endpoint], None]]:
        """Makes a function one check for each endpoint, named `completions-...` and `chat-...`."""

        def register(run: Callable[[Server, Endpoint], None]) -> Callable[[Server, Endpoint], None]:
            for endpoint in endpoints:
                name = f"{endpoint.name}-{run.__name__.replace('_', '-')}"
                self.add(name, expected, source, _bound(run, endpoint), needs)
            return run

        return register


def _bound(run: Callable[[Server, Endpoint], None], endpoint: Endpoint) -> Callable[[Server], None]:
    return lambda server: run(server, endpoint)
