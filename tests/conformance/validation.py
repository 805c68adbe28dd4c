"""What the faulty app takes for valid: one line per field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toy_model import VOCAB_SIZE


class Refused(Exception):
    def __init__(self, param: str | None, message: str, status: int = 400, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high


def whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def flag(value: Any) -> bool:
    return type(value) is bool


def text(value: Any) -> bool:
    return isinstance(value, str)


def mapping(value: Any) -> bool:
    return isinstance(value, dict)


def ids(value: Any) -> bool:
    return isinstance(value, list) and all(whole(0, VOCAB_SIZE - 1)(item) for item in value)


def texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(text, value))


def biases(value: Any) -> bool:
    return isinstance(value, dict) and all(
        key.isdecimal() and int(key) < VOCAB_SIZE and number(-100, 100)(bias) for key, bias in value.items()
    )


def prompts(value: Any) -> bool:
    if not isinstance(value, list):
        return text(value)
    if not value or len(value) > 1000:
        return False
    return texts(value) or ids(value) or all(ids(item) and item for item in value)


def tools(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(tool, dict) and "function" in tool for tool in value)


def format_(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") in ("text", "json_object", "json_schema")


SHARED: dict[str, Callable[[Any], bool]] = {
    "model": text,
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "n": whole(1, 128),
    "max_tokens": whole(0, 2**31),
    "stop": lambda value: text(value) or texts(value),
    "seed": whole(-(2**63), 2**63),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": biases,
    "stream": flag,
    "stream_options": mapping,
    "user": lambda value: True,
    "top_k": whole(-1, 2**31),
    "min_p": number(0, 1),
    "repetition_penalty": number(0.01, 100),
    "min_tokens": whole(0, 2**31),
    "ignore_eos": flag,
    "stop_token_ids": ids,
    "allowed_token_ids": ids,
    "include_stop_str_in_output": flag,
    "skip_special_tokens": flag,
    "bad_words": texts,
    "priority": whole(-100, 100),
    "return_token_ids": flag,
}
COMPLETIONS = SHARED | {
    "prompt": prompts,
    "logprobs": whole(0, 20),
    "echo": flag,
    "best_of": whole(1, 128),
    "suffix": text,
    "prompt_logprobs": whole(0, 20),
    "truncate_prompt_tokens": whole(1, 2**31),
}
CHAT = SHARED | {
    "messages": lambda value: isinstance(value, list) and bool(value) and all(map(mapping, value)),
    "logprobs": flag,
    "top_logprobs": whole(0, 20),
    "max_completion_tokens": whole(0, 2**31),
    "tools": tools,
    "tool_choice": lambda value: text(value) or mapping(value),
    "response_format": format_,
    "chat_template_kwargs": mapping,
    "chat_template": lambda value: False,
    "continue_final_message": flag,
    "add_generation_prompt": flag,
}


def check(body: dict[str, Any], known: dict[str, Callable[[Any], bool]], faults: frozenset[str]) -> dict[str, Any]:
    """Raises `Refused` for the first bad field; faults `accept:FIELD` and `ignore:FIELD` leave it out instead."""
    checked = {}
    for name, value in body.items():
        if f"ignore:{name}" in faults or (value is None and "no-nulls" not in faults):
            continue
        if f"refuse:{name}" in faults:
            raise Refused(None, "no")
        if f"forbid:{name}" in faults:
            raise Refused(name, f"{name} is not supported")
        if name not in known:
            if "refuse-unknown" in faults:
                raise Refused(name, f"{name} is unknown")
        elif known[name](value):
            checked[name] = value
        elif f"accept:{name}" not in faults:
            raise Refused(name, f"{name} cannot be {str(value)[:60]!r}")
    _check_together(checked, faults)
    return checked


def _check_together(body: dict[str, Any], faults: frozenset[str]) -> None:
    """What one field demands of another."""
    if "stream_options" in body and not body.get("stream") and "stream-options-alone" not in faults:
        raise Refused("stream_options", "stream_options needs stream")
    if "best_of" in body and "accept:best_of" not in faults:
        if body["best_of"] < body.get("n", 1):
            raise Refused("best_of", "best_of is less than n")
        if body.get("stream"):
            raise Refused("best_of", "best_of cannot be streamed")
    if "top_logprobs" in body and not body.get("logprobs") and "accept:top_logprobs" not in faults:
        raise Refused("top_logprobs", "top_logprobs needs logprobs")


def check_messages(messages: list[Any], faults: frozenset[str]) -> None:
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if ("refuse-tools-in-history" in faults and role == "tool") or ("refuse-names" in faults and "name" in message):
            raise Refused("messages", "no")
        if role not in ("system", "developer", "user", "assistant", "tool"):
            raise Refused("messages", f"nobody has the role {role!r}")
        if "refuse-empty-content" in faults and content == "":
            raise Refused("messages", "content is empty")
        if content is None and "tool_calls" not in message:
            raise Refused("messages", "content is missing")
        if isinstance(content, list):
            if not all(part.get("type") == "text" for part in content) and "accept:messages" not in faults:
                raise Refused("messages", "a part is no text")
        elif not isinstance(content, str | None):
            raise Refused("messages", "content is no text")
