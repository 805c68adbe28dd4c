"""One POST that generates: read the body, start, answer at once or as a stream, notice a client that goes away.

Raw ASGI, because the receive channel must be watched while the answer is made: a client that hangs up is seen there
at once, streaming or not, and its blocks are free within two steps.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from noria.core.admission import check_priority
from noria.errors import EngineError
from noria.sampling import SamplingParams
from noria.server.api import GenerationApi
from noria.server.bodies import GenerationBody, decode_body
from noria.server.errors import ApiError, as_api_error
from noria.server.generation import Generation
from noria.server.served import ServedModel
from noria.server.state import ServerState

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20
LARGE_BODY_BYTES = 16 * 1024
"""Texts above this are tokenised in a thread: it takes longer than the event loop should be held up."""

MAX_HEADER_CHARACTERS = 1024

DONE = b"data: [DONE]\n\n"


class GenerationEndpoint:
    """An ASGI application for one route. `make_api` builds the endpoint's own part from a decoded body."""

    def __init__(
        self,
        state: ServerState,
        body_type: type[Any],
        make_api: Callable[[Any, ServedModel], GenerationApi],
    ) -> None:
        self._state = state
        self._body_type = body_type
        self._make_api = make_api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            raw = await _read_body(receive)
        except ConnectionResetError:
            return
        except ApiError as error:
            await _send_json(send, error.status, error.body, error.headers)
            return
        answering = asyncio.ensure_future(_Answer(self, raw, send, scope.get("noria.transport")).run())
        leaving = asyncio.ensure_future(_until_disconnect(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            answering.cancel()  # no-op if it is done; otherwise it aborts what it started
            await asyncio.wait({answering, leaving})
        if not answering.cancelled():
            answering.result()

    def prepare(self, raw: bytes) -> tuple[GenerationBody, GenerationApi, list[str]]:
        """Everything that can be refused before anything is started."""
        self._state.check_ready()
        body, ignored = decode_body(raw, self._body_type)
        name = self._state.check_model(body.model)
        assert self._state.tokenizer is not None
        assert self._state.config is not None
        check_priority(body.priority or 0, self._state.config)
        model = ServedModel(
            name,
            self._state.tokenizer,
            self._state.config.max_model_len,
            self._state.options.trust_request_chat_template,
        )
        return body, self._make_api(body, model), ignored

    def generation(self, prompts: list[list[int]], sampling: SamplingParams, **rest: Any) -> Generation:
        state = self._state
        state.check_ready()
        assert state.engine is not None
        assert state.tokenizer is not None
        eos_token_ids = state.eos_token_ids
        return Generation(state.engine, state.tokenizer, eos_token_ids, prompts, sampling, **rest)

    @property
    def max_pending(self) -> int:
        return self._state.options.max_stream_backlog


class _Answer:
    """One request being answered."""

    def __init__(
        self, endpoint: GenerationEndpoint, raw: bytes, send: Send, transport: asyncio.WriteTransport | None
    ) -> None:
        self._endpoint = endpoint
        self._transport = transport
        self._raw = raw
        self._send = send
        self._headers: dict[str, str] = {}
        self._started = False

    async def run(self) -> None:
        renamed: dict[str, str] = {}
        try:
            body, api, ignored = self._endpoint.prepare(self._raw)
            renamed = api.renamed
            if ignored:
                self._headers["X-Noria-Ignored-Fields"] = _header_list(ignored)
            sampling = api.sampling()
            is_large = len(self._raw) > LARGE_BODY_BYTES
            prompts = await asyncio.to_thread(api.encode_prompts) if is_large else api.encode_prompts()
            if body.stream:
                await self._stream(body, api, prompts, sampling)
            else:
                with self._generation(body, api, prompts, sampling) as generation:
                    await generation.wait()
                    await _send_json(self._send, 200, api.answer(generation), self._headers)
        except Exception as error:
            await self._fail(as_api_error(error, renamed), error)

    def _generation(
        self,
        body: GenerationBody,
        api: GenerationApi,
        prompts: list[list[int]],
        sampling: SamplingParams,
        **limits: Any,
    ) -> Generation:
        return self._endpoint.generation(
            prompts,
            sampling,
            call_id=api.call_id,
            priority=body.priority or 0,
            prefix_key=api.prefix_key,
            **limits,
        )

    async def _stream(
        self, body: GenerationBody, api: GenerationApi, prompts: list[list[int]], sampling: SamplingParams
    ) -> None:
        task = asyncio.current_task()
        assert task is not None

        def give_up() -> None:
            logger.warning("a client reads too slowly: more than %d events behind", self._endpoint.max_pending)
            task.cancel()
            if self._transport is not None:
                _cut(self._transport)

        limits = {"max_pending": self._endpoint.max_pending, "on_overflow": give_up}
        with self._generation(body, api, prompts, sampling, **limits) as generation:
            await generation.accepted()  # a refusal must have its own status, so nothing is sent before
            await self._start_stream()
            await self._send_events(api.opening(generation))
            async for bunch in generation.news():
                await self._send_events(api.chunks(bunch))
            await self._send_events(api.closing())
            await self._end_stream()

    async def _start_stream(self) -> None:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"} | self._headers
        headers["X-Accel-Buffering"] = "no"  # proxies must not collect what should arrive at once
        await self._send(_response_start(200, headers))
        self._started = True

    async def _send_events(self, contents: list[bytes]) -> None:
        if contents:
            data = b"".join(b"data: " + content + b"\n\n" for content in contents)
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end_stream(self) -> None:
        await self._send({"type": "http.response.body", "body": DONE})

    async def _fail(self, error: ApiError, cause: Exception) -> None:
        if isinstance(cause, EngineError):
            logger.error("a request failed: %s", error)  # the engine's log has the cause
        elif error.status == 500:
            logger.error("a request failed: %s", error, exc_info=cause)
        if self._started:
            await self._send_events([error.body])
            await self._end_stream()
        else:
            await _send_json(self._send, error.status, error.body, error.headers)


async def _read_body(receive: Receive) -> bytes:
    """The whole body. Raises `ApiError` if it is too large, `ConnectionResetError` if the client leaves meanwhile."""
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large")
        if not message.get("more_body", False):
            return b"".join(chunks)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _cut(transport: asyncio.WriteTransport) -> None:
    """Ends a connection without waiting for the client to read what is on its way: what an orderly close would do."""
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _header_list(names: list[str]) -> str:
    """Names that a client chose, fit for a header: one line of printable ASCII, and not too long."""
    text = ", ".join(names[:MAX_HEADER_CHARACTERS])[:MAX_HEADER_CHARACTERS]
    return "".join(character if " " <= character <= "~" else "?" for character in text)


def _response_start(status: int, headers: dict[str, str]) -> Message:
    encoded = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}


async def _send_json(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))} | headers
    await send(_response_start(status, headers))
    await send({"type": "http.response.body", "body": body})
