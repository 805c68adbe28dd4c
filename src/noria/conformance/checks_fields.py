"""Fields with values of a wrong type or out of bounds: each must be refused with 400 or 422, by its name.

One table; each row makes a check that sends all its bad values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from noria.conformance.client import REFUSALS, Server
from noria.conformance.contract import NotSupported, Source, Theme, expect, fail
from noria.conformance.endpoints import CHAT, COMPLETIONS, Endpoint

THEME = Theme("bad fields")

NUMBER = ("hot", [1], {"a": 1})
WHOLE = ("many", [1], {"a": 1}, 1.5)
FLAG = ("perhaps", [1], {"a": 1})
IDS = ("a", {"a": 1}, ["x"], [1.5])

SHARED_TYPES: dict[str, Sequence[Any]] = {
    "temperature": NUMBER,
    "top_p": NUMBER,
    "n": WHOLE,
    "max_tokens": WHOLE,
    "stop": (5, {"a": 1}, [5], [["a"]]),
    "seed": WHOLE,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "logit_bias": ("a", 5, {"65": "much"}),
    "stream": FLAG,
    "stream_options": ("usage", 5, [1]),
    "model": (5, [1], {"a": 1}),
}
SHARED_BOUNDS: dict[str, Sequence[Any]] = {
    "temperature": (-0.1, 1e6),
    "top_p": (-0.1, 1.1),
    "n": (0, -1, 10**9),
    "max_tokens": (-1, 2**70),
    "presence_penalty": (-2.1, 2.1),
    "frequency_penalty": (-2.1, 2.1),
    "logit_bias": ({"65": 101}, {"65": -101}, {"-1": 1}, {"word": 1}),
    "seed": (2**70, -(2**70)),
}
COMPLETIONS_TYPES: dict[str, Sequence[Any]] = {
    "prompt": (5, {"a": 1}, [{"a": 1}], [[["a"]]], [None]),
    "echo": FLAG,
    "best_of": WHOLE,
    "logprobs": WHOLE,
}
COMPLETIONS_BOUNDS: dict[str, Sequence[Any]] = {
    "logprobs": (-1, 10**6),
    "best_of": (0, -1, 10**9),
}
CHAT_TYPES: dict[str, Sequence[Any]] = {
    "messages": ("hello", 5, {"role": "user", "content": "hello"}),
    "logprobs": FLAG,
    "max_completion_tokens": WHOLE,
    "response_format": ("json", 5, [1]),
    "tools": ("all", 5, [5]),
}
CHAT_BOUNDS: dict[str, Sequence[Any]] = {
    "max_completion_tokens": (-1, 2**70),
}
EXTENSION_TYPES: dict[str, Sequence[Any]] = {
    "top_k": WHOLE,
    "min_p": NUMBER,
    "repetition_penalty": NUMBER,
    "min_tokens": WHOLE,
    "ignore_eos": FLAG,
    "stop_token_ids": IDS,
    "allowed_token_ids": IDS,
    "include_stop_str_in_output": FLAG,
    "skip_special_tokens": FLAG,
    "prompt_logprobs": WHOLE,
    "truncate_prompt_tokens": WHOLE,
    "bad_words": (5, {"a": 1}, [5]),
    "priority": WHOLE,
}
EXTENSION_BOUNDS: dict[str, Sequence[Any]] = {
    "top_k": (-2,),
    "min_p": (-0.1, 1.1),
    "repetition_penalty": (-1,),
    "min_tokens": (-1, 2**70),
    "stop_token_ids": ([-1], [2**70]),
    "prompt_logprobs": (-2, 10**6),
}


def refuses(endpoint: Endpoint, field: str, bad: Sequence[Any], server: Server) -> None:
    """Each bad value must be refused, and the refusal must name the field."""
    for value in bad:
        response = server.post(endpoint, **{field: value})
        if response.status == 404 and field != "model" and b"model" not in response.body:
            raise NotSupported(f"there is no {endpoint.path}: {response.shown}")
        statuses = (400, 404, 422) if field == "model" else (400, 422)
        expect(response.status in statuses, f"{field} = {str(value)[:40]} is answered with {response.shown}")
        error = response.error(*statuses)
        named = field in str(error.get("param")) or field in str(error.get("message"))
        expect(named, f"the refusal of {field} = {str(value)[:40]!r} does not name it: {response.shown}")


def refuses_extension(endpoint: Endpoint, field: str, bad: Sequence[Any], good: Any, server: Server) -> None:
    """The same for a field that a server need not know; one that refuses even a good value does not support it."""
    response = server.post(endpoint, **{field: good})
    if response.status in REFUSALS and field.encode() in response.body:
        raise NotSupported(f"{field}: {response.shown}")
    if response.status != 200:
        fail(f"{field} = {good!r} is answered with {response.shown}")
    refuses(endpoint, field, bad, server)


GOOD: dict[str, Any] = {
    "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": False, "stop_token_ids": [1],
    "allowed_token_ids": [65, 66], "include_stop_str_in_output": False, "skip_special_tokens": True,
    "prompt_logprobs": 1, "truncate_prompt_tokens": 4, "bad_words": ["poltergeist"], "priority": 0,
}  # fmt: skip


def _shown(values: Sequence[Any]) -> str:
    return ", ".join(
        f"{value:.0e}" if isinstance(value, int) and abs(value) > 10**6 else str(value) for value in values
    )


def _add_all() -> None:
    for endpoint, own_types, own_bounds in (
        (COMPLETIONS, COMPLETIONS_TYPES, COMPLETIONS_BOUNDS),
        (CHAT, CHAT_TYPES, CHAT_BOUNDS),
    ):
        for kind, table in (("type", SHARED_TYPES | own_types), ("bounds", SHARED_BOUNDS | own_bounds)):
            for field, bad in table.items():
                name = f"{endpoint.name}-{field.replace('_', '-')}-{kind}"
                expected = f"`{field}` is refused by name: {_shown(bad)}"
                THEME.add(name, expected, Source.OPENAI, partial(refuses, endpoint, field, bad))
    top_logprobs = partial(_refuses_top_logprobs, bad=(-1, 21, "many", 1.5))
    THEME.add("chat-top-logprobs-bounds", "`top_logprobs` is refused by name: -1, 21, many, 1.5", Source.OPENAI,
              top_logprobs)  # fmt: skip
    for kind, table in (("type", EXTENSION_TYPES), ("bounds", EXTENSION_BOUNDS)):
        for field, bad in table.items():
            run = partial(refuses_extension, COMPLETIONS, field, bad, GOOD[field])
            name = f"completions-{field.replace('_', '-')}-{kind}"
            THEME.add(name, f"`{field}`, if known, is refused by name: {_shown(bad)}", Source.EXTENSION, run, (field,))


def _refuses_top_logprobs(server: Server, bad: Sequence[Any]) -> None:
    for value in bad:
        error = server.refusal(CHAT, logprobs=True, top_logprobs=value)
        named = "top_logprobs" in f"{error.get('param')} {error.get('message')}"
        expect(named, f"the refusal of top_logprobs = {value!r} does not name it: {error}")


_add_all()
