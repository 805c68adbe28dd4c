"""The threads for text: what waits for one, what is given up, and what is kept of it."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from starlette.requests import Request

from noria.config import SchedulerConfig, ServerOptions
from noria.fakes.tokenizer import ByteTokenizer
from noria.server.bodies import ChatBody, CompletionBody
from noria.server.calls import Calls
from noria.server.chat import ChatApi
from noria.server.completions import CompletionsApi
from noria.server.endpoint import GenerationEndpoint
from noria.server.errors import ApiError
from noria.server.keys import Keys
from noria.server.request_body import ClientLeft
from noria.server.state import Phase, ServerState
from noria.server.text_work import LARGE_BODY_BYTES, MAX_WAITING, TextWork
from noria.server.tokenizing import TokenRoutes

LARGE = LARGE_BODY_BYTES + 1


class Text(str):
    """One that can be watched."""


@pytest.fixture
def work() -> Iterator[TextWork]:
    work = TextWork(ServerOptions())
    yield work
    work.close()


@pytest.mark.anyio
async def test_nothing_is_kept_of_texts_that_nobody_waits_for(work: TextWork) -> None:
    """Both threads are busy all the while."""
    is_over = threading.Event()
    busy = [asyncio.ensure_future(work.run(partial(is_over.wait, 10), num_bytes=LARGE)) for _ in range(2)]
    texts = [Text("text") for _ in range(5)]
    kept = [weakref.ref(text) for text in texts]
    waiting = [asyncio.ensure_future(work.run(partial(len, text), num_bytes=LARGE)) for text in texts]
    del texts
    await asyncio.sleep(0.05)
    gc.collect()
    assert all(text() is not None for text in kept), "they wait"
    for call in waiting:
        call.cancel()
    await asyncio.wait(waiting)
    waiting.clear()
    del call
    gc.collect()
    assert [text() for text in kept] == [None] * 5
    is_over.set()
    assert await asyncio.gather(*busy) == [True, True]
    assert await work.run(partial(len, b"four"), num_bytes=LARGE) == 4


@pytest.mark.anyio
async def test_only_so_many_wait_and_those_that_left_do_not_count(work: TextWork) -> None:
    is_over = threading.Event()
    calls = [
        asyncio.ensure_future(work.run(partial(is_over.wait, 10), num_bytes=LARGE)) for _ in range(MAX_WAITING + 2)
    ]
    await asyncio.sleep(0.05)
    with pytest.raises(ApiError, match="tokenising"):
        await work.run(is_over.wait, num_bytes=LARGE)
    calls[-1].cancel()
    await asyncio.wait({calls.pop()})
    another = asyncio.ensure_future(work.run(partial(is_over.wait, 10), num_bytes=LARGE))
    await asyncio.sleep(0.05)
    is_over.set()
    assert all(await asyncio.gather(*calls, another))


class WatchedTokenizer(ByteTokenizer):
    """Knows in which thread it was used last."""

    thread = ""

    def encode(self, *arguments: Any, **options: Any) -> list[int]:
        self.thread = threading.current_thread().name
        return super().encode(*arguments, **options)


@pytest.mark.anyio
@pytest.mark.parametrize(("text", "is_long"), [("x" * LARGE_BODY_BYTES, False), ("\u6f22" * LARGE_BODY_BYTES, True)])
@pytest.mark.parametrize("field", ["prompt", "content"])
async def test_how_long_a_text_is_that_is_tokenised_is_said_by_its_bytes(text: str, is_long: bool, field: str) -> None:
    state = ServerState(ServerOptions(), Keys(ServerOptions()), names=("m",))
    state.tokenizer = tokenizer = WatchedTokenizer()
    state.config = SchedulerConfig(max_model_len=2**16, num_blocks=2**12, block_size=16)

    body = [json.dumps({field: text}).encode()]

    async def receive() -> dict[str, Any]:
        if not body:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": body.pop(), "more_body": False}

    answer = await TokenRoutes(state).tokenize(Request({"type": "http", "headers": []}, receive))
    state.text_work.close()
    assert answer.status_code == 200
    assert tokenizer.thread.startswith("noria-tokenising") == is_long


class CountingTokenizer(ByteTokenizer):
    """Knows how many texts it was given, and can wait with the first."""

    def __init__(self) -> None:
        super().__init__()
        self.num_texts = 0
        self.may_go_on = threading.Event()
        self.has_begun = threading.Event()

    def encode(self, *arguments: Any, **options: Any) -> list[int]:
        self.num_texts += 1
        self.has_begun.set()
        assert self.may_go_on.wait(10)
        return super().encode(*arguments, **options)


@pytest.fixture
def state() -> Iterator[ServerState]:
    state = ServerState(ServerOptions(), Keys(ServerOptions()), names=("m",), phase=Phase.READY)
    state.tokenizer = CountingTokenizer()
    state.config = SchedulerConfig(max_model_len=2**16, num_blocks=2**12, block_size=16)
    yield state
    state.text_work.close()


async def call(state: ServerState, path: str, body: dict[str, Any], has_left: asyncio.Event) -> None:
    """One call of a client that leaves when told to. The smaller routes raise `ClientLeft` then."""
    messages = [
        {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        if len(messages) == 1:
            await has_left.wait()
            return messages[0]
        return messages.pop(0)

    scope: dict[str, Any] = {"type": "http", "headers": [], "method": "POST"}
    if path == "/tokenize":
        await TokenRoutes(state).tokenize(Request(scope, receive))
    elif path == "/detokenize":
        await TokenRoutes(state).detokenize(Request(scope, receive))
    else:
        make: Any = (ChatBody, ChatApi) if "chat" in path else (CompletionBody, CompletionsApi)
        await Calls(GenerationEndpoint(state, *make), access_log=False)(scope, receive, None)  # type: ignore[arg-type]


async def until(holds: Any) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * LARGE, "truncate_prompt_tokens": 10}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * LARGE}], "truncate_prompt_tokens": 1}),
        ("/tokenize", {"prompt": "x" * LARGE}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}),
        ("/detokenize", {"tokens": [1] * LARGE}),
    ],
)
async def test_who_leaves_before_there_is_a_thread_is_not_served(
    state: ServerState, path: str, body: dict[str, Any]
) -> None:
    """The call ends at once, though all threads are busy, and they do nothing for it when they are free."""
    is_over, has_left = threading.Event(), asyncio.Event()
    work = state.text_work
    busy = [asyncio.ensure_future(work.run(partial(is_over.wait, 10), num_bytes=LARGE)) for _ in range(2)]
    busy += [asyncio.ensure_future(work.run_chat(partial(is_over.wait, 10), is_foreign=False)) for _ in range(2)]
    calling = asyncio.ensure_future(call(state, path, body, has_left))
    await asyncio.sleep(0.05)
    has_left.set()
    try:
        await asyncio.wait_for(calling, 5)
    except ClientLeft:
        assert "tokenize" in path
    finally:
        is_over.set()
        assert await asyncio.gather(*busy) == [True] * 4
    assert isinstance(state.tokenizer, CountingTokenizer)
    assert state.tokenizer.num_texts == 0


@pytest.mark.anyio
async def test_of_a_list_of_texts_the_rest_is_skipped_when_its_client_leaves(state: ServerState) -> None:
    tokenizer, has_left = state.tokenizer, asyncio.Event()
    assert isinstance(tokenizer, CountingTokenizer)
    calling = asyncio.ensure_future(call(state, "/v1/completions", {"prompt": ["x" * LARGE] * 100}, has_left))
    await until(tokenizer.has_begun.is_set)
    has_left.set()
    await asyncio.wait_for(calling, 5)
    tokenizer.may_go_on.set()
    await state.text_work.run(partial(len, b"x"), num_bytes=LARGE)
    await until(lambda: state.text_work._long_texts._num_inside == 0)
    assert tokenizer.num_texts == 1
