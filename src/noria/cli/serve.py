"""`noria serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import sys
from functools import partial

from noria.cli.common import LogLevel, ModelArgument
from noria.config import EngineOptions, ServerOptions
from noria.logs import log_to_stderr


def serve(
    model: ModelArgument = None, *, log_level: LogLevel = "info", server: ServerOptions, engine: EngineOptions
) -> None:
    """Serve a model over OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics."""
    log_to_stderr(log_level)
    from noria.server import start

    sys.exit(start.serve(partial(start.find_served, model, engine), server))
