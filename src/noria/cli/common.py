"""What the subcommands share: the model argument, the log, and reading prompts."""

from __future__ import annotations

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
