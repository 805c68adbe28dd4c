"""The engine's process, started before anything else is imported: `EngineProcess`.

Used by `noria.server.start`, and joined to a client by `noria.engine.process_client`. It needs the standard library
only: the imports of the engine and those of an HTTP server take about equally long, and so run side by side.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from typing import TYPE_CHECKING

from noria.engine.socket_directory import SocketDirectory

if TYPE_CHECKING:
    from noria.engine.core import EngineCore

Report = Callable[[str], None]
BuildEngine = Callable[[Report], "EngineCore"]
"""Makes the engine, reporting progress in lines. Must be picklable: a function of a module, or a partial of one."""


class EngineProcess:
    """Runs `build`, then the engine's loop, in a new process that ends with this one."""

    def __init__(self, build: BuildEngine) -> None:
        self._directory = SocketDirectory()
        self.address = f"ipc://{self._directory.path}/engine"
        """Of its two sockets, `-commands` and `-outputs`, which the client binds."""
        self.process = multiprocessing.get_context("spawn").Process(
            target=_run,
            args=(build, self.address, logging.getLogger("noria").getEffectiveLevel()),
            name="noria-engine",
            daemon=True,
        )
        self.process.start()

    def close(self) -> None:
        """Ends it by force if it runs. Safe to call twice."""
        self.process.kill()
        self.process.join()
        self._directory.close()


def _run(build: BuildEngine, address: str, log_level: int) -> None:
    from noria.engine.process import run_engine_process

    run_engine_process(build, address, log_level)
