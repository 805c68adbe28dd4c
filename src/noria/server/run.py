"""`noria serve` from its event loop on: wait for the engine, serve, drain. `noria.server.start` is what comes before.

The port answers (503, loading) before the model is loaded. The first SIGTERM or SIGINT stops new requests at once and
lets running ones finish within the limit; the second ends everything now. If the engine dies, every waiting client is
told, and the process ends with a non-zero code, for a supervisor to start it anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import uvicorn

from noria.config import ServerOptions
from noria.engine.launch import EngineProcess
from noria.engine.process_client import ProcessClient
from noria.engine.streams import AsyncEngine
from noria.errors import EngineError, NoriaError
from noria.garbage import settle_garbage_collector
from noria.observe.stats import EngineStats
from noria.server.app import create_app
from noria.server.connections import Connected, protocol_class
from noria.server.keys import Keys
from noria.server.start import EXIT_FAILED, EXIT_FORCED, EXIT_OK, Served
from noria.server.state import Phase, ServerState

logger = logging.getLogger(__name__)

T = TypeVar("T")


def run_server(
    started: Future[tuple[Served, EngineProcess]],
    options: ServerOptions,
    keys: Keys,
    listener: socket.socket,
    began_s: float,
) -> int:
    """Serves what `started` comes to hold, on a bound socket, until told to stop; returns the exit code.

    `began_s`: when starting began, on the monotonic clock.
    """
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        return runner.run(_Server(started, options, keys, listener, began_s).run())


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # not on every system, and only faster
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _say(line: str) -> None:
    """To the person at the terminal, whatever the log level."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


async def _in_thread(call: Callable[[], T]) -> T:
    """Runs a call in a daemon thread, which nobody waits for when we must go (an event loop's own threads are)."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        if not done.cancelled():
            outcome()

    def run() -> None:
        try:
            outcome = partial(done.set_result, call())
        except Exception as error:
            outcome = partial(done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, daemon=True).start()
    return await done


class _UvicornServer(uvicorn.Server):
    """Leaves signals to us: draining needs the listener open and the loop running."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    def __init__(
        self,
        started: Future[tuple[Served, EngineProcess]],
        options: ServerOptions,
        keys: Keys,
        listener: socket.socket,
        began_s: float,
    ) -> None:
        self._started = started
        self._began_s = began_s
        self._options = options
        self._listener = listener
        self._state = ServerState(options, keys)
        self._client: ProcessClient | None = None
        self._exit_code = EXIT_OK
        self._num_signals = 0
        self._is_stopping = False
        self._draining: asyncio.Task[None] | None = None
        self._uvicorn = _UvicornServer(
            uvicorn.Config(
                Connected(create_app(self._state)),
                http=protocol_class(options.request_read_timeout_s),
                log_config=None,
                access_log=False,  # `noria.server.calls` has ours
                lifespan="off",
                ws="none",
                root_path=options.root_path,
                ssl_keyfile=options.ssl_keyfile,
                ssl_certfile=options.ssl_certfile,
                timeout_graceful_shutdown=5,
                backlog=2048,
            )
        )

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        # The terminal is gone, or somebody has new keys for us: no reason to go.
        loop.add_signal_handler(signal.SIGHUP, self._state.keys.reload)
        starting = asyncio.create_task(self._start())
        logger.info("listening on %s (503 until the model is loaded)", self._url_at(self._bound_host))
        if not self._state.keys.are_needed and self._options.host not in ("127.0.0.1", "::1", "localhost"):
            logger.warning("there are no API keys: whoever can reach this address can use the server")
        try:
            await self._uvicorn.serve(sockets=[self._listener])
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
        finally:
            if self._state.engine is not None and self._state.engine.error is None:
                self._state.engine.shut_down()
            if self._client is not None:
                self._client.close()
            self._state.text_work.close()
        return self._exit_code

    async def _start(self) -> None:
        try:
            served, process = await asyncio.wrap_future(self._started)
            self._state.names = self._options.served_model_name or (served.name,)
            self._client = ProcessClient(process)
            logger.info("engine process %d is loading %s", self._client.process.pid, served.name)
            tokenizer, config = await asyncio.gather(
                _in_thread(served.load_tokenizer),
                _in_thread(partial(self._client.wait_ready, logger.info)),
            )
            self._state.tokenizer = tokenizer
            self._state.sampling_defaults = await _in_thread(served.load_sampling_defaults)
            await _in_thread(partial(self._state.text_work.take_template, tokenizer))
            self._state.config, self._state.stats = config, EngineStats(config.num_blocks)
            self._state.engine_pid = self._client.process.pid
            self._client.on_record = self._state.stats.add
            self._state.engine = AsyncEngine(self._client, on_death=self._on_engine_death)
            settle_garbage_collector()
        except NoriaError as error:
            if not self._num_signals:  # otherwise it ends because we were told to end
                self._fail(str(error))
        except Exception as error:
            logger.exception("the server could not start")
            self._fail(f"{type(error).__name__}: {error}")
        else:
            if self._state.phase is Phase.LOADING:
                self._state.phase = Phase.READY
                self._announce(time.monotonic() - self._began_s)

    @property
    def _bound_host(self) -> str:
        host: str = self._listener.getsockname()[0]
        return host

    def _url_at(self, host: str) -> str:
        port = self._listener.getsockname()[1]
        scheme = "http" if self._options.ssl_certfile is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def _announce(self, took_s: float) -> None:
        # Every address is none that a client can ask, not everywhere.
        url = self._url_at("127.0.0.1" if self._bound_host in ("0.0.0.0", "::") else self._bound_host)
        name = "$NORIA_API_KEY" if os.environ.get("NORIA_API_KEY") else "YOUR_KEY"
        key = f' -H "Authorization: Bearer {name}"' if self._state.keys.are_needed else ""
        body: dict[str, Any] = {"temperature": 0}
        assert self._state.tokenizer is not None
        if self._state.tokenizer.chat_template is None:
            logger.warning("the model has no chat template: /v1/completions works, /v1/chat/completions needs one")
            route, body = "completions", {"prompt": "The capital of France is", "max_tokens": 16} | body
        else:
            messages = [{"role": "user", "content": "What is the capital of France?"}]
            route, body = "chat/completions", {"messages": messages} | body
        _say(
            f"Noria serves {self._state.names[0]} at {url} after {took_s:.1f} s. Try: "
            f"curl {url}/v1/{route} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
        )

    def _fail(self, message: str) -> None:
        _say(f"noria: {message}")
        self._state.phase = Phase.FAILED
        self._exit_code = EXIT_FAILED
        self._uvicorn.should_exit = True

    def _on_engine_death(self, error: EngineError) -> None:
        if self._state.phase is not Phase.FAILED and not self._is_stopping:
            self._fail(str(error))  # open requests are being told so; uvicorn waits for their answers

    def _on_signal(self) -> None:
        self._num_signals += 1
        if self._num_signals > 1 or self._state.phase in (Phase.LOADING, Phase.FAILED):
            self._stop_now()
        else:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        engine = self._state.engine
        assert engine is not None
        self._state.phase = Phase.DRAINING
        assert self._client is not None
        self._client.drain()
        logger.info(
            "draining: %d sequences under way, at most %.0f s; a second signal ends at once",
            engine.num_unfinished,
            self._options.drain_s,
        )
        try:
            await asyncio.wait_for(engine.wait_idle(), self._options.drain_s)
        except TimeoutError:
            logger.warning("%d sequences did not finish in time and are cut", engine.num_unfinished)
            engine.fail_all(EngineError("the server shut down before the answer was complete"))
        self._uvicorn.should_exit = True

    def _stop_now(self) -> None:
        logger.warning("stopping now")
        self._exit_code = EXIT_FORCED if self._num_signals > 1 else EXIT_OK
        self._uvicorn.should_exit = True
        self._uvicorn.force_exit = True
        self._is_stopping = True  # what the engine's death tells from here on is no news
        if self._state.engine is not None:
            self._state.engine.fail_all(EngineError("the server was stopped before the answer was complete"))
        if self._client is not None:
            self._client.process.kill()
