"""Where Noria's log goes when Noria is the program: stderr. A program that uses the library keeps its own set-up.

Called by the command line and by the engine process, which is a program of its own.
"""

from __future__ import annotations

import logging
import sys


def log_to_stderr(level: str | int) -> None:
    """Sends the log of everything in Noria to stderr, from `level` on (a name in any case, or a number).

    Of the HTTP server below us only warnings are shown; the access log is our own (`noria.server.calls`).
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    levels = {"noria": level.upper() if isinstance(level, str) else level, "uvicorn": logging.WARNING}
    for name, its_level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(its_level)
