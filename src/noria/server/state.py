"""What the routes share: which phase the server is in, the engine once it is up, and the names it goes by."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from noria.config import SchedulerConfig, ServerOptions
from noria.core.admission import check_queue
from noria.core.scheduler import PauseMode
from noria.engine.streams import AsyncEngine
from noria.errors import UnavailableError
from noria.observe.calls import CallStats
from noria.observe.cpu import process_cpu_s
from noria.observe.stats import EngineStats
from noria.server.errors import ApiError, unavailable
from noria.server.keys import Keys
from noria.server.request_body import BodyReader
from noria.server.served import ServedModel
from noria.server.text_work import TextWork
from noria.text.tokenizer import Tokenizer

MAX_RETRY_AFTER_S = 60
"""However long the queue is: clients that come back to an empty one have waited for nothing."""


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(slots=True)
class ServerState:
    """One server. `names` are the ids the model is served under, the first being the one it calls itself."""

    options: ServerOptions
    keys: Keys
    names: tuple[str, ...] = ()
    phase: Phase = Phase.LOADING
    engine: AsyncEngine | None = None
    tokenizer: Tokenizer | None = None
    config: SchedulerConfig | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    stats: EngineStats | None = None
    calls: CallStats = field(default_factory=CallStats)
    engine_pid: int | None = None
    started_s: float = field(default_factory=time.time)
    body_reader: BodyReader = field(init=False)
    text_work: TextWork = field(init=False)

    def __post_init__(self) -> None:
        self.body_reader = BodyReader(self.options.max_body_bytes, self.options.request_read_timeout_s)
        self.text_work = TextWork(self.options)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.config.eos_token_ids if self.config is not None else ()

    @property
    def paused(self) -> PauseMode | None:
        """How the engine is paused, or about to be: /ready must not promise what will not be."""
        return None if self.engine is None else self.engine.paused

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds of the front's process and the engine's, as far as they can be told."""
        pids = {"front": os.getpid(), "engine": self.engine_pid}
        found = {name: process_cpu_s(pid) for name, pid in pids.items() if pid is not None}
        return {name: seconds for name, seconds in found.items() if seconds is not None}

    def trouble(self) -> str | None:
        """Why the server is not healthy, or None."""
        if self.phase is not Phase.READY:
            return str(self.phase)
        if self.engine is not None:
            if self.engine.error is not None:
                return str(self.engine.error)
            silence_s = self.engine.silence_s()
            if silence_s > self.options.health_stall_s:
                return f"the engine's loop has not advanced for {silence_s:.1f} s"
        return None

    def obstacle(self) -> ApiError | None:
        """Why a request that came now would be refused or only wait for somebody to resume; None if it would run."""
        try:
            self.check_ready()
        except ApiError as error:
            return error
        if (trouble := self.trouble()) is not None:
            return unavailable(trouble, "engine_silent")
        if self.paused is not None:
            return unavailable("the engine is paused", "paused")
        if self.engine is None or self.config is None or self.stats is None:
            return None
        # The front knows of those it has sent; what the engine has made of their prompts it learns with each step.
        num_waiting = max(0, self.engine.num_unfinished - self.stats.num_running)
        try:
            check_queue(self.stats.num_running, num_waiting, self.stats.num_queued_tokens, 1, self.config)
        except UnavailableError as error:
            return unavailable(str(error), error.code, retry_after_s=self.retry_after_s())
        return None

    def retry_after_s(self) -> int:
        """When to come back to a queue that is full: when half of those that wait have begun, at the pace of late."""
        if self.stats is None:
            return 1
        num_half = max(1, self.stats.num_waiting // 2)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(self.stats.pace.seconds_for(num_half, time.monotonic()))))

    def check_ready(self) -> None:
        """Raises `ApiError` 503 with Retry-After unless new requests are taken."""
        match self.phase:
            case Phase.LOADING:
                raise unavailable("the model is still loading", "loading")
            case Phase.DRAINING:
                raise unavailable("the server is shutting down", "draining")
            case Phase.FAILED:
                raise unavailable("the engine has failed; the server is going down", "engine_dead")
            case Phase.READY:
                return

    def check_model(self, name: str | None) -> str:
        """The name to answer under. Raises `ApiError` 404 for a model that is not served."""
        if name is None or name == "":
            return self.names[0]
        if name not in self.names:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; there is {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return name

    def served_model(self, name: str | None) -> ServedModel:
        """The model by the name to answer under. Raises `ApiError` if it is not served, or not there yet."""
        if self.tokenizer is None or self.config is None:
            raise unavailable("the model is still loading", "loading")
        return ServedModel(
            self.check_model(name),
            self.tokenizer,
            self.config.max_model_len,
            self.text_work,
            trust_request_chat_template=self.options.trust_request_chat_template,
            sampling_defaults=self.sampling_defaults,
        )
