"""`noria serve` from the first line until the server runs: bind, find the model, start the engine's process.

Only then are HTTP, text and the rest imported (`noria.server.run`): the engine imports and loads meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from noria.config import EngineOptions, ServerOptions
from noria.engine.launch import BuildEngine, EngineProcess, Report
from noria.errors import OptionError
from noria.file_limit import raise_file_limit
from noria.files.locate import locate_model
from noria.server.hiding import hide_arguments
from noria.server.keys import Keys

if TYPE_CHECKING:
    from noria.engine.core import EngineCore
    from noria.files.model import ModelFiles
    from noria.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_FORCED = 0, 1, 130

SEND_BUFFER_BYTES = 128 * 1024
"""What the kernel may hold for one client; beyond it a slow reader is noticed and does not cost memory."""


@dataclass(frozen=True, slots=True)
class Served:
    """What is to be served: how to build the engine, and what the front needs of the model."""

    name: str
    build: BuildEngine
    load_tokenizer: Callable[[], Tokenizer]
    load_sampling_defaults: Callable[[], Mapping[str, Any]] = dict
    """What requests get that do not say otherwise, by the names of `SamplingParams`."""


def find_served(model: str | None, engine: EngineOptions) -> Served:
    """The model to serve, fetched if it must be. Raises `ModelError`."""
    location = locate_model(model, report=logger.info)
    front = _FrontFiles(location.path, engine.generation_config)
    return Served(
        location.name,
        partial(_build_core, str(location.path), engine),
        front.load_tokenizer,
        front.load_sampling_defaults,
    )


def serve(find: Callable[[], Served], options: ServerOptions) -> int:
    """Serves until told to stop; returns the exit code. Raises `OptionError` if the address cannot be bound, or keys
    or certificates cannot be used."""
    began_s = time.monotonic()
    hide_arguments((*options.api_key, options.admin_api_key or ""))
    raise_file_limit()
    keys = Keys(options)
    if options.ssl_certfile is not None:
        _check_certificate(options.ssl_certfile, options.ssl_keyfile)
    signal.signal(signal.SIGTERM, _leave)  # until the server takes over
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the engine's process inherits this
    listener = _bind(options.host, options.port)
    with contextlib.closing(listener), contextlib.closing(Launch(find)) as launch:
        from noria.server.run import run_server

        return run_server(launch.started, options, keys, listener, began_s)


class Launch:
    """Finds the model and starts the engine's process, in a thread; `started` has both, or what was raised."""

    def __init__(self, find: Callable[[], Served]) -> None:
        self.started: Future[tuple[Served, EngineProcess]] = Future()
        self.started.set_running_or_notify_cancel()  # who waits for it may give up waiting, but cannot cancel it
        self._lock = threading.Lock()
        self._process: EngineProcess | None = None
        self._is_closed = False
        # A daemon, since nobody waits for a download when we must go.
        threading.Thread(target=self._run, args=(find,), daemon=True).start()

    def close(self) -> None:
        """Ends the process if it still runs, and starts none any more."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.close()

    def _run(self, find: Callable[[], Served]) -> None:
        try:
            served = find()
            with self._lock:
                if self._is_closed:
                    return
                self._process = EngineProcess(served.build)
            self.started.set_result((served, self._process))
        except Exception as error:
            self.started.set_exception(error)


def _build_core(path: str, options: EngineOptions, report: Report) -> EngineCore:
    """What the engine's process runs; this one does not import it."""
    from noria.assembly import build_core

    return build_core(path, options, report)


class _FrontFiles:
    """What the front reads of the model's files, opened once."""

    def __init__(self, path: Path, generation_config: str) -> None:
        self._path = path
        self._generation_config = generation_config

    @cached_property
    def _model(self) -> ModelFiles:
        from noria.files.sources import open_model

        return open_model(self._path)

    def load_tokenizer(self) -> Tokenizer:
        from noria.text.library import share_interpreter
        from noria.text.tokenizer import load_tokenizer

        share_interpreter()
        return load_tokenizer(self._model.tokenizer)

    def load_sampling_defaults(self) -> Mapping[str, Any]:
        from noria.files.generation import describe_defaults, sampling_defaults

        defaults = sampling_defaults(self._model, self._generation_config)
        logger.info("%s", describe_defaults(self._model, defaults))
        return defaults


def _check_certificate(certfile: str, keyfile: str | None) -> None:
    import ssl  # only where it is needed: it takes a while

    def no_password() -> NoReturn:
        raise OptionError(f"ssl_keyfile {keyfile} is encrypted; a server cannot ask for the password")

    for name, path in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile)):
        try:
            Path(path or "").read_bytes()
        except OSError as error:
            raise OptionError(f"{name} {path}: {error.strerror or error}") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, no_password)
    except OSError as error:  # an ssl.SSLError is one
        raise OptionError(
            f"ssl_certfile {certfile} and ssl_keyfile {keyfile} are not a certificate and its private key, both in "
            f"PEM form ({error})"
        ) from error


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(EXIT_OK)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # accepted sockets inherit it
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise OptionError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port"
        ) from error
    return listener
