"""Runs checks against a server, one after the other, and says what came of each."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Sequence

import msgspec

from noria.conformance.client import Server
from noria.conformance.contract import Check, NotSupported, Outcome, Source, Unmet
from noria.conformance.endpoints import COMPLETIONS
from noria.errors import NoriaError


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One check's outcome. `reason` is what the server did instead; empty for a pass."""

    name: str
    theme: str
    expected: str
    source: Source
    outcome: Outcome
    reason: str
    seconds: float


def run_checks(
    server: Server, checks: Sequence[Check], on_result: Callable[[Result], None] = lambda result: None
) -> list[Result]:
    """`server` must have its model's name; see `find_model`."""
    results = []
    for check in checks:
        results.append(run_check(server, check))
        on_result(results[-1])
    return results


def run_check(server: Server, check: Check) -> Result:
    """Whatever a server answers, this does not raise: an answer in which a check does not find its way is a failure."""
    began_s = time.perf_counter()
    outcome, reason = Outcome.FAIL, ""
    try:
        check.run(server.needing(check.needs))
        outcome = Outcome.PASS
    except NotSupported as refusal:
        outcome, reason = Outcome.NOT_SUPPORTED, str(refusal)
    except Unmet as unmet:
        reason = str(unmet)
    except TimeoutError:
        reason = f"no answer within {server.timeout_s:g} s"
    except (OSError, http.client.HTTPException) as error:
        reason = f"the connection failed: {error!r}"
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"the answer is not of the expected shape: {error!r}"
    return Result(
        name=check.name,
        theme=check.theme,
        expected=check.expected,
        source=check.source,
        outcome=outcome,
        reason=reason,
        seconds=round(time.perf_counter() - began_s, 3),
    )


def wait_until_ready(server: Server) -> None:
    """Returns once the server answers with anything but 503. Raises `NoriaError` if it does not within its time."""
    deadline_s = time.monotonic() + server.timeout_s
    while (response := server.post(COMPLETIONS, max_tokens=1)).status == 503:
        if time.monotonic() > deadline_s:
            raise NoriaError(f"{server.url} is not ready: {response.shown}")
        time.sleep(0.2)


def find_model(server: Server) -> str:
    """The first model that the server lists. Raises `NoriaError` if it lists none, or nothing answers."""
    try:
        response = server.send("GET", "/v1/models")
        return str(response.json["data"][0]["id"])
    except (OSError, http.client.HTTPException) as error:
        raise NoriaError(f"nothing answers at {server.url}: {error}") from error
    except (Unmet, LookupError, TypeError) as error:
        raise NoriaError(f"{server.url}/v1/models names no model ({response.shown}); say it with --model") from error
