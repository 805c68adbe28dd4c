"""What the subcommands share: the model argument, the log, and how a benchmark's result is printed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec
from cyclopts import Parameter

if TYPE_CHECKING:
    from noria.bench.machine import MachineWatch

ModelArgument: TypeAlias = Annotated[
    str | None,
    Parameter(
        help="A GGUF file, a Hugging Face directory, or a hub id such as org/name. Default: a small one, fetched once.",
        alias="-m",
    ),
]
LogLevel: TypeAlias = Annotated[
    Literal["debug", "info", "warning", "error"],
    Parameter(help="How much the log on stderr says.", env_var="NORIA_LOG_LEVEL"),
]
Label: TypeAlias = Annotated[str, Parameter(help="A name for the result.", metavar="NAME")]


def print_result(result: Mapping[str, object], machine: MachineWatch) -> None:
    """One JSON line: the result, and the machine's state before and after (now)."""
    print(msgspec.json.encode({**result, "machine": machine.report()}).decode(), flush=True)
