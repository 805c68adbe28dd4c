"""Log-probabilities: their shape at both endpoints, and that they belong to the text beside them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from noria.conformance.client import Server
from noria.conformance.contract import Source, Theme, expect
from noria.conformance.endpoints import CHAT, COMPLETIONS, Endpoint

THEME = Theme("logprobs")
BOTH = (COMPLETIONS, CHAT)
NEEDS = ("logprobs",)
SLACK = 1e-4
"""Of one log-probability against another: servers round them."""


def wish(endpoint: Endpoint, top: int) -> dict[str, Any]:
    """The fields that ask for log-probabilities with so many alternatives."""
    return {"logprobs": top} if endpoint is COMPLETIONS else {"logprobs": True, "top_logprobs": top}


def _asked(server: Server, endpoint: Endpoint, top: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """An answer with log-probabilities, and its choice."""
    _, answer = server.long_answer(endpoint, **wish(endpoint, top))
    choice = answer["choices"][0]
    expect(choice.get("logprobs"), "the choice has no logprobs")
    return answer, choice


def values(endpoint: Endpoint, logprobs: dict[str, Any]) -> list[float]:
    """The log-probability of each token."""
    if endpoint is COMPLETIONS:
        return list(logprobs["token_logprobs"])
    return [position["logprob"] for position in logprobs["content"]]


def tops(endpoint: Endpoint, logprobs: dict[str, Any]) -> list[list[float]]:
    """Those of the alternatives at each position, greatest first."""
    if endpoint is COMPLETIONS:
        return [sorted(position.values(), reverse=True) for position in logprobs["top_logprobs"]]
    return [[other["logprob"] for other in position["top_logprobs"]] for position in logprobs["content"]]


def token_bytes(endpoint: Endpoint, logprobs: dict[str, Any]) -> list[bytes]:
    if endpoint is COMPLETIONS:
        return [token.encode() for token in logprobs["tokens"]]
    return [
        position["token"].encode() if position.get("bytes") is None else bytes(position["bytes"])
        for position in logprobs["content"]
    ]


@THEME.check_each("every log-probability is a finite number, at most 0", Source.OPENAI, *BOTH, needs=NEEDS)
def logprobs_at_most_0(server: Server, endpoint: Endpoint) -> None:
    given = values(endpoint, _asked(server, endpoint, 2)[1]["logprobs"])
    expect(
        all(isinstance(value, int | float) and math.isfinite(value) and value <= SLACK for value in given), f"{given}"
    )


@THEME.check_each("there is one for each token of the answer", Source.OPENAI, *BOTH, needs=NEEDS)
def logprobs_per_token(server: Server, endpoint: Endpoint) -> None:
    answer, choice = _asked(server, endpoint, 1)
    given, count = len(values(endpoint, choice["logprobs"])), answer["usage"]["completion_tokens"]
    expect(given == count, f"{given} log-probabilities for {count} tokens")


@THEME.check_each("the tokens joined are the text", Source.OPENAI, *BOTH, needs=NEEDS)
def logprobs_tokens(server: Server, endpoint: Endpoint) -> None:
    choice = _asked(server, endpoint, 1)[1]
    joined = b"".join(token_bytes(endpoint, choice["logprobs"])).decode(errors="replace")
    text = endpoint.text(choice)
    whole = text.rstrip("\ufffd")  # a last character may be there by half
    expect(joined.strip().startswith(whole.strip()), f"the tokens make {joined!r}, the text is {text!r}")


@THEME.check_each("the alternatives come in descending order, as many as asked", Source.OPENAI, *BOTH, needs=NEEDS)
def logprobs_top(server: Server, endpoint: Endpoint) -> None:
    for number, top in enumerate(tops(endpoint, _asked(server, endpoint, 3)[1]["logprobs"])):
        # OpenAI's completions may have the chosen token beside the most probable; equal texts share an entry.
        most, least = (4, 1) if endpoint is COMPLETIONS else (3, 3)
        expect(least <= len(top) <= most, f"{len(top)} alternatives at token {number} with 3 asked")
        expect(all(a >= b for a, b in pairwise(top)), f"not descending at token {number}: {top}")


@THEME.check_each("a greedy token is the most probable of its alternatives", Source.OPENAI, *BOTH, needs=NEEDS)
def logprobs_greedy(server: Server, endpoint: Endpoint) -> None:
    logprobs = _asked(server, endpoint, 3)[1]["logprobs"]
    for number, (value, top) in enumerate(zip(values(endpoint, logprobs), tops(endpoint, logprobs), strict=True)):
        expect(abs(value - top[0]) <= SLACK, f"token {number} has {value}, the best alternative {top[0]}")


@THEME.check_each("the alternatives' probabilities are at most 1 together", Source.OPENAI, *BOTH, needs=NEEDS)
def logprobs_sum(server: Server, endpoint: Endpoint) -> None:
    for number, top in enumerate(tops(endpoint, _asked(server, endpoint, 3)[1]["logprobs"])):
        total = sum(map(math.exp, top))
        expect(total <= 1 + 1e-3, f"the alternatives at token {number} have {total} together")


@THEME.check_each("they change nothing of the text", Source.OPENAI, *BOTH, needs=NEEDS)
def logprobs_change_nothing(server: Server, endpoint: Endpoint) -> None:
    plain, other = server.text(endpoint), server.text(endpoint, **wish(endpoint, 2))
    expect(plain == other, f"{other!r} with logprobs, {plain!r} without")


@THEME.check_each("none where none were asked", Source.OPENAI, *BOTH)
def logprobs_absent(server: Server, endpoint: Endpoint) -> None:
    given = server.answer(endpoint)["choices"][0].get("logprobs")
    expect(given is None, f"logprobs are {str(given)[:80]}")


@THEME.check_each("a stream has the same ones as a whole answer", Source.OPENAI, *BOTH, needs=NEEDS)
def logprobs_stream(server: Server, endpoint: Endpoint) -> None:
    whole = server.answer(endpoint, **wish(endpoint, 1))["choices"][0]["logprobs"]
    given = [choice.get("logprobs") for choice in server.stream(endpoint, **wish(endpoint, 1)).choices()]
    tokens = [token for logprobs in given if logprobs for token in token_bytes(endpoint, logprobs)]
    expect(tokens == token_bytes(endpoint, whole), f"tokens {tokens} are streamed")
    streamed = [value for logprobs in given if logprobs for value in values(endpoint, logprobs)]
    for value, other in zip(streamed, values(endpoint, whole), strict=True):
        expect(abs(value - other) < 0.05, f"{value} is streamed, {other} answered")


@THEME.check_each("with stop strings, no token of the dropped text but those that reach into it", Source.OURS, *BOTH)
def logprobs_stop(server: Server, endpoint: Endpoint) -> None:
    fields, answer = server.long_answer(endpoint)
    text = endpoint.text(answer["choices"][0])
    stop = text[len(text) // 2 :][:2]
    given = server.needing(NEEDS).answer(endpoint, **fields, stop=stop, **wish(endpoint, 1))
    logprobs = given["choices"][0].get("logprobs")
    expect(logprobs, "the choice has no logprobs")
    count, used = len(values(endpoint, logprobs)), given["usage"]["completion_tokens"]
    expect(count <= used < 16, f"{count} log-probabilities, {used} tokens, where 16 would be without the stop string")


@THEME.check("a completion's logprobs are parallel lists", Source.OPENAI, needs=NEEDS)
def completions_logprobs_lists(server: Server) -> None:
    logprobs = _asked(server, COMPLETIONS, 2)[1]["logprobs"]
    lengths = {name: len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    expect(len(set(lengths.values())) == 1, f"lengths {lengths}")


@THEME.check("text_offset is where each token begins in the text", Source.OPENAI, needs=NEEDS)
def completions_text_offset(server: Server) -> None:
    logprobs = _asked(server, COMPLETIONS, 1)[1]["logprobs"]
    offsets, tokens = logprobs["text_offset"], logprobs["tokens"]
    for i, (a, b) in enumerate(pairwise(offsets)):
        expect(b - a == len(tokens[i]), f"token {i} is {tokens[i]!r}, at {a}; the next begins at {b}")


@THEME.check("logprobs: 0 gives those of the chosen tokens", Source.OPENAI, needs=NEEDS)
def completions_logprobs_0(server: Server) -> None:
    answer, choice = _asked(server, COMPLETIONS, 0)
    count = len(choice["logprobs"]["token_logprobs"])
    expect(count == answer["usage"]["completion_tokens"], f"{count} of them")


@THEME.check("a chat's tokens have their text, bytes and alternatives", Source.OPENAI, needs=NEEDS)
def chat_logprobs_shape(server: Server) -> None:
    for position in _asked(server, CHAT, 2)[1]["logprobs"]["content"]:
        missing = {"token", "logprob", "bytes", "top_logprobs"} - set(position)
        expect(not missing, f"a token has no {sorted(missing)}")
        for other in position["top_logprobs"]:
            missing = {"token", "logprob", "bytes"} - set(other)
            expect(not missing, f"an alternative has no {sorted(missing)}")


@THEME.check("a token's bytes are its text's, where it is no half character", Source.OPENAI, needs=NEEDS)
def chat_logprobs_bytes(server: Server) -> None:
    for position in _asked(server, CHAT, 1)[1]["logprobs"]["content"]:
        given = bytes(position["bytes"])
        if "\ufffd" not in position["token"]:
            expect(given == position["token"].encode(), f"{position['token']!r} has bytes {given!r}")


@THEME.check("logprobs without top_logprobs have no alternatives", Source.OPENAI, needs=NEEDS)
def chat_logprobs_without_top(server: Server) -> None:
    logprobs = server.answer(CHAT, logprobs=True)["choices"][0]["logprobs"]
    counts = {len(position["top_logprobs"]) for position in logprobs["content"]}
    expect(counts == {0}, f"there are {sorted(counts)} alternatives")


@THEME.check("top_logprobs without logprobs is refused", Source.OPENAI)
def chat_top_logprobs_alone(server: Server) -> None:
    server.refusal(CHAT, top_logprobs=2)
