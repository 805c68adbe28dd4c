"""`noria serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import os
import sys
from functools import partial

from noria.cli.common import LogLevel, ModelArgument
from noria.config import EngineOptions, ServerOptions
from noria.errors import OptionError
from noria.logs import log_to_stderr


def serve(
    model: ModelArgument = None, *, log_level: LogLevel = "info", server: ServerOptions, engine: EngineOptions
) -> None:
    """Serve a model over OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics."""
    log_to_stderr(log_level)
    if os.environ.get("NORIA_API_KEY") == "":
        # A secret that came out empty must not open the server to everybody.
        raise OptionError("NORIA_API_KEY is set, but empty: give it a key, or unset it to serve without keys")
    from noria.server import start

    sys.exit(start.serve(partial(start.find_served, model, engine), server))
