"""Answers with many log-probabilities, and long prompts told again, are written beside the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_calls import ScriptedEngine, events_of

from noria.config import SchedulerConfig, ServerOptions
from noria.core.events import RequestEvent
from noria.core.plan import TokenLogprobs
from noria.fakes.tokenizer import ByteTokenizer
from noria.sampling import SamplingParams
from noria.server.bodies import ChatBody, CompletionBody
from noria.server.calls import Calls
from noria.server.chat import ChatApi
from noria.server.completions import CompletionsApi
from noria.server.endpoint import GenerationEndpoint
from noria.server.keys import Keys
from noria.server.state import Phase, ServerState
from noria.server.writing import LARGE_ANSWER, whole_answer

PROMPT = b"once more " * 300


@pytest.mark.anyio
async def test_a_long_answer_is_written_beside_the_event_loop() -> None:
    api: Any = SimpleNamespace(answer=lambda generation: threading.get_ident(), shows_prompts=False)
    generation: Any = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1])])
    scored, plain = SamplingParams(max_tokens=1, prompt_logprobs=1), SamplingParams(max_tokens=1)
    here = threading.get_ident()
    long = [[1] * LARGE_ANSWER]
    assert await whole_answer(api, generation, [[1] * 10], scored) == here
    assert await whole_answer(api, generation, long, scored) != here
    assert await whole_answer(api, generation, long, plain) == here
    api.shows_prompts = True
    assert await whole_answer(api, generation, long, plain) != here


def wide(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1, tuple((other, -0.5 - other) for other in range(20)))


class AcceptingEngine(ScriptedEngine):
    async def accepted(self) -> None:
        pass


@pytest.fixture
def state() -> Iterator[ServerState]:
    state = ServerState(ServerOptions(), Keys(ServerOptions()), names=("m",), phase=Phase.READY)
    state.tokenizer = ByteTokenizer()
    state.config = SchedulerConfig(max_model_len=2**15, num_blocks=2**12, block_size=16)
    yield state
    state.text_work.close()


async def turns_before_each_chunk(
    state: ServerState, body: dict[str, Any], bunches: Sequence[Sequence[RequestEvent]]
) -> tuple[list[int], bytes]:
    """How often the event loop came round while each part of a stream but the last was made; and what was sent."""
    state.engine = AcceptingEngine(bunches)  # type: ignore[assignment]
    is_chat = "messages" in body
    endpoint = GenerationEndpoint(
        state, ChatBody if is_chat else CompletionBody, ChatApi if is_chat else CompletionsApi
    )
    raw = [json.dumps(body | {"stream": True}).encode()]
    turns: list[int] = []
    num_turns, sent = 0, b""

    async def receive() -> dict[str, Any]:
        if not raw:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": raw.pop(), "more_body": False}

    async def send(message: Any) -> None:
        nonlocal sent
        turns.append(num_turns)
        sent += message.get("body", b"")

    async def count() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    counting = asyncio.create_task(count())
    await Calls(endpoint, access_log=False)({"type": "http", "headers": [], "method": "POST"}, receive, send)
    counting.cancel()
    return [after - before for before, after in pairwise(turns)][:-1], sent


@pytest.mark.anyio
async def test_a_prompt_that_is_streamed_with_its_log_probabilities_does_not_hold_the_loop(state: ServerState) -> None:
    scores = RequestEvent("0", prompt_logprobs=tuple(wide(token_id) for token_id in PROMPT[1:]))
    body = {"prompt": PROMPT.decode(), "echo": True, "logprobs": 20, "max_tokens": 2}
    turns, sent = await turns_before_each_chunk(state, body, [[scores], events_of(0, list(b"xy"), [1])])
    assert max(turns) >= 5
    events = [json.loads(data.removeprefix(b"data: ")) for data in sent.split(b"\n\n")[:-2]]
    assert [event["choices"][0]["text"] for event in events] == [PROMPT.decode(), "x", "y"]
    assert len(events[0]["choices"][0]["logprobs"]["top_logprobs"]) == len(PROMPT)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [{"prompt": "x", "logprobs": 20}, {"messages": [], "logprobs": True}])
async def test_many_tokens_at_once_do_not_either(state: ServerState, kind: dict[str, Any]) -> None:
    """As when a client has not read for a while."""
    tokens = [RequestEvent("0", (97,), (wide(97),)) for _ in range(2000)]
    last = events_of(0, [98], [])
    if "messages" in kind:
        kind = kind | {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 20}
    turns, sent = await turns_before_each_chunk(state, kind | {"max_tokens": 2001}, [tokens + last])
    assert max(turns) >= 5
    assert sent.count(b'"a"') >= 2000
    assert sent.endswith(b"data: [DONE]\n\n")


@pytest.mark.anyio
async def test_the_usual_chunk_does_not_wait_for_a_thread(state: ServerState) -> None:
    turns, sent = await turns_before_each_chunk(
        state, {"prompt": "x", "max_tokens": 9}, [[event] for event in events_of(0, list(b"some text"), range(1, 9))]
    )
    assert max(turns) == 0
    assert sent.count(b"data: ") == 10
