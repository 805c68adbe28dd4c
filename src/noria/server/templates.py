"""Chat templates rendered in another process, which is killed when it takes too long: `TemplateProcess`.

All templates of a server run there, the model's own too: its file is untrusted input like a request is, and no look
at a template tells how long it will run. The model's has a process at normal priority that is started with the server
and stays; templates that come with requests (`--trust-request-chat-template`) have one of the lowest priority, so that
they cannot take a core from anybody. Calls block: they are made in threads (`noria.server.text_work`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from noria.errors import RequestError
from noria.server import template_worker
from noria.server.template_worker import OUT_OF_MEMORY, RENDERED, Job, receive_frame, send_frame
from noria.text.chat_template import ChatTemplate

logger = logging.getLogger(__name__)

MEMORY_BYTES = 512 * 2**20
"""Address space of a process. It holds the messages twice, and what the template makes of them."""

MAX_RENDERED_BYTES = 64 * 2**20

WALL_CLOCK_FACTOR = 10
"""A process that gets no processor may take so many times its limit before nobody waits for it any longer."""

_KEPT_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
"""All that a template's process is given: what else is there (keys) is none of its business."""


class TemplateProcess:
    """A process that renders one job at a time, started anew when it had to be killed. Threads may share it."""

    def __init__(self, *, cpu_s: float, param: str, niceness: int = 0) -> None:
        """`cpu_s`: processor time a job may take. `param` is the field that errors about a template name."""
        self._cpu_s = cpu_s
        self._param = param
        self._niceness = niceness
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._is_closed = False
        self.num_killed = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts it if it does not run; returns before it is up."""
        with self._lock:
            self._connect()

    def render(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """The text; `RequestError` if there is none, because the template fails or takes too much."""
        job = Job(
            source, special_tokens, messages, add_generation_prompt, template_kwargs, self._cpu_s, MAX_RENDERED_BYTES
        )
        content = pickle.dumps(tuple(job))
        with self._lock:
            connection = self._connect()
            try:
                send_frame(connection, content)
                reply = receive_frame(connection, MAX_RENDERED_BYTES + 1)
            except (OSError, EOFError, ValueError) as error:
                raise self._kill(timed_out=isinstance(error, TimeoutError)) from error
            if reply[:1] == OUT_OF_MEMORY:
                raise self._kill(timed_out=False, out_of_memory=True)
        text = reply[1:].decode("utf-8", "surrogatepass")
        if reply[:1] != RENDERED:
            raise RequestError(text, param=self._param)
        return text

    def close(self) -> None:
        """Ends it. Safe to call twice, and while another thread waits for a rendering."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()  # who waits for it hears of that, and lets go of the lock
        with self._lock:
            self._end()

    def _connect(self) -> socket.socket:
        if self._connection is not None and self._process is not None and self._process.poll() is None:
            return self._connection
        self._end()
        if self._is_closed:
            raise RequestError("the server is shutting down", param=self._param)
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = map(str, (theirs.fileno(), MEMORY_BYTES, self._niceness))
            self._process = subprocess.Popen(
                [sys.executable, "-m", template_worker.__name__, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ},
            )
        ours.settimeout(self._cpu_s * WALL_CLOCK_FACTOR)
        self._connection = ours
        return ours

    def _kill(self, *, timed_out: bool, out_of_memory: bool = False) -> RequestError:
        """Ends the process after a job that it did not survive, or must not; returns what to say about the job."""
        process = self._process
        assert process is not None
        exit_code = self._end()
        self.num_killed += 1
        if out_of_memory:
            reason = f"needs more than {MEMORY_BYTES // 2**20} MiB of memory"
        elif exit_code == -signal.SIGXCPU:
            reason = f"takes more than {self._cpu_s:g} s of processor time"
        elif timed_out:
            reason = f"is not done after {self._cpu_s * WALL_CLOCK_FACTOR:g} s"
        else:
            reason = f"ended its process (exit code {exit_code})"
        logger.warning("a chat template %s; its process %d was killed", reason, process.pid)
        return RequestError(f"the chat template {reason} with these messages, and was stopped", param=self._param)

    def _end(self) -> int | None:
        """The exit code of a process that may have ended by itself."""
        if self._connection is not None:
            self._connection.close()
        process, self._process, self._connection = self._process, None, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)  # if it is ending, it has its own reason
        process.kill()
        return process.wait()


class ProcessTemplate(ChatTemplate):
    """A `ChatTemplate` whose `render` happens in a `TemplateProcess`; it blocks meanwhile."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], process: TemplateProcess) -> None:
        super().__init__(source, special_tokens=special_tokens)
        self._process = process

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        return self._process.render(
            self.source,
            self.special_tokens,
            messages,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=dict(template_kwargs or {}),
        )
