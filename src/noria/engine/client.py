"""How the front speaks to the engine, wherever that runs: `EngineClient`.

`InProcessClient` is the twin that runs the engine in the caller's own thread: `noria.LLM`, tests, the simulator.
"""

from __future__ import annotations

from typing import Protocol

from noria.core.events import FinishReason, RequestEvent
from noria.engine.core import EngineCore
from noria.engine.messages import EngineRequest


class EngineClient(Protocol):
    """Submit sequences, end them, collect what is new."""

    @property
    def has_work(self) -> bool:
        """Whether to go on polling: a sequence has not ended yet, or the engine has not cleared up after the last."""

    def submit(self, request: EngineRequest) -> None:
        """Queues a sequence. Raises `RequestError` if it can never be served."""

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """Ends a sequence: `ABORT`, or `STOP` when the client found a stop string. No further event follows.
        Unknown or ended ids are no error."""

    def poll(self) -> list[RequestEvent]:
        """What is new since the last call. In process this is what advances the engine, by one step."""


class InProcessClient:
    """An engine in this thread: each `poll` runs one step."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    @property
    def has_work(self) -> bool:
        return self._core.has_work

    def submit(self, request: EngineRequest) -> None:
        self._core.add_request(request)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        self._core.finish_request(request_id, reason)

    def poll(self) -> list[RequestEvent]:
        return self._core.step()
