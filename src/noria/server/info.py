"""The routes that say how the server is: health, readiness, load, models, metrics, and what it was started with."""

from __future__ import annotations

import dataclasses
import platform
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from noria.observe.prometheus import CONTENT_TYPE, Sources, metrics_page
from noria.server.routes import RouteSpec, json_answer
from noria.server.state import ServerState
from noria.version import __version__


class HealthAnswer(msgspec.Struct):
    status: str
    phase: str
    reason: str | msgspec.UnsetType = msgspec.UNSET


class ReadyAnswer(msgspec.Struct):
    status: str
    reason: str | msgspec.UnsetType = msgspec.UNSET
    code: str | msgspec.UnsetType | None = msgspec.UNSET


class LoadAnswer(msgspec.Struct):
    """Work under way. `server_load` counts calls, the rest sequences, tokens, and the share of KV memory held."""

    server_load: int
    num_running: int
    num_waiting: int
    queued_prompt_tokens: int
    kv_cache_usage: float


class ModelCard(msgspec.Struct):
    id: str
    created: int
    object: str = "model"
    owned_by: str = "noria"
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET
    """Once it is known."""


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


class VersionAnswer(msgspec.Struct):
    version: str


class ServerInfo(msgspec.Struct):
    version: str
    python: str
    phase: str
    paused: str | None
    uptime_s: float
    models: tuple[str, ...]
    server: dict[str, Any]
    """The front's options, secrets left out."""
    engine: dict[str, Any] | None
    """The engine's limits, once it is up."""
    sampling_defaults: dict[str, float]
    """What requests get that do not say otherwise, as the model's files recommend."""


class InfoRoutes:
    """None of these asks the engine anything: they answer while it is busy, loading, or dead."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def specs(self) -> list[RouteSpec]:
        return [
            RouteSpec(
                path="/health", handler=self.health, summary="Whether the engine is alive.", answers=(HealthAnswer,)
            ),
            RouteSpec(
                path="/ping", handler=self.health, methods=("GET", "POST"), summary="The same.", answers=(HealthAnswer,)
            ),
            RouteSpec(
                path="/ready",
                handler=self.ready,
                summary="Whether a request that came now would be taken.",
                answers=(ReadyAnswer,),
            ),
            RouteSpec(path="/load", handler=self.load, summary="How much work there is.", answers=(LoadAnswer,)),
            RouteSpec(
                path="/metrics", handler=self.metrics, summary="Metrics for Prometheus.", media_type="text/plain"
            ),
            RouteSpec(path="/version", handler=self.version, summary="Noria's version.", answers=(VersionAnswer,)),
            RouteSpec(
                path="/server_info",
                handler=self.server_info,
                summary="What the server was started with.",
                answers=(ServerInfo,),
            ),
            RouteSpec(path="/v1/models", handler=self.models, summary="The models served.", answers=(ModelList,)),
            RouteSpec(path="/v1/models/{name:path}", handler=self.model, summary="One of them.", answers=(ModelCard,)),
        ]

    async def health(self, request: Request) -> Response:
        trouble = self._state.trouble()
        if trouble is None:
            return json_answer(HealthAnswer("ok", self._state.phase))
        return json_answer(HealthAnswer("unavailable", self._state.phase, trouble), 503)

    async def ready(self, request: Request) -> Response:
        obstacle = self._state.obstacle()
        if obstacle is None:
            return json_answer(ReadyAnswer("ready"))
        return json_answer(ReadyAnswer("unavailable", str(obstacle), obstacle.code), 503, obstacle.headers)

    async def load(self, request: Request) -> Response:
        stats, calls = self._state.stats, self._state.calls
        server_load = len(calls.in_progress)
        if stats is None:
            return json_answer(LoadAnswer(server_load, 0, 0, 0, 0.0))
        return json_answer(
            LoadAnswer(server_load, stats.num_running, stats.num_waiting, stats.num_queued_tokens, stats.kv_usage)
        )

    async def models(self, request: Request) -> Response:
        return json_answer(ModelList([self._card(name) for name in self._state.names]))

    async def model(self, request: Request) -> Response:
        return json_answer(self._card(self._state.check_model(request.path_params["name"] or "/")))

    async def metrics(self, request: Request) -> Response:
        # What there is to count begins with the engine; while it loads the page is empty, not an error.
        state, page = self._state, b""
        if state.stats is not None:
            config = state.config if state.options.metrics_compat == "vllm" else None
            page = metrics_page(state.stats, state.names[0], Sources(state.cpu_s(), state.calls, config))
        return Response(page, headers={"Content-Type": CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        return json_answer(VersionAnswer(__version__))

    async def server_info(self, request: Request) -> Response:
        state = self._state
        specs = dataclasses.fields(state.options)
        return json_answer(
            ServerInfo(
                version=__version__,
                python=platform.python_version(),
                phase=state.phase,
                paused=state.paused,
                uptime_s=round(time.time() - state.started_s, 1),
                models=state.names,
                server={s.name: getattr(state.options, s.name) for s in specs if not s.metadata["is_secret"]},
                engine=None if state.config is None else dataclasses.asdict(state.config),
                sampling_defaults=dict(state.sampling_defaults),
            )
        )

    def _card(self, name: str) -> ModelCard:
        card = ModelCard(name, int(self._state.started_s))
        if self._state.config is not None:
            card.max_model_len = self._state.config.max_model_len
        return card
