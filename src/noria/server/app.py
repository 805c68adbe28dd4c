"""The routes, as one ASGI application over a `ServerState`, and the layers around them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from noria.errors import NoriaError
from noria.server.access import Access
from noria.server.admin import AdminRoutes
from noria.server.answers import ChatAnswer, ChatChunk, CompletionAnswer
from noria.server.bodies import ChatBody, CompletionBody
from noria.server.calls import Calls
from noria.server.chat import ChatApi
from noria.server.completions import CompletionsApi
from noria.server.endpoint import GenerationEndpoint
from noria.server.errors import ApiError, as_api_error
from noria.server.info import InfoRoutes
from noria.server.openapi import docs_page, openapi
from noria.server.request_body import ClientLeft
from noria.server.routes import RouteSpec, json_answer
from noria.server.state import ServerState
from noria.server.tokenizing import TokenRoutes
from noria.server.unread import UnreadBodies


def create_app(state: ServerState) -> ASGIApp:
    """The application. It does not own the engine: `noria.server.run` starts and ends it.

    From the outside in: bodies that nobody reads, the call and its line in the log, CORS (whose preflights have no
    key), the key, the route.
    """
    app: ASGIApp = Starlette(
        routes=[Route(spec.path, spec.handler, methods=list(spec.methods)) for spec in all_routes(state)],
        exception_handlers={
            HTTPException: _http_error,
            ClientLeft: _no_answer,
            ApiError: _error,
            NoriaError: _error,
            Exception: _error,
        },
    )
    app = Access(app, state.keys)
    if state.options.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=state.options.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("Retry-After", "X-Noria-Call-Id", "X-Noria-Ignored-Fields", "X-Request-Id"),
        )
    return UnreadBodies(Calls(app, access_log=state.options.access_log), state.body_reader)


def all_routes(state: ServerState) -> list[RouteSpec]:
    """Every route that this server has, in the order of the documentation."""
    specs = [
        RouteSpec(
            path="/v1/completions",
            handler=GenerationEndpoint(state, CompletionBody, CompletionsApi),
            methods=("POST",),
            summary="Continue a prompt.",
            body=CompletionBody,
            answers=(CompletionAnswer,),
            chunk=CompletionAnswer,
        ),
        RouteSpec(
            path="/v1/chat/completions",
            handler=GenerationEndpoint(state, ChatBody, ChatApi),
            methods=("POST",),
            summary="Answer messages.",
            body=ChatBody,
            answers=(ChatAnswer,),
            chunk=ChatChunk,
        ),
        *TokenRoutes(state).specs(),
        *InfoRoutes(state).specs(),
    ]
    if state.options.enable_admin_api:
        specs += AdminRoutes(state).specs()

    async def describe(request: Request) -> Response:
        return json_answer(document)

    async def docs(request: Request) -> Response:
        return HTMLResponse(page)

    specs.append(RouteSpec(path="/openapi.json", handler=describe, summary="These routes, for tools."))
    specs.append(RouteSpec(path="/docs", handler=docs, summary="The same for people.", media_type="text/html"))
    document = openapi(specs, state.options.root_path, needs_key=state.keys.are_needed)
    page = docs_page(document)
    return specs


async def _error(request: Request, error: Exception) -> Response:
    known = as_api_error(error)
    return Response(known.body, known.status, known.headers, "application/json")


class _NoAnswer(Response):
    """Sends nothing."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pass


async def _no_answer(request: Request, error: Exception) -> Response:
    return _NoAnswer()


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such route, wrong method) in the shape of all others."""
    assert isinstance(error, HTTPException)
    known = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code=None)
    return Response(known.body, error.status_code, error.headers, "application/json")
