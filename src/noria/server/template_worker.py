"""The process that renders chat templates: `python -m noria.server.template_worker FD MEMORY_BYTES NICENESS`.

Started, fed and killed by `noria.server.templates`. A template is foreign code, and jinja2's sandbox bounds what it can
reach but not its work, so it runs here: with a limit on its memory, at the priority it is given, and with a limit on
the processor time of each job, which the kernel sees to even when nobody is left to look. Jobs and replies are frames
on a socket: the length in 4 bytes, then the content. Only text goes back, and none of it is ever taken for code.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from noria.errors import RequestError
from noria.text.chat_template import ChatTemplate

RENDERED, REFUSED, OUT_OF_MEMORY = b"R", b"E", b"M"
"""What the first byte of a reply says of the text behind it."""

LOWEST_PRIORITY = 19

_LENGTH = struct.Struct("!I")


class Job(NamedTuple):
    """One rendering; see `ChatTemplate.render`. `cpu_s` is the processor time it may take, in whole seconds upwards."""

    source: str
    special_tokens: Mapping[str, str]
    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool
    template_kwargs: Mapping[str, Any]
    cpu_s: float
    max_bytes: int
    """A longer text is refused."""


def send_frame(connection: socket.socket, content: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(content)))
    connection.sendall(content)


def receive_frame(connection: socket.socket, max_bytes: int | None = None) -> bytes:
    """Raises `EOFError` at the end, and `ValueError` for a frame of more than `max_bytes`."""
    [length] = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if max_bytes is not None and length > max_bytes:
        raise ValueError(f"a frame of {length} bytes")
    return _receive(connection, length)


def _receive(connection: socket.socket, length: int) -> bytes:
    content = bytearray(length)
    view = memoryview(content)
    while view:
        num_bytes = connection.recv_into(view)
        if not num_bytes:
            raise EOFError
        view = view[num_bytes:]
    return bytes(content)


def render(job: Job) -> bytes:
    """The reply to a job."""
    try:
        text = _template(job.source, tuple(job.special_tokens.items())).render(
            job.messages, add_generation_prompt=job.add_generation_prompt, template_kwargs=job.template_kwargs
        )
        content = text.encode("utf-8", "surrogatepass")
    except RequestError as error:
        kind = OUT_OF_MEMORY if isinstance(error.__cause__, MemoryError) else REFUSED
        return kind + str(error).encode("utf-8", "replace")[: job.max_bytes]
    except MemoryError:
        return OUT_OF_MEMORY
    if len(content) > job.max_bytes:
        return REFUSED + f"the chat template makes a text of {len(content)} bytes of these messages".encode()
    return RENDERED + content


@lru_cache(maxsize=4)
def _template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=dict(special_tokens))


def _lower_priority(niceness: int) -> None:
    """The lowest there is for `LOWEST_PRIORITY`: where the system knows idle priority, only time that nobody wants.

    A merely nice process still gets its share, and threads that wait for each other, as the engine's do, all wait
    until one of them has its core back.
    """
    os.nice(niceness)
    if niceness == LOWEST_PRIORITY and sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    fd, memory_bytes, niceness = map(int, sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # may go to the whole group; the front decides
        signal.signal(number, signal.SIG_IGN)
    _lower_priority(niceness)  # before anything that takes time: starting must not hold up others either
    import noria.text.chat_environment  # noqa: F401 (not in the first job)

    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=fd) as connection, contextlib.suppress(EOFError, ConnectionError):
        while True:
            job = Job(*pickle.loads(receive_frame(connection)))
            cpu_s = int(time.process_time() + job.cpu_s) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))  # then SIGXCPU ends it
            send_frame(connection, render(job))


if __name__ == "__main__":
    main()
