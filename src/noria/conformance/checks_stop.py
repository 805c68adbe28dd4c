"""Stop strings: where the text ends, what is left of it, and that streams agree."""

from __future__ import annotations

from typing import Any

from noria.conformance.client import Server
from noria.conformance.contract import Source, Theme, Unmet, expect
from noria.conformance.endpoints import CHAT, COMPLETIONS, Endpoint

THEME = Theme("stop strings")
BOTH = (COMPLETIONS, CHAT)
NEVER = "\u241e never said \u241e"
"""A text that no model says."""


def pick(text: str, length: int, begin: int) -> str:
    """A part of the text to stop at, from `begin` or a little later: no half characters, not only spaces."""
    for start in range(begin, len(text) - length + 1):
        part = text[start : start + length]
        if "\ufffd" not in part and part.strip():
            return part
    raise Unmet(f"nothing in {text!r} can be a stop string")


def _stopped(server: Server, endpoint: Endpoint, length: int) -> tuple[dict[str, Any], str, str, str]:
    """The prompt's fields, the whole text, a stop string in its middle, and what must be left of the text."""
    fields, answer = server.long_answer(endpoint)
    text = endpoint.text(answer["choices"][0])
    stop = pick(text, length, len(text) // 2)
    return fields, text, stop, text[: text.index(stop)]


@THEME.check_each("the text ends before the stop string", Source.OPENAI, *BOTH)
def stop_string(server: Server, endpoint: Endpoint) -> None:
    fields, text, stop, left = _stopped(server, endpoint, 3)
    stopped = server.text(endpoint, **fields, stop=stop)
    expect(stop not in stopped, f"{stop!r} is in {stopped!r}")
    expect(stopped == left, f"{stopped!r} is left of {text!r} with stop {stop!r}")


@THEME.check_each("a stop string may be a single character", Source.OPENAI, *BOTH)
def stop_character(server: Server, endpoint: Endpoint) -> None:
    fields, text, stop, left = _stopped(server, endpoint, 1)
    stopped = server.text(endpoint, **fields, stop=stop)
    expect(stopped == left, f"{stopped!r} is left of {text!r} with stop {stop!r}")


@THEME.check_each("finish_reason is stop when a stop string ended it", Source.OPENAI, *BOTH)
def stop_finish_reason(server: Server, endpoint: Endpoint) -> None:
    fields, _, stop, _ = _stopped(server, endpoint, 3)
    reason = server.answer(endpoint, **fields, stop=stop)["choices"][0]["finish_reason"]
    expect(reason == "stop", f"finish_reason is {reason!r}")


@THEME.check_each("of several stop strings the first in the text counts", Source.OPENAI, *BOTH)
def stop_list(server: Server, endpoint: Endpoint) -> None:
    fields, text, later, _ = _stopped(server, endpoint, 2)
    sooner = pick(text, 2, len(text) // 4)
    left = text[: min(text.index(sooner), text.index(later))]
    stopped = server.text(endpoint, **fields, stop=[NEVER, later, sooner])
    expect(stopped == left, f"{stopped!r} is left of {text!r} with stop {[NEVER, later, sooner]}")


@THEME.check_each("four stop strings are accepted", Source.OPENAI, *BOTH)
def four_stop_strings(server: Server, endpoint: Endpoint) -> None:
    server.answer(endpoint, stop=[f"{NEVER}{i}" for i in range(4)])


@THEME.check_each("a stop string that does not occur changes nothing", Source.OPENAI, *BOTH)
def stop_absent(server: Server, endpoint: Endpoint) -> None:
    fields, answer = server.long_answer(endpoint)
    text = endpoint.text(answer["choices"][0])
    for stop in (NEVER, text[-3:] + NEVER):
        choice = server.answer(endpoint, **fields, stop=stop)["choices"][0]
        expect(endpoint.text(choice) == text, f"{endpoint.text(choice)!r} instead of {text!r} with stop {stop!r}")
        expect(choice["finish_reason"] == "length", f"finish_reason is {choice['finish_reason']!r}")


@THEME.check_each("an empty list of stop strings is none", Source.OPENAI, *BOTH)
def stop_empty_list(server: Server, endpoint: Endpoint) -> None:
    plain, other = server.text(endpoint), server.text(endpoint, stop=[])
    expect(plain == other, f"{other!r} instead of {plain!r}")


@THEME.check_each("tokens after the stop string are not made, and not counted", Source.OURS, *BOTH)
def stop_usage(server: Server, endpoint: Endpoint) -> None:
    fields, _, stop, _ = _stopped(server, endpoint, 2)
    count = server.answer(endpoint, **fields, stop=stop)["usage"]["completion_tokens"]
    expect(0 < count < 16, f"{count} tokens of 16 although a stop string stands in the middle")


@THEME.check_each("a stream with stop strings makes the same text as a whole answer", Source.OPENAI, *BOTH)
def stop_stream(server: Server, endpoint: Endpoint) -> None:
    for length in (1, 4):
        fields, text, stop, left = _stopped(server, endpoint, length)
        stream = server.stream(endpoint, **fields, stop=stop)
        streamed = stream.text(endpoint)
        expect(streamed == left, f"{streamed!r} is streamed of {text!r} with stop {stop!r}")
        expect(stream.finish_reason() == "stop", f"finish_reason is {stream.finish_reason()!r}")


@THEME.check_each("what only began like a stop string is streamed in the end", Source.OPENAI, *BOTH)
def stop_held_back(server: Server, endpoint: Endpoint) -> None:
    fields, answer = server.long_answer(endpoint)
    text = endpoint.text(answer["choices"][0])
    streamed = server.stream(endpoint, **fields, stop=text[-4:] + NEVER).text(endpoint)
    expect(streamed == text, f"{streamed!r} is streamed of {text!r}")


@THEME.check_each("stop strings end each of n choices for itself", Source.OPENAI, *BOTH, needs=("n",))
def stop_with_n(server: Server, endpoint: Endpoint) -> None:
    fields, _, stop, _ = _stopped(server, endpoint, 3)
    choices = server.answer(endpoint, **fields, stop=stop, n=2)["choices"]
    expect(len(choices) == 2, f"{len(choices)} choices with n 2")
    for choice in choices:
        expect(stop not in endpoint.text(choice), f"{stop!r} is in {endpoint.text(choice)!r}")
        expect(choice["finish_reason"] == "stop", f"finish_reason is {choice['finish_reason']!r}")
