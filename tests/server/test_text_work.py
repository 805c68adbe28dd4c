"""The threads for text: what waits for one, what is given up, and what is kept of it."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from functools import partial

import pytest

from noria.config import ServerOptions
from noria.server.errors import ApiError
from noria.server.text_work import LARGE_BODY_BYTES, MAX_WAITING, TextWork

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
