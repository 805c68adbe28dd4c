"""`noria bench compare`: two commands in turn."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from noria.cli.common import Label, LogLevel
from noria.logs import log_to_stderr


def compare(
    *,
    ours: Annotated[
        str, Parameter(help="A shell command whose last line of output is one JSON object.", metavar="COMMAND")
    ],
    peer: Annotated[str, Parameter(help="Another, with the same fields.", metavar="COMMAND")],
    runs: Annotated[int, Parameter(help="Pairs: ours, the peer, ours, the peer, ...")] = 5,
    field: Annotated[
        tuple[str, ...],
        Parameter(
            help="What to compare; repeatable. Default: all numbers that both have.", negative=(), metavar="NAME..."
        ),
    ] = (),
    label: Label = "noria",
    log_level: LogLevel = "info",
) -> None:
    """Run two commands in turn and compare their figures: medians, spreads, ratios by pair. Prints one JSON line."""
    import msgspec

    from noria.bench.compare import compare_commands

    log_to_stderr(log_level)
    result = {"label": label} | compare_commands(ours, peer, num_pairs=runs, fields=field)
    print(msgspec.json.encode(result).decode(), flush=True)
