"""`noria conformance`: does a server keep to OpenAI's API?"""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter


def conformance(
    url: Annotated[str, Parameter(help="Where the server is: http://127.0.0.1:8000.", metavar="URL")],
    *,
    model: Annotated[
        str | None, Parameter(help="The model's name there. Default: the first it lists.", metavar="NAME")
    ] = None,
    api_key: Annotated[
        str | None, Parameter(help="The key that it wants.", env_var="NORIA_API_KEY", metavar="KEY")
    ] = None,
    json: Annotated[bool, Parameter(help="Print one JSON object.", negative=(), show_default=False)] = False,
    only: Annotated[
        tuple[str, ...],
        Parameter(
            help="Names of checks or themes; repeatable, * stands for any text. Default: all.",
            negative=(),
            metavar="NAME...",
        ),
    ] = (),
    timeout_s: Annotated[float, Parameter(help="How long to wait for each answer.", metavar="SECONDS")] = 60.0,
) -> None:
    """Check a running server (any OpenAI-compatible one) from outside. Exit code 1 if a check fails."""
    from dataclasses import replace

    import msgspec

    from noria.conformance.catalogue import choose
    from noria.conformance.client import Server
    from noria.conformance.contract import Outcome
    from noria.conformance.report import as_json, as_lines, summary
    from noria.conformance.run import Result, find_model, run_checks, wait_until_ready

    checks = choose(only)
    server = Server.at(url, api_key=api_key, timeout_s=timeout_s)
    server = replace(server, model=model or find_model(server))
    wait_until_ready(server)
    width = max(len(check.name) for check in checks)
    themes: set[str] = set()

    def show(result: Result) -> None:
        if result.theme not in themes:
            themes.add(result.theme)
            print(result.theme)
        print(as_lines(result, width), flush=True)

    results = run_checks(server, checks, (lambda result: None) if json else show)
    print(msgspec.json.encode(as_json(server, results)).decode() if json else summary(results), flush=True)
    if any(result.outcome is Outcome.FAIL for result in results):
        sys.exit(1)
