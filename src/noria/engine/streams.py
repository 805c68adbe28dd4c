"""Engine events on asyncio: one `EventStream` per call, fed by `AsyncEngine` from a `ProcessClient`.

The front (`noria.server`) opens a stream for the sequences of one call, waits for the engine's word that they are in
(`accepted`), reads bunches of events from it, and closes it when its client goes away or has heard enough. Nothing here
blocks the event loop or waits for a reader: a reader that falls more than its limit behind is told so by
`on_overflow`, and its sequences are aborted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from noria.core.admission import judge
from noria.core.events import FinishReason, RequestEvent
from noria.core.explain import Explanation
from noria.core.scheduler import PauseMode
from noria.engine.messages import EngineRequest
from noria.engine.process_client import ProcessClient
from noria.engine.wire import Answer
from noria.errors import EngineError, NoriaError

logger = logging.getLogger(__name__)


class EventStream:
    """The events of some sequences, for one reader.

    Iterating yields everything new since the last time, as a list; it ends when all sequences have ended. Raises
    `EngineError` if the engine is gone, and what the engine said if it has refused one of the sequences.
    """

    def __init__(
        self, request_ids: Sequence[str], max_pending: int | None = None, on_overflow: Callable[[], None] | None = None
    ) -> None:
        self.unfinished = dict.fromkeys(request_ids)
        self.unanswered = set(request_ids)
        """Sequences of which the engine has not said yet whether it takes them."""
        self._all_answered = asyncio.Event()
        self._max_pending = max_pending
        self._on_overflow = on_overflow
        self._pending: list[RequestEvent] = []
        self._reader: asyncio.Future[None] | None = None  # while it waits for news
        self._error: NoriaError | None = None

    @property
    def num_pending(self) -> int:
        """Events that the reader has not taken yet."""
        return len(self._pending)

    async def accepted(self) -> None:
        """Returns once the engine has taken all sequences; raises what iterating would if it has not."""
        await self._all_answered.wait()
        if self._error is not None:
            raise self._error

    def accept(self, request_id: str) -> None:
        self.unanswered.discard(request_id)
        if not self.unanswered:
            self._all_answered.set()

    def feed(self, event: RequestEvent) -> None:
        self._pending.append(event)
        self._wake_reader()
        if self._max_pending is not None and len(self._pending) > self._max_pending and self._on_overflow is not None:
            on_overflow, self._on_overflow = self._on_overflow, None
            on_overflow()

    def forget_reader(self) -> None:
        """Nobody reads any more. Who has been reading usually knows us: without this, all that is left of a call would
        stay in memory until Python looks for circles, which a server seldom does."""
        self._on_overflow = None

    def end_one(self, request_id: str) -> None:
        """No further event of this sequence will come."""
        self.unfinished.pop(request_id, None)
        if not self.unfinished:
            self._wake_reader()

    def fail(self, error: NoriaError) -> None:
        self._error = error
        self._wake_reader()
        self._all_answered.set()

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> list[RequestEvent]:
        # A future for each wait: readers are woken in every step, and an `asyncio.Event` would do more.
        if not self._pending and self._error is None and self.unfinished:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._error is not None:
            raise self._error
        if not self._pending:
            raise StopAsyncIteration
        events, self._pending = self._pending, []
        return events

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():  # it is done when the reader was cancelled
            self._reader.set_result(None)


class AsyncEngine:
    """Streams over one engine process. Create it inside a running event loop, after `client.wait_ready`."""

    def __init__(self, client: ProcessClient, *, on_death: Callable[[EngineError], None] | None = None) -> None:
        self._client = client
        client.on_accepted = self._note_accepted
        client.on_answer = self._take_answer
        self._asked: dict[int, asyncio.Future[Answer]] = {}  # by ticket
        self._last_pause = 0  # its ticket
        self._resumes: set[int] = set()  # tickets without an answer yet
        self.paused: PauseMode | None = None
        """From when a pause was asked for until the engine says that it goes on, whoever still waits to hear it."""
        self._on_death = on_death
        self._streams: dict[str, EventStream] = {}  # by sequence
        self._flush_is_due = False
        self._is_shut_down = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.error: EngineError | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(client.fileno(), self._take_events)
        self._loop.add_reader(client.process.sentinel, self._engine_died)
        self._take_events()  # the descriptor is edge-triggered: what has come before is not announced again

    @property
    def num_unfinished(self) -> int:
        """Sequences under way."""
        return len(self._streams)

    def silence_s(self) -> float:
        """How long ago the engine's loop last gave a sign of life: the end of a step, or a heartbeat when idle."""
        return time.monotonic() - self._client.last_heard_s

    def judge(self, prompt_token_ids: Sequence[int], max_tokens: int | None) -> None:
        """Raises `RequestError` if such a request can never be served."""
        judge(prompt_token_ids, max_tokens, self._client.config)

    def open(
        self,
        requests: Sequence[EngineRequest],
        *,
        max_pending: int | None = None,
        on_overflow: Callable[[], None] | None = None,
    ) -> EventStream:
        """Submits the sequences of one call, all or none: if the engine refuses one, the stream fails as a whole.

        Raises `RequestError` if one can never be served, and `EngineError` if the engine is gone.
        """
        if self.error is not None:
            raise self.error
        stream = EventStream([request.request_id for request in requests], max_pending, on_overflow)
        try:
            for request in requests:
                self._client.submit(request)
                self._streams[request.request_id] = stream
        except BaseException:
            self.close(stream)
            raise
        self._idle.clear()
        self._flush_soon()
        return stream

    def finish(self, stream: EventStream, request_id: str, reason: FinishReason) -> None:
        """Ends one sequence of a stream, whose events are of no more interest. No error if it has ended by itself."""
        stream.end_one(request_id)
        if self._streams.pop(request_id, None) is not None:
            self._client.finish(request_id, reason)
            self._flush_soon()
            self._note_idle()

    def close(self, stream: EventStream) -> None:
        """Aborts whatever is unfinished of a stream that nobody reads any more."""
        for request_id in list(stream.unfinished):
            self.finish(stream, request_id, FinishReason.ABORT)
        stream.forget_reader()

    def abort(self, request_ids: Iterable[str]) -> int:
        """Ends sequences on somebody else's behalf: their readers get a last event, `ABORT`. Returns how many there
        were; ended and unknown ids are no error."""
        num_ended = 0
        for request_id in request_ids:
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            self.finish(stream, request_id, FinishReason.ABORT)
            stream.feed(RequestEvent(request_id, finish_reason=FinishReason.ABORT))
            stream.accept(request_id)  # whoever waits for the engine's word on it need not wait any longer
            num_ended += 1
        return num_ended

    def unfinished(self, call_id: str | None = None) -> list[str]:
        """The sequences that are under way: all, or those of one call (whose names begin with its id)."""
        return [name for name in self._streams if call_id is None or name.rpartition("-")[0] == call_id]

    async def pause(self, mode: PauseMode) -> None:
        """Returns when the engine has paused; under `WAIT`, when it admits nobody any more."""
        ticket = self._ask(pause=mode)
        self.paused, self._last_pause = mode, ticket
        await self._answer(ticket)

    async def resume(self) -> None:
        ticket = self._ask(resume=True)
        self._resumes.add(ticket)
        await self._answer(ticket)

    async def reset_prefix_cache(self) -> None:
        await self._answer(self._ask(reset_prefix_cache=True))

    async def explain(self, request_ids: Sequence[str]) -> tuple[Explanation, ...]:
        """Where sequences stand and what holds them back; those that have ended are left out."""
        return (await self._answer(self._ask(explain=tuple(request_ids)))).explanations

    def _ask(self, **command: Any) -> int:
        """The ticket for the engine's answer. Raises `EngineError` if there is no engine any more."""
        if self.error is not None:
            raise self.error
        ticket = self._client.ask(**command)
        self._asked[ticket] = self._loop.create_future()
        self._flush_soon()
        return ticket

    async def _answer(self, ticket: int) -> Answer:
        """The engine's answer, which comes between two steps. Raises `EngineError` if the engine dies before."""
        try:
            return await self._asked[ticket]
        finally:
            del self._asked[ticket]

    def _take_answer(self, answer: Answer) -> None:
        if answer.ticket in self._resumes:
            self._resumes.remove(answer.ticket)
            if answer.ticket > self._last_pause:  # the engine does things in the order of tickets
                self.paused = None
        waiting = self._asked.get(answer.ticket)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def wait_idle(self) -> None:
        """Returns when no sequence is unfinished."""
        await self._idle.wait()

    def shut_down(self) -> None:
        """Stops listening; the client is closed by its owner."""
        self._is_shut_down = True
        self._loop.remove_reader(self._client.fileno())
        self._loop.remove_reader(self._client.process.sentinel)

    def _flush_soon(self) -> None:
        """One message for everything that is asked for in this turn of the event loop."""
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self.error is None and not self._is_shut_down:
            self._take_events()

    def _take_events(self) -> None:
        try:
            events = self._client.poll()
        except EngineError as error:
            self._die(error)
            return
        except Exception as error:  # nobody else would hear of it, and every reader would wait for ever
            logger.exception("the engine's messages cannot be read")
            self._die(EngineError(f"the engine's messages cannot be read: {error!r}"))
            return
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            if event.finish_reason is not None:
                del self._streams[event.request_id]
                stream.unfinished.pop(event.request_id, None)
            if event.request_id in stream.unanswered:
                self._refuse(stream, event)
            else:
                stream.feed(event)
        self._note_idle()

    def _note_accepted(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.accept(request_id)

    def _refuse(self, stream: EventStream, refusal: RequestEvent) -> None:
        error = refusal.as_exception()
        assert error is not None
        stream.fail(error)
        self.close(stream)

    def _engine_died(self) -> None:
        while self.error is None:
            self._take_events()  # the last words first; when there are none left, poll raises

    def fail_all(self, error: EngineError) -> None:
        """Ends every stream with `error`, for its reader to pass on."""
        for request_id, stream in list(self._streams.items()):
            stream.fail(error)
            self.finish(stream, request_id, FinishReason.ABORT)

    def _die(self, error: EngineError) -> None:
        self.error = error
        self.shut_down()
        self.fail_all(error)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)
        if self._on_death is not None:
            self._on_death(error)

    def _note_idle(self) -> None:
        if not self._streams:
            self._idle.set()
