"""Routes for whoever runs the server (`--enable-admin-api`): pause, resume, reset, abort, explain.

Each answers when the engine has done it, between two of its steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from noria.core.explain import Explanation
from noria.core.scheduler import PauseMode
from noria.engine.streams import AsyncEngine
from noria.server.access import check_admin
from noria.server.errors import ApiError, unavailable
from noria.server.reading import read_json, read_query
from noria.server.routes import RouteSpec, json_answer
from noria.server.state import ServerState

ENGINE_PATIENCE_S = 30.0
"""How long the engine may take for one step before its answer is given up; what was asked happens all the same."""

MAX_EXPLAINED = 64
"""Sequences of one call that are explained: each may mean to put a queue in order."""

T = TypeVar("T")


class PauseQuery(msgspec.Struct):
    mode: PauseMode = PauseMode.ABORT
    """abort: everything ends now; wait: what has begun goes on to its end; keep: everything stands still."""


class AbortBody(msgspec.Struct):
    request_ids: list[str] | None = None
    """What the header X-Noria-Call-Id said of them, or the `id`s of answers whose calls had no `request_id`."""
    abort_all: bool | None = None


class StatusAnswer(msgspec.Struct):
    status: str


class AbortAnswer(msgspec.Struct):
    num_aborted: int
    """Sequences that were under way."""


class ExplainAnswer(msgspec.Struct):
    request_id: str
    sequences: tuple[Explanation, ...]
    texts: list[str]
    """The same in words."""


class AdminRoutes:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    def specs(self) -> list[RouteSpec]:
        return [
            RouteSpec(
                path="/pause",
                handler=self.pause,
                methods=("POST",),
                summary="Stop the engine. New requests are accepted and wait.",
                query=PauseQuery,
                answers=(StatusAnswer,),
            ),
            RouteSpec(
                path="/resume",
                handler=self.resume,
                methods=("POST",),
                summary="End a pause.",
                answers=(StatusAnswer,),
            ),
            RouteSpec(
                path="/reset_prefix_cache",
                handler=self.reset_prefix_cache,
                methods=("POST",),
                summary="Make cached KV unfindable. Running requests go on.",
                answers=(StatusAnswer,),
            ),
            RouteSpec(
                path="/abort_requests",
                handler=self.abort_requests,
                methods=("POST",),
                summary="End requests; their clients get what there is, with finish_reason abort.",
                body=AbortBody,
                answers=(AbortAnswer,),
            ),
            RouteSpec(
                path="/explain/{request_id}",
                handler=self.explain,
                summary="Where a request stands, and what holds it back.",
                answers=(ExplainAnswer,),
            ),
        ]

    async def pause(self, request: Request) -> Response:
        engine = self._engine(request)
        mode = read_query(request, PauseQuery).mode
        await _patiently(engine.pause(mode))
        return json_answer(StatusAnswer("paused"))

    async def resume(self, request: Request) -> Response:
        engine = self._engine(request)
        await _patiently(engine.resume())
        return json_answer(StatusAnswer("resumed"))

    async def reset_prefix_cache(self, request: Request) -> Response:
        await _patiently(self._engine(request).reset_prefix_cache())
        return json_answer(StatusAnswer("reset"))

    async def abort_requests(self, request: Request) -> Response:
        engine = self._engine(request)
        body, headers = await read_json(request, AbortBody, self._state)
        if (body.request_ids is None) != bool(body.abort_all):
            raise ApiError(
                400,
                "give request_ids, a list of answers' ids, or abort_all: true",
                param="request_ids",
                code="missing_required_parameter" if body.request_ids is None else "invalid_value",
            )
        if body.request_ids is None:
            return json_answer(AbortAnswer(engine.abort(engine.unfinished())), headers=headers)
        num_aborted = sum(engine.abort(engine.unfinished(_call_id(name))) for name in body.request_ids)
        return json_answer(AbortAnswer(num_aborted), headers=headers)

    async def explain(self, request: Request) -> Response:
        engine = self._engine(request)
        request_id = request.path_params["request_id"]
        names = engine.unfinished(_call_id(request_id))[:MAX_EXPLAINED]
        explanations = await _patiently(engine.explain(names)) if names else ()
        if not explanations:
            raise ApiError(404, "there is no such request under way", param="request_id", code="request_not_found")
        return json_answer(ExplainAnswer(request_id, explanations, [str(e) for e in explanations]))

    def _engine(self, request: Request) -> AsyncEngine:
        """Raises `ApiError` 403 for those who may not, 503 while there is no engine."""
        check_admin(request.scope)
        if self._state.engine is None:
            raise unavailable("the model is still loading", "loading")
        return self._state.engine


async def _patiently(answer: Awaitable[T]) -> T:
    try:
        return await asyncio.wait_for(answer, ENGINE_PATIENCE_S)
    except TimeoutError:
        raise unavailable(
            f"the engine has not answered for {ENGINE_PATIENCE_S:.0f} s; it will do this after its step", "engine_busy"
        ) from None


def _call_id(name: str) -> str:
    """From an answer's id, `cmpl-...` or `chatcmpl-...`, to the call's own."""
    return name.rpartition("-")[2]
