"""What the subcommands share: the model argument, the log, and reading prompts."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Literal, TypeAlias

from cyclopts import Parameter

ModelArgument: TypeAlias = Annotated[
    str | None,
    Parameter(
        help="A GGUF file, a Hugging Face directory, or a hub id such as org/name. Default: a small one, fetched once."
    ),
]
LogLevel: TypeAlias = Annotated[
    Literal["debug", "info", "warning", "error"],
    Parameter(help="How much the log on stderr says.", env_var="NORIA_LOG_LEVEL"),
]


def log_to_stderr(level: str) -> None:
    """Sends Noria's log to stderr. Only the command does this; a program that uses the library keeps its own set-up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("noria")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
