"""The routes, as one Starlette application over a `ServerState`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from noria.observe.prometheus import CONTENT_TYPE, metrics_page
from noria.server.bodies import ChatBody, CompletionBody
from noria.server.chat import ChatApi
from noria.server.completions import CompletionsApi
from noria.server.endpoint import GenerationEndpoint
from noria.server.errors import ApiError
from noria.server.state import ServerState
from noria.version import __version__


def create_app(state: ServerState) -> Starlette:
    """The application. It does not own the engine: `noria.server.run` starts and ends it."""

    async def health(request: Request) -> Response:
        trouble = state.trouble()
        content: dict[str, Any] = {"status": "ok" if trouble is None else "unavailable", "phase": state.phase}
        if trouble is not None:
            content["reason"] = trouble
        return _json(content, 200 if trouble is None else 503)

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [_model_card(state, name) for name in state.names]})

    async def model(request: Request) -> Response:
        return _json(_model_card(state, state.check_model(request.path_params["name"] or "/")))

    async def metrics(request: Request) -> Response:
        # What there is to count begins with the engine; while it loads the page is empty, not an error.
        page = metrics_page(state.stats, state.names[0], state.cpu_s()) if state.stats is not None else b""
        return Response(page, headers={"Content-Type": CONTENT_TYPE})

    async def version(request: Request) -> Response:
        return _json({"version": __version__})

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/version", version),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/completions", GenerationEndpoint(state, CompletionBody, CompletionsApi), methods=["POST"]),
            Route("/v1/chat/completions", GenerationEndpoint(state, ChatBody, ChatApi), methods=["POST"]),
        ],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
    )


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _model_card(state: ServerState, name: str) -> dict[str, Any]:
    card: dict[str, Any] = {"id": name, "object": "model", "created": int(state.started_s), "owned_by": "noria"}
    if state.config is not None:
        card["max_model_len"] = state.config.max_model_len
    return card


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body, error.status, error.headers, "application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such route, wrong method) in the shape of all others."""
    assert isinstance(error, HTTPException)
    known = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code=None)
    return Response(known.body, error.status_code, error.headers, "application/json")
