"""Where Noria's log goes when Noria is the program: stderr. A program that uses the library keeps its own set-up.

`log_to_stderr` is called by the command line and by the engine process, which is a program of its own;
`loading_shown` by the library, for scripts that have not set up any logging and would wait without a word.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LOADING = "noria.loading"
"""The logger that is told how loading a model goes."""

PATIENCE_S = 1.0
"""Nobody wonders about what takes less."""


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


@contextmanager
def loading_shown() -> Iterator[None]:
    """Meanwhile, what the logger `LOADING` is told appears on stderr, unless it is over within `PATIENCE_S`.

    Only if nobody has decided otherwise: by handlers or levels of that logger or those above it, or by NORIA_LOG_LEVEL.
    """
    logger = logging.getLogger(LOADING)
    levels = logger.level, logging.getLogger("noria").level, logging.getLogger().level
    is_default = levels == (logging.NOTSET, logging.NOTSET, logging.WARNING) and not logger.hasHandlers()
    if not is_default or os.environ.get("NORIA_LOG_LEVEL", "info").lower() not in ("info", "debug"):
        yield
        return
    handler = _PatientHandler()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)
        handler.close()


class _PatientHandler(logging.Handler):
    """Keeps lines back until `PATIENCE_S` have passed, and never shows them if it is closed before."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("noria: %(message)s"))
        self._kept: list[str] | None = []
        self._timer = threading.Timer(PATIENCE_S, self._show)
        self._timer.daemon = True
        self._timer.start()

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record) + "\n"
        if self._kept is None:
            sys.stderr.write(line)
        else:
            self._kept.append(line)

    def _show(self) -> None:
        self.acquire()  # as whoever calls `emit` has
        try:
            sys.stderr.write("".join(self._kept or ()))
            sys.stderr.flush()
            self._kept = None
        finally:
            self.release()

    def close(self) -> None:
        self._timer.cancel()
        super().close()
