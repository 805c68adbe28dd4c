"""How the front speaks to the engine, wherever that runs: `EngineClient`.

`InProcessClient` is the twin that runs the engine in the caller's own thread: `noria.LLM`, tests, the simulator.
"""

from __future__ import annotations

from typing import Protocol

from noria.core.events import FinishReason, RequestEvent
from noria.core.explain import Explanation
from noria.core.scheduler import PauseMode
from noria.engine.core import EngineCore
from noria.engine.messages import EngineRequest


class EngineClient(Protocol):
    """Submit sequences, end them, collect what is new."""

    @property
    def has_work(self) -> bool:
        """Whether to go on polling: a sequence has not ended yet, or the engine has not cleared up after the last."""

    def submit(self, request: EngineRequest) -> None:
        """Queues a sequence. Raises `RequestError` if it can never be served.

        That there is no place for it now is raised as `UnavailableError` by an engine in this process; another one
        tells it as the sequence's only event.
        """

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """Ends a sequence: `ABORT`, or `STOP` when the client found a stop string. No further event follows.
        Unknown or ended ids are no error."""

    def poll(self) -> list[RequestEvent]:
        """What is new since the last call. In process this is what advances the engine, by one step."""

    def pause(self, mode: PauseMode) -> None:
        """Stops the engine as `mode` says, after what has been submitted. What it ends has its last event."""

    def resume(self) -> None:
        """Ends a pause. No error if there is none."""

    def reset_prefix_cache(self) -> None:
        """Makes cached KV unfindable; running sequences go on."""

    def drain(self) -> None:
        """Lets the engine refuse whatever is submitted from now on."""


class InProcessClient:
    """An engine in this thread: each `poll` runs one step."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._events: list[RequestEvent] = []  # that came between steps

    @property
    def has_work(self) -> bool:
        return bool(self._events) or self._core.has_work

    def submit(self, request: EngineRequest) -> None:
        self._core.add_request(request)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        self._core.finish_request(request_id, reason)

    def poll(self) -> list[RequestEvent]:
        events, self._events = self._events, []
        return events + self._core.step()

    def pause(self, mode: PauseMode) -> None:
        self._events += self._core.pause(mode)

    def resume(self) -> None:
        self._core.resume()

    def reset_prefix_cache(self) -> None:
        self._core.reset_prefix_cache()

    def drain(self) -> None:
        self._core.drain()

    def explain(self, request_id: str) -> Explanation | None:
        """Where a sequence stands and what holds it back; None if it has ended."""
        return self._core.explain(request_id)
