"""The engine in a process of its own: builds an `EngineCore`, then runs its loop between two sockets.

Started by `noria.engine.launch` with the spawn method. The loop never waits for its clients: it takes what
has arrived and answers it, runs a step if there is work, and sends what is new. Without work it sleeps on its sockets,
until the next deadline of a request at most, and sends a heartbeat every `HEARTBEAT_S`. It ends when told to, or when
the process that started it is gone.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import signal
import time

import zmq

from noria.core.events import FinishReason, RequestEvent
from noria.core.record import StepRecord
from noria.engine.core import EngineCore
from noria.engine.launch import BuildEngine
from noria.engine.wire import Answer, Commands, EngineOutput, Failed, Progress, Ready, decode_commands, encode
from noria.errors import NoriaError, RequestError, UnavailableError
from noria.garbage import settle_garbage_collector
from noria.logs import log_to_stderr

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0

RECONNECT_MS = 5
"""How soon to look again for sockets that the client has not bound yet."""

LATE_FRONT_MS = 60_000
"""How long an engine that could not start waits until its reason is taken: the front may still be importing."""

FUTILE_STEP_WAIT_S = 0.001
"""How long to wait after a step in which nobody could run: requests wait for something outside the engine."""


def run_engine_process(build: BuildEngine, address: str, log_level: int) -> None:
    """The whole life of an engine process. `address` is the ipc prefix of its two sockets."""
    # The foreground process group gets Ctrl-C and the terminal's hang-up, and a service manager may signal every
    # process: the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    log_to_stderr(log_level)
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (inbox, outbox):
        socket.set(zmq.RCVHWM, 0)  # nothing is dropped or blocked silently ...
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
    inbox.connect(f"{address}-commands")
    outbox.connect(f"{address}-outputs")
    linger_ms = 1000
    try:
        core = build(lambda text: outbox.send(encode(Progress(text))))
    except NoriaError as error:
        linger_ms = LATE_FRONT_MS
        outbox.send(encode(Failed(str(error))))
    except Exception as error:
        linger_ms = LATE_FRONT_MS
        logger.exception("the engine could not start")
        outbox.send(encode(Failed(f"{type(error).__name__}: {error}")))
    else:
        settle_garbage_collector()
        outbox.send(encode(Ready(core.scheduler.config)))
        _EngineLoop(core, inbox, outbox).run()
    finally:
        context.destroy(linger=linger_ms)  # ... and an orderly end delivers what was sent


class _EngineLoop:
    def __init__(self, core: EngineCore, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
        self._core = core
        self._inbox = inbox
        self._outbox = outbox
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        parent = multiprocessing.parent_process()
        self._parent_fd = parent.sentinel if parent is not None else None
        if self._parent_fd is not None:
            self._poller.register(self._parent_fd, zmq.POLLIN)
        self._accepted: list[str] = []
        self._events: list[RequestEvent] = []  # that came with commands
        self._answers: list[Answer] = []
        self._was_futile = False

    def run(self) -> None:
        while self._take_commands(self._wait_s()):
            if self._accepted or self._events or self._answers:  # before the step: somebody waits for the answer
                self._send(self._events)
                self._accepted, self._events, self._answers = [], [], []
            if self._core.has_work:
                events = self._core.step()
                record = self._core.records[-1]
                self._was_futile = record.plan.is_empty and not events
                self._send(events, record)
            else:
                self._send([])

    def _wait_s(self) -> float:
        if self._core.has_work:
            return FUTILE_STEP_WAIT_S if self._was_futile else 0.0
        to_deadline_s = self._core.seconds_to_deadline()
        return HEARTBEAT_S if to_deadline_s is None else min(HEARTBEAT_S, to_deadline_s)

    def _send(self, events: list[RequestEvent], record: StepRecord | None = None) -> None:
        output = EngineOutput(
            time.monotonic(), tuple(self._accepted), tuple(events), answers=tuple(self._answers), record=record
        )
        self._outbox.send(encode(output))

    def _take_commands(self, wait_s: float) -> bool:
        """Applies everything that has arrived; False when it is time to end."""
        ready = dict(self._poller.poll(math.ceil(wait_s * 1000)))
        if self._parent_fd in ready:
            return False  # nobody is left to answer to
        if self._inbox in ready:
            while True:
                try:
                    commands = decode_commands(self._inbox.recv(zmq.NOBLOCK))
                except zmq.Again:
                    break
                self._apply(commands)
                if commands.shut_down:
                    return False
        return True

    def _apply(self, commands: Commands) -> None:
        for request in commands.submit:
            try:
                self._core.add_request(request)
            except (RequestError, UnavailableError) as error:
                code = error.code if isinstance(error, UnavailableError) else "refused"
                self._events.append(
                    RequestEvent(
                        request.request_id, finish_reason=FinishReason.ERROR, error=str(error), error_code=code
                    )
                )
            else:
                self._accepted.append(request.request_id)
        for request_id, reason in commands.finish:
            self._core.finish_request(request_id, reason)
        if commands.pause is not None:
            self._events += self._core.pause(commands.pause)
        if commands.resume:
            self._core.resume()
        if commands.reset_prefix_cache:
            self._core.reset_prefix_cache()
        if commands.drain:
            self._core.drain()
        if commands.ticket is not None:
            explained = [self._core.explain(request_id) for request_id in commands.explain]
            self._answers.append(Answer(commands.ticket, tuple(e for e in explained if e is not None)))
