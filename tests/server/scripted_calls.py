"""Calls to both endpoints without HTTP or an engine: events in given bunches, answers as clients see them."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from noria.config import ServerOptions
from noria.core.events import FinishReason, RequestEvent
from noria.core.plan import TokenLogprobs
from noria.engine.messages import EngineRequest
from noria.fakes.tokenizer import ByteTokenizer
from noria.kv.prefix import PrefixKey
from noria.server.api import GenerationApi
from noria.server.bodies import ChatBody, CompletionBody, decode_body
from noria.server.chat import ChatApi
from noria.server.completions import CompletionsApi
from noria.server.generation import Generation
from noria.server.served import ServedModel
from noria.server.text_work import TextWork

Result = TypeVar("Result")

MODEL = ServedModel("scripted", ByteTokenizer(), 512, TextWork(ServerOptions()))
EOS = (ByteTokenizer.EOS,)


def logprob_of(token_id: int, position: int) -> TokenLogprobs:
    """Made up, but different for all, and the token itself is not always the most probable."""
    top = ((token_id + 1) % 256, -0.25 - position), (token_id, -0.5 - position)
    return TokenLogprobs(token_id, -0.5 - position, 2, top)


class ScriptedEngine:
    """Stands in for `AsyncEngine`: whatever is opened, the events come in these bunches.

    An event's `request_id` is the number of its choice. `ended` has the choices that were ended from outside.
    """

    def __init__(self, bunches: Sequence[Sequence[RequestEvent]]) -> None:
        self._bunches = bunches
        self._requests: list[EngineRequest] = []
        self.ended: list[int] = []

    def judge(self, prompt_token_ids: Sequence[int], max_tokens: int | None) -> None:
        pass

    def open(self, requests: list[EngineRequest], **limits: Any) -> ScriptedEngine:
        self._requests = requests
        return self

    def finish(self, stream: Any, request_id: str, reason: FinishReason) -> None:
        self.ended.append([request.request_id for request in self._requests].index(request_id))

    def close(self, stream: Any) -> None:
        pass

    def __aiter__(self) -> Any:
        return self._events()

    async def _events(self) -> Any:
        for bunch in self._bunches:
            yield [replace_id(event, self._requests[int(event.request_id)].request_id) for event in bunch]


def replace_id(event: RequestEvent, request_id: str) -> RequestEvent:
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    return RequestEvent(**fields | {"request_id": request_id})


def events_of(
    choice: int, token_ids: Sequence[int], cuts: Sequence[int], finish_reason: FinishReason = FinishReason.LENGTH
) -> list[RequestEvent]:
    """One sequence's tokens, cut before those positions. A cut at the end gives the end an event of its own."""
    bounds = [0, *cuts, len(token_ids)]
    events = []
    for index, (start, end) in enumerate(pairwise(bounds)):
        events.append(
            RequestEvent(
                str(choice),
                tuple(token_ids[start:end]),
                tuple(logprob_of(token_ids[position], position) for position in range(start, end)),
                finish_reason if index == len(bounds) - 2 else None,
            )
        )
    return events


def make_api(body: dict[str, Any]) -> GenerationApi:
    raw = json.dumps(body).encode()
    if "messages" in body:
        return ChatApi(decode_body(raw, ChatBody)[0], MODEL)
    return CompletionsApi(decode_body(raw, CompletionBody)[0], MODEL)


def answer(body: dict[str, Any], bunches: Sequence[Sequence[RequestEvent]]) -> Any:
    """The whole answer, as JSON."""
    api, generation, _ = start(body, bunches)
    run(generation.wait())
    return json.loads(api.answer(generation))


def stream(body: dict[str, Any], bunches: Sequence[Sequence[RequestEvent]]) -> list[Any]:
    """The chunks of a stream, as JSON."""
    api, generation, _ = start(body | {"stream": True}, bunches)

    async def chunks() -> list[bytes]:
        made = api.opening(generation)
        async for bunch in generation.news():
            made += api.chunks(bunch)
        return made + api.closing()

    return [json.loads(chunk) for chunk in run(chunks())]


def start(
    body: dict[str, Any], bunches: Sequence[Sequence[RequestEvent]]
) -> tuple[GenerationApi, Generation, ScriptedEngine]:
    api, engine = make_api(body), ScriptedEngine(bunches)
    sampling = api.sampling()
    generation = Generation(
        engine,  # type: ignore[arg-type]
        MODEL.tokenizer,
        EOS,
        api.encode_prompts(),
        sampling,
        call_id=api.call_id,
        prefix_key=PrefixKey(),
    )
    return api, generation, engine


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """To its end: nothing here ever waits."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        value: Result = ended.value
        return value
    raise AssertionError("it waits for something")


def assembled(chunks: list[Any], whole: Any) -> Any:
    """What a client makes of a stream: the answer that `whole` should be, but for ids, times and kinds."""
    choices: dict[int, Any] = {}
    usage, prompt_token_ids = None, None
    for chunk in chunks:
        usage = chunk.get("usage", usage)
        prompt_token_ids = chunk.get("prompt_token_ids", prompt_token_ids)
        for told in chunk["choices"]:
            add_to(choices.setdefault(told["index"], {}), told)
    answer = {"choices": [choices[index] for index in sorted(choices)], "usage": usage}
    return answer | ({} if prompt_token_ids is None else {"prompt_token_ids": prompt_token_ids})


def add_to(known: dict[str, Any], told: dict[str, Any]) -> None:
    """Adds a chunk's choice to what is known of that choice: texts and lists are joined, the rest is overwritten."""
    told = dict(told)
    if (delta := told.pop("delta", None)) is not None:
        told["message"] = {"content": "", "refusal": None} | delta
    for name, value in told.items():
        before = known.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            add_to(before, value)
        elif isinstance(value, list) or name in ("text", "content"):
            known[name] = value if before is None else before + value
        elif value is not None or name not in known:
            known[name] = value


def comparable(answer: Any) -> Any:
    """An answer without what is its own: id, time, kind and model."""
    return {name: answer[name] for name in answer if name not in ("id", "created", "object", "model")}


def all_cuts(length: int) -> Iterator[list[int]]:
    """Every way to cut a row of so many things."""
    for chosen in range(1 << max(0, length - 1)):
        yield [position for position in range(1, length) if chosen >> (position - 1) & 1]
