"""A real server over an engine without a model: real HTTP, real processes, scripted tokens.

For tests, for measuring what the front itself costs, and for trying clients:

    python -m noria.server.scripted '{"server": {"port": 8000}, "engine": {"step_s": 0.02}}'

`server` are fields of `ServerOptions`, `engine` are arguments of `noria.fakes.engine.build_scripted_engine`.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

from noria.config import ServerOptions
from noria.fakes.engine import build_scripted_engine
from noria.fakes.tokenizer import ByteTokenizer
from noria.logs import log_to_stderr
from noria.server.start import Served, serve


def open_scripted(engine: dict[str, Any]) -> Served:
    return Served("scripted", partial(build_scripted_engine, **engine), ByteTokenizer)


def main(arguments: str) -> int:
    try:
        settings = json.loads(arguments)
    except ValueError:
        sys.stderr.write(f"the argument is one JSON object, not {arguments!r}; {__doc__}")
        return 2
    engine = settings.get("engine", {})
    if "text" in engine:
        engine["text"] = engine["text"].encode()
    log_to_stderr("info")
    return serve(partial(open_scripted, engine), ServerOptions(**settings.get("server", {})))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "{}"))
