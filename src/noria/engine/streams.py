"""Engine events on asyncio: one `TokenStream` per sequence, fed by `AsyncEngine` from a `ProcessClient`.

The front (`noria.server`) opens a stream, reads bunches of events from it, and closes it when its client goes away
or has heard enough. Nothing here blocks the event loop or waits for a reader: a stream that nobody reads from only
grows, by a bounded number of small events, and its reader notices how far it has fallen behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from noria.core.events import FinishReason, RequestEvent
from noria.engine.messages import EngineRequest
from noria.engine.process_client import ProcessClient
from noria.errors import EngineError


class TokenStream:
    """The events of one sequence, for one reader. Iterating yields everything new since the last time, as a list;
    it ends after the event with a `finish_reason`, and raises `EngineError` if the engine is gone."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._pending: list[RequestEvent] = []
        self._news = asyncio.Event()
        self._error: EngineError | None = None
        self._ended = False

    @property
    def num_pending(self) -> int:
        """Events that the reader has not taken yet."""
        return len(self._pending)

    def feed(self, event: RequestEvent) -> None:
        self._pending.append(event)
        self._news.set()

    def fail(self, error: EngineError) -> None:
        self._error = error
        self._news.set()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> list[RequestEvent]:
        if self._ended:
            raise StopAsyncIteration
        await self._news.wait()
        if self._error is not None:
            raise self._error
        self._news.clear()
        events, self._pending = self._pending, []
        self._ended = events[-1].finish_reason is not None
        return events


class AsyncEngine:
    """Streams over one engine process. Create it inside a running event loop, after `client.wait_ready`."""

    def __init__(self, client: ProcessClient, *, on_death: Callable[[EngineError], None] | None = None) -> None:
        self._client = client
        self._on_death = on_death
        self._streams: dict[str, TokenStream] = {}
        self._flush_is_due = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.error: EngineError | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(client.fileno(), self._take_events)
        self._loop.add_reader(client.process.sentinel, self._engine_died)
        self._take_events()  # the descriptor is edge-triggered: what has come before is not announced again

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    def silence_s(self) -> float:
        """How long ago the engine's loop last gave a sign of life: a step, or a heartbeat when idle."""
        return time.monotonic() - self._client.last_heard_s

    def open(self, request: EngineRequest) -> TokenStream:
        """Submits a sequence. Raises `RequestError` if it can never be served, `EngineError` if the engine is gone."""
        if self.error is not None:
            raise self.error
        self._client.submit(request)
        stream = self._streams[request.request_id] = TokenStream(request.request_id)
        self._idle.clear()
        self._flush_soon()
        return stream

    def close(self, stream: TokenStream, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a sequence that nobody reads any more. No error if it has ended by itself."""
        if self._streams.pop(stream.request_id, None) is not None:
            self._client.finish(stream.request_id, reason)
            self._flush_soon()
            self._note_idle()

    async def wait_idle(self) -> None:
        """Returns when no sequence is unfinished."""
        await self._idle.wait()

    def shut_down(self) -> None:
        """Stops listening; the client is closed by its owner."""
        self._loop.remove_reader(self._client.fileno())
        self._loop.remove_reader(self._client.process.sentinel)

    def _flush_soon(self) -> None:
        """One message for everything that is asked for in this turn of the event loop."""
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self.error is None:
            self._take_events()

    def _take_events(self) -> None:
        try:
            events = self._client.poll()
        except EngineError as error:
            self._die(error)
            return
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            stream.feed(event)
            if event.finish_reason is not None:
                del self._streams[event.request_id]
        self._note_idle()

    def _engine_died(self) -> None:
        self._take_events()  # the last words first; then poll raises
        if self.error is None:
            self._take_events()

    def _die(self, error: EngineError) -> None:
        if self.error is not None:
            return
        self.error = error
        self.shut_down()
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        self._note_idle()
        if self._on_death is not None:
            self._on_death(error)

    def _note_idle(self) -> None:
        if not self._streams:
            self._idle.set()
