"""Messages between a client's process and the engine's: msgspec structs, msgpack on the wire.

One message per step in each direction: what the client wants since its last message (`Commands`), what the engine
did in one turn of its loop (`EngineOutput`). While the engine starts it reports `Progress`, then `Ready` or `Failed`.
"""

from __future__ import annotations

import msgspec

from noria.config import SchedulerConfig
from noria.core.events import FinishReason, RequestEvent
from noria.core.explain import Explanation
from noria.core.record import StepRecord
from noria.core.scheduler import PauseMode
from noria.engine.messages import EngineRequest


class Commands(msgspec.Struct, frozen=True, array_like=True):
    """Client to engine. Submissions are applied before endings, so one message may hold both of a request; what
    concerns the whole engine comes in a message of its own."""

    submit: tuple[EngineRequest, ...] = ()
    finish: tuple[tuple[str, FinishReason], ...] = ()
    shut_down: bool = False
    pause: PauseMode | None = None
    resume: bool = False
    reset_prefix_cache: bool = False
    drain: bool = False
    explain: tuple[str, ...] = ()
    """Sequences that somebody asks about."""
    ticket: int | None = None
    """Asks for an `Answer` of that number, once the message has been applied."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A line for the person who waits for the engine to start."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is up, and works within these limits."""

    config: SchedulerConfig


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not start; the process ends after this."""

    message: str


class Answer(msgspec.Struct, frozen=True):
    """To a message with a ticket: it has been applied."""

    ticket: int
    explanations: tuple[Explanation, ...] = ()
    """Of the sequences asked about that have not ended, in the order of the question."""


class EngineOutput(msgspec.Struct, frozen=True, tag="output"):
    """What one turn of the engine's loop did; with nothing in it, a heartbeat.

    `sent_s` is on the machine's monotonic clock, which both processes share.
    """

    sent_s: float
    accepted: tuple[str, ...] = ()
    """Submissions that are in the queue now. One that is refused has an event instead, its only one."""
    events: tuple[RequestEvent, ...] = ()
    answers: tuple[Answer, ...] = ()
    record: StepRecord | None = None
    """The step's record, if a step was run: what metrics say of the engine is derived from these alone."""


EngineMessage = Progress | Ready | Failed | EngineOutput

encode = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(Commands).decode
decode_engine_message = msgspec.msgpack.Decoder(EngineMessage).decode
