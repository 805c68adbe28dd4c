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
from noria.server.errors import ApiError
from noria.server.keys import Keys
from noria.server.state import ServerState
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

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps({field: text}).encode(), "more_body": False}

    answer = await TokenRoutes(state).tokenize(Request({"type": "http", "headers": []}, receive))
    state.text_work.close()
    assert answer.status_code == 200
    assert tokenizer.thread.startswith("noria-tokenising") == is_long
