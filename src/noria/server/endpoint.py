"""One POST that generates: read the body, start, answer at once or as a stream, notice a client that goes away.

Raw ASGI, because the receive channel must be watched while the answer is made: a client that hangs up is seen there
at once, streaming or not, and its blocks are free within two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from noria.config import SchedulerConfig, ServerOptions
from noria.core.admission import check_priority
from noria.errors import EngineError
from noria.observe.calls import Outcome
from noria.sampling import SamplingParams
from noria.server.access import tenant_of
from noria.server.api import GenerationApi
from noria.server.bodies import ChatBody, GenerationBody, decode_body
from noria.server.calls import Call, call_of
from noria.server.envelope import new_call_id
from noria.server.errors import ApiError, as_api_error
from noria.server.gate import check_call, check_json
from noria.server.generation import Generation
from noria.server.headers import ignored_header, response_start
from noria.server.request_body import ClientLeft, HeldBody, while_connected
from noria.server.served import ServedModel
from noria.server.state import ServerState
from noria.server.text_work import TextWork
from noria.server.writing import stream_chunks, whole_answer

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class GenerationEndpoint:
    """An ASGI application for one route. `make_api` builds the endpoint's own part from a decoded body."""

    def __init__(
        self,
        state: ServerState,
        body_type: type[Any],
        make_api: Callable[[Any, ServedModel, str], GenerationApi],
    ) -> None:
        self._state = state
        self._body_type = body_type
        self._make_api = make_api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = call_of(scope)
        call.call_id = new_call_id()
        self._state.calls.begin(call)
        try:
            await self._answer(call, scope, receive, send)
        finally:
            call.outcome = call.outcome or Outcome.ABORTED
            self._state.calls.end(call, call.outcome)

    async def _answer(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._state.body_reader.read(scope, receive)
        except ClientLeft:
            return
        except ApiError as error:
            call.note_error(error)
            await _send_json(send, error.status, error.body, _call_header(call) | error.headers)
            return
        with body:  # a task that is cancelled before its first step releases nothing
            await self._answer_body(body, call, scope, receive, send)

    async def _answer_body(self, body: HeldBody, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientLeft):
            await while_connected(receive, _Answer(self, body, send, call, scope).run())

    def prepare(self, raw: bytes, call_id: str) -> tuple[GenerationBody, GenerationApi, list[str]]:
        """Everything that can be refused before anything is started."""
        state = self._state
        state.check_ready()
        check_json(raw, self.config)
        body, ignored = decode_body(raw, self._body_type, is_strict=self.options.strict_fields)
        model = state.served_model(body.model)
        check_priority(body.priority or 0, self.config)
        return body, self._make_api(body, model, call_id), ignored

    @property
    def config(self) -> SchedulerConfig:
        assert self._state.config is not None  # there is one from readiness on
        return self._state.config

    @property
    def options(self) -> ServerOptions:
        return self._state.options

    @property
    def text_work(self) -> TextWork:
        return self._state.text_work

    def retry_after_s(self) -> int:
        return self._state.retry_after_s()

    def generation(self, prompts: list[list[int]], sampling: SamplingParams, **rest: Any) -> Generation:
        state = self._state
        state.check_ready()
        assert state.engine is not None
        assert state.tokenizer is not None
        eos_token_ids = state.eos_token_ids
        return Generation(state.engine, state.tokenizer, eos_token_ids, prompts, sampling, **rest)


class _Answer:
    """One request being answered."""

    def __init__(self, endpoint: GenerationEndpoint, held: HeldBody, send: Send, call: Call, scope: Scope) -> None:
        self._endpoint = endpoint
        self._call = call
        self._tenant = tenant_of(scope)
        self._transport: asyncio.WriteTransport | None = scope.get("noria.transport")
        self._held = held
        self._send = send
        self._headers = _call_header(call)
        self._started = False
        self._last_sent_s = time.monotonic()

    async def run(self) -> None:
        renamed: dict[str, str] = {}
        try:
            try:
                body, api, ignored = await self._understand()
                renamed = api.renamed
                self._headers |= ignored_header(ignored)
                sampling = api.sampling()
                prompts = await self._encode_prompts(body, api)
            finally:
                self._held.release()
            max_cost = self._endpoint.options.max_request_cost
            check_call([len(prompt) for prompt in prompts], sampling, self._endpoint.config, max_cost)
            if body.stream:
                await self._stream(body, api, prompts, sampling)
            else:
                with self._generation(body, api, prompts, sampling) as generation:
                    await generation.wait()
                    await _send_json(
                        self._send, 200, await whole_answer(api, generation, prompts, sampling), self._headers
                    )
            self._call.note_answered()
        except Exception as error:
            await self._fail(as_api_error(error, renamed), error)

    async def _understand(self) -> tuple[GenerationBody, GenerationApi, list[str]]:
        assert self._call.call_id is not None
        prepare = partial(self._endpoint.prepare, self._held.content, self._call.call_id)
        return await self._endpoint.text_work.run(prepare, num_bytes=len(self._held.content))

    async def _encode_prompts(self, body: GenerationBody, api: GenerationApi) -> list[list[int]]:
        work = self._endpoint.text_work
        try:
            if isinstance(body, ChatBody):
                return await work.run_chat(api.encode_prompts, is_foreign=body.chat_template is not None)
            return await work.run(api.encode_prompts, num_bytes=len(self._held.content))
        except asyncio.CancelledError:
            api.is_abandoned = True
            raise

    def _generation(
        self,
        body: GenerationBody,
        api: GenerationApi,
        prompts: list[list[int]],
        sampling: SamplingParams,
        **limits: Any,
    ) -> Generation:
        self._call.generation = self._endpoint.generation(
            prompts,
            sampling,
            call_id=api.call_id,
            priority=body.priority or 0,
            prefix_key=api.prefix_key(self._tenant),
            **limits,
        )
        return self._call.generation

    async def _stream(
        self, body: GenerationBody, api: GenerationApi, prompts: list[list[int]], sampling: SamplingParams
    ) -> None:
        task = asyncio.current_task()
        assert task is not None

        def give_up() -> None:
            logger.warning(
                "a client reads too slowly: more than %d events behind", self._endpoint.options.max_stream_backlog
            )
            task.cancel()
            if self._transport is not None:
                _cut(self._transport)

        limits = {"max_pending": self._endpoint.options.max_stream_backlog, "on_overflow": give_up}
        with self._generation(body, api, prompts, sampling, **limits) as generation:
            await generation.accepted()  # a refusal must have its own status, so nothing is sent before
            await self._start_stream()
            await self._send_events(api.opening(generation))
            async with _kept_alive(self._keep_alive, self._endpoint.options.sse_keep_alive_interval):
                async for bunch in generation.news():
                    await self._send_events(await stream_chunks(api, bunch))
            await self._send_events(api.closing())
            await self._end_stream()

    async def _start_stream(self) -> None:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"} | self._headers
        headers["X-Accel-Buffering"] = "no"  # proxies must not collect what should arrive at once
        await self._send(response_start(200, headers))
        self._started = True

    async def _send_events(self, contents: list[bytes]) -> None:
        if contents:
            data = b"".join(b"data: " + content + b"\n\n" for content in contents)
            self._last_sent_s = time.monotonic()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _keep_alive(self, interval_s: float) -> None:
        """Sends a comment, which clients skip, whenever nothing has been sent for that long."""
        while True:
            silence_s = time.monotonic() - self._last_sent_s
            if silence_s < interval_s:
                await asyncio.sleep(interval_s - silence_s)
            else:
                self._last_sent_s = time.monotonic()
                await self._send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

    async def _end_stream(self) -> None:
        await self._send({"type": "http.response.body", "body": DONE})

    async def _fail(self, error: ApiError, cause: Exception) -> None:
        self._call.note_error(error)
        if error.code == "queue_full":
            error.headers["Retry-After"] = str(self._endpoint.retry_after_s())
        if isinstance(cause, EngineError):
            logger.error("a request failed: %s", error)  # the engine's log has the cause
        elif error.status == 500:
            logger.error("a request failed: %s", error, exc_info=cause)
        if self._started:
            await self._send_events([error.body])
            await self._end_stream()
        else:
            await _send_json(self._send, error.status, error.body, self._headers | error.headers)


@contextlib.asynccontextmanager
async def _kept_alive(
    keep_alive: Callable[[float], Coroutine[Any, Any, None]], interval_s: float
) -> AsyncIterator[None]:
    """Runs `keep_alive` beside what is inside, unless the interval is 0."""
    task = asyncio.create_task(keep_alive(interval_s)) if interval_s else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.wait({task})


def _cut(transport: asyncio.WriteTransport) -> None:
    """Ends a connection without waiting for the client to read what is on its way: what an orderly close would do."""
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _call_header(call: Call) -> dict[str, str]:
    return {"X-Noria-Call-Id": call.call_id or ""}


async def _send_json(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))} | headers
    await send(response_start(status, headers))
    await send({"type": "http.response.body", "body": body})
