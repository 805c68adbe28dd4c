"""What tests over long or odd histories share: an oracle for outputs, guessers, slow grammars, and what must be left
of a scheduler when everything is over."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from worlds import EOS, World

from noria.core.events import FinishReason
from noria.core.gates import Refused
from noria.core.plan import StepPlan
from noria.core.request import Request
from noria.core.scheduler import Scheduler
from noria.fakes.runner import arithmetic_token

STOP_IDS = tuple(range(100, 1100, 17))
"""Some of the tokens that the scripted runner says; as stop tokens they end about every seventeenth output early."""


def said_alone(
    prompt: Sequence[int], max_tokens: int, stop_ids: Collection[int] = ()
) -> tuple[list[int], FinishReason]:
    """What the scripted runner's arithmetic says after `prompt`, and why it ends. No scheduler takes part."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(arithmetic_token(tokens))
        if tokens[-1] in stop_ids or tokens[-1] == EOS:
            return tokens[len(prompt) :], FinishReason.STOP
    return tokens[len(prompt) :], FinishReason.LENGTH


def prompt_of(request: Request) -> list[int]:
    return request.token_ids[: request.num_prompt_tokens]


def assert_said_as_alone(world: World, outside: Collection[str] = ()) -> None:
    """Every request has ended; with all that it would have said alone and all scores of its prompt, or a part if it was
    ended early.

    `outside`: requests that the test itself ended.
    """
    for request_id, request in world.requests.items():
        output, reason = world.outputs[request_id], world.reasons[request_id]
        scores = list(range(1, request.num_prompt_tokens)) if request.sampling.prompt_logprobs is not None else []
        told = world.scores[request_id]
        alone = said_alone(prompt_of(request), request.max_tokens, request.sampling.stop_token_ids)
        if request_id in outside or reason in (FinishReason.TIMEOUT, FinishReason.ERROR):
            assert output == alone[0][: len(output)], request_id
            assert told == scores[: len(told)], request_id
        else:
            assert (output, reason) == alone, request_id
            assert told == scores, request_id


class FakeGrammar:
    """A grammar whose compilation the test ends."""

    def __init__(self) -> None:
        self.state = "compiling"

    @property
    def is_ready(self) -> bool:
        if self.state == "failed":
            raise Refused("the grammar does not compile")
        return self.state == "ready"


def guess_right(request: Request) -> tuple[int, ...]:
    return _continuation(request, 3)


def guess_half_right(request: Request) -> tuple[int, ...]:
    return (*_continuation(request, 1), 1, 1)


def guess_rubbish(request: Request) -> tuple[int, ...]:
    return (-1, 1 << 40)


def guess_unevenly(request: Request) -> tuple[int, ...]:
    """Right, half right, rubbish or nothing, by the request's length; sometimes more than may be of use."""
    kind = (request.num_tokens + request.arrival_number) % 5
    if kind == 4:
        return _continuation(request, 12)
    return (guess_right, guess_half_right, guess_rubbish, lambda request: ())[kind](request)


def _continuation(request: Request, num_tokens: int) -> tuple[int, ...]:
    return tuple(said_alone(request.token_ids, num_tokens)[0])


def end_of_all(world: World, *, max_steps: int = 5000) -> list[StepPlan]:
    """Resumes and runs until nobody is left and everybody has been told."""
    world.scheduler.resume()
    plans = world.run(max_steps)
    while world.scheduler.has_news:
        plans.append(world.step())
    return plans


def assert_nothing_is_held(scheduler: Scheduler) -> None:
    """As many free blocks as at the start, no table, no promise, no claim."""
    kv = scheduler.kv
    assert kv.pool.num_free_blocks == scheduler.config.num_blocks
    assert (kv._holdings, kv._claims, kv.num_owed_blocks, kv.num_table_entries) == ({}, {}, 0, 0)
    assert (len(scheduler.running), len(scheduler.waiting), scheduler.running.num_computed_tokens) == (0, 0, 0)
    assert scheduler.waiting.num_queued_tokens == 0
    scheduler.check()


def sizes(root: Any) -> dict[str, int]:
    """The length of every container that hangs on `root`, by its path."""
    return {path: len(value) for path, value in _containers(root, type(root).__name__, set())}


def _containers(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict | OrderedDict | list | deque | set):
        yield path, value
        items = list(value.values() if isinstance(value, dict) else value)
        for position, item in enumerate(items):
            yield from _containers(item, f"{path}[{position}]", seen)
    elif isinstance(value, tuple):
        for position, item in enumerate(value):
            yield from _containers(item, f"{path}[{position}]", seen)
    elif type(value).__module__.startswith("noria."):
        slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
        for name in [*slots, *getattr(value, "__dict__", {})]:
            if hasattr(value, name):
                yield from _containers(getattr(value, name), f"{path}.{name}", seen)
