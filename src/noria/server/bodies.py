"""What clients send: request bodies as msgspec structs, and how bytes become one of them.

Decoding goes in three steps: bytes to plain JSON values (strict: no NaN), unknown fields set aside (they are named
in a response header), the rest converted to the struct of the endpoint. Every problem is an `ApiError` 400 that
names the field. Fields that OpenAI or other servers know and we do not support yet are refused by name, unless they
have a value that changes nothing.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from noria.sampling import SamplingParams
from noria.server.errors import ApiError
from noria.server.gate import check_depth


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """Fields that both generating endpoints share. None, or a missing field, means the default."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    # Accepted because clients send them; nothing here depends on them.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def sampling(self, *, logprobs: int | None, max_tokens: int | None) -> SamplingParams:
        """The sampling parameters. Raises `RequestError` naming the field that is out of bounds."""
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        given |= {"logprobs": logprobs, "max_tokens": max_tokens}
        given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given["stop_token_ids"] = tuple(self.stop_token_ids or ())
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    @property
    def wants_usage(self) -> bool:
        """Whether a stream should end with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


_SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens",
)  # fmt: skip


class CompletionBody(GenerationBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None


class ChatBody(GenerationBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


_NOT_YET: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "verbosity": (),
    "web_search_options": (),
}
"""Known fields that are refused, with the values (besides null) at which they change nothing."""

Body = TypeVar("Body", bound=msgspec.Struct)


def decode_body(raw: bytes, kind: type[Body]) -> tuple[Body, list[str]]:
    """The body, and the names of fields that nobody here knows. Raises `ApiError`."""
    try:
        values = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(values, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    check_depth(values, raw)
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    ignored = []
    for name, value in values.items():
        if name in known:
            continue
        if name not in _NOT_YET:
            ignored.append(name)
        elif value is not None and value not in _NOT_YET[name]:
            raise ApiError(400, f"{name} is not supported yet", param=name, code="unsupported_parameter")
    try:
        return msgspec.convert(values, kind), ignored
    except msgspec.ValidationError as error:
        raise as_field_error(str(error)) from error


def as_field_error(message: str) -> ApiError:
    """msgspec says "Expected `int | null`, got `str` - at `$.max_tokens`": the path becomes `param`."""
    found = re.search(r" - at `\$\.?([^`]*)`$", message)
    if found:
        param = found[1]
        return ApiError(400, f"{param}: {message[: found.start()]}", param=param, code="invalid_type")
    found = re.search(r"missing required field `([^`]*)`", message)
    if found:
        return ApiError(400, f"{found[1]} is required", param=found[1], code="missing_required_parameter")
    return ApiError(400, message, code="invalid_type")
