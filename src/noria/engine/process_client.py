"""A client whose engine runs in another process: `ProcessClient`, the twin of `InProcessClient`.

It refuses at once what the engine could never serve, sends one message for all that was asked for since the last one,
and hands out events as they come; what the engine itself refuses has one event, the error. The process has been started
by `noria.engine.launch`. No thread and no event loop of its own: callers either `poll`, or watch `fileno`
(`noria.engine.streams` does). Not thread-safe.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import zmq

from noria.config import SchedulerConfig
from noria.core.admission import check_sampling, judge
from noria.core.events import FinishReason, RequestEvent
from noria.core.record import StepRecord
from noria.core.scheduler import PauseMode
from noria.engine.launch import EngineProcess, Report
from noria.engine.messages import EngineRequest
from noria.engine.wire import Answer, Commands, EngineOutput, Failed, Progress, Ready, decode_engine_message, encode
from noria.errors import EngineError

LAST_WORDS_MS = 1000


class ProcessClient:
    """Talks to an engine's process, which is its own from here on; call `wait_ready` before anything else."""

    def __init__(self, engine: EngineProcess, *, on_record: Callable[[StepRecord], None] | None = None) -> None:
        self.on_record = on_record
        """Called with the record of every step, in order."""
        self.on_accepted: Callable[[str], None] = lambda request_id: None
        """Called with the id of every submission that the engine has taken, before any event of it."""
        self.on_answer: Callable[[Answer], None] = lambda answer: None
        """Called with the answer to each `ask`."""
        self._num_asked = 0
        self._submit: list[EngineRequest] = []
        self._finish: list[tuple[str, FinishReason]] = []
        self._unfinished: dict[str, None] = {}
        self._config: SchedulerConfig | None = None
        self.last_heard_s = time.monotonic()
        """When the engine's loop last sent something, on the monotonic clock: at the end of a step, or idle."""
        self._engine = engine
        self.process = engine.process
        self._context = zmq.Context()
        self._commands = self._bind(zmq.PUSH, f"{engine.address}-commands")
        self._outputs = self._bind(zmq.PULL, f"{engine.address}-outputs")

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.LINGER, 0)
        socket.bind(address)
        return socket

    def wait_ready(self, report: Report = lambda text: None) -> SchedulerConfig:
        """Blocks until the engine is up, passing its progress lines on. Raises `EngineError` if it fails to start."""
        poller = zmq.Poller()
        poller.register(self._outputs, zmq.POLLIN)
        poller.register(self.process.sentinel, zmq.POLLIN)
        while True:
            # The last message may arrive a little after its sender has ended.
            if self._outputs not in dict(poller.poll()) and not self._outputs.poll(LAST_WORDS_MS):
                raise EngineError(f"the engine process ended while starting (exit code {self._exit_code()})")
            match decode_engine_message(self._outputs.recv()):
                case Progress(text):
                    report(text)
                case Failed(message):
                    raise EngineError(message)
                case Ready(config):
                    self._config = config
                    self.last_heard_s = time.monotonic()
                    return config
                case EngineOutput():
                    raise AssertionError("output before the engine was ready")

    @property
    def config(self) -> SchedulerConfig:
        """The limits the engine works within."""
        assert self._config is not None, "wait_ready comes first"
        return self._config

    @property
    def has_work(self) -> bool:
        return bool(self._unfinished)

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()

    def _exit_code(self) -> int | None:
        """Of a process that is ending or has ended; waits for the operating system to say so."""
        self.process.join(timeout=1.0)
        return self.process.exitcode

    def fileno(self) -> int:
        """Becomes readable when `poll` has something new. Edge-triggered: poll after each event, and once at first."""
        return int(self._outputs.get(zmq.FD))

    def submit(self, request: EngineRequest) -> None:
        max_tokens = judge(request.prompt_token_ids, request.sampling.max_tokens, self.config)
        check_sampling(request.sampling, max_tokens, self.config)
        self._unfinished[request.request_id] = None
        self._submit.append(request)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        if request_id in self._unfinished:
            del self._unfinished[request_id]
            self._finish.append((request_id, reason))

    def flush(self) -> None:
        """Sends what was asked for since the last time, as one message."""
        if self._submit or self._finish:
            self._send(Commands(tuple(self._submit), tuple(self._finish)))
            self._submit.clear()
            self._finish.clear()

    def pause(self, mode: PauseMode) -> None:
        self._command(pause=mode)

    def resume(self) -> None:
        self._command(resume=True)

    def reset_prefix_cache(self) -> None:
        self._command(reset_prefix_cache=True)

    def drain(self) -> None:
        self._command(drain=True)

    def ask(self, **command: Any) -> int:
        """Sends a command (fields of `Commands`) that wants an answer; returns its ticket. See `on_answer`."""
        self._num_asked += 1
        self._command(ticket=self._num_asked, **command)
        return self._num_asked

    def _command(self, **command: Any) -> None:
        """In a message of its own, behind what was asked for before: so the order is kept."""
        self.flush()
        self._send(Commands(**command))

    def _send(self, commands: Commands) -> None:
        # Without a high-water mark this can only fail when nobody is at the other end; `poll` reports that.
        with contextlib.suppress(zmq.Again):
            self._commands.send(encode(commands), zmq.NOBLOCK)

    def poll(self) -> list[RequestEvent]:
        """Sends what is pending; returns what has arrived, without waiting. Raises `EngineError` if the engine died."""
        self.flush()
        events: list[RequestEvent] = []
        answers: list[Answer] = []
        while True:
            try:
                message = decode_engine_message(self._outputs.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            assert isinstance(message, EngineOutput)
            self.last_heard_s = max(self.last_heard_s, message.sent_s)
            if message.record is not None and self.on_record is not None:
                self.on_record(message.record)
            for request_id in message.accepted:
                self.on_accepted(request_id)
            answers += message.answers
            events += [event for event in message.events if event.request_id in self._unfinished]
            for event in message.events:
                if event.finish_reason is not None:
                    self._unfinished.pop(event.request_id, None)
        for answer in answers:
            self.on_answer(answer)
        if not events and not answers and not self.is_alive:
            raise EngineError(f"the engine process ended (exit code {self._exit_code()})")
        return events

    def wait(self, timeout_s: float) -> None:
        """Sleeps until there may be something to `poll`, the engine has ended, or the time is over."""
        self.flush()
        poller = zmq.Poller()
        poller.register(self._outputs, zmq.POLLIN)
        poller.register(self.process.sentinel, zmq.POLLIN)
        poller.poll(int(timeout_s * 1000))

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the engine process, by force if it does not go by itself. Safe to call twice."""
        if self._outputs.closed:
            return
        if self.process.is_alive():
            self._send(Commands(shut_down=True))
            if not wait([self.process.sentinel], timeout_s):
                self.process.kill()
        self._context.destroy(linger=0)
        self._engine.close()
