"""What clients send: request bodies as msgspec structs, and how bytes become one of them.

Decoding goes in three steps: bytes to plain JSON values (strict: no NaN, no number beyond a float's range, no lone
surrogate), unknown fields set aside (they are named in a response header) or refused (--strict-fields), the rest
converted to the struct of the endpoint. Every problem is an `ApiError` 400 that names the field. Fields that OpenAI or
other servers know and we do not support yet are refused by name, unless they have a value that changes nothing. What a
value means is the business of the endpoints (`noria.server.api`) and of `SamplingParams`.
"""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

import msgspec

from noria.server.errors import ApiError
from noria.server.field_errors import as_field_error
from noria.server.gate import check_depth, too_deep


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
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    # Accepted because clients send them; nothing here depends on them.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    spaces_between_special_tokens: bool | None = None  # texts have the spaces that their tokens have, and no others

    @property
    def wants_usage(self) -> bool:
        """Whether a stream should end with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether every chunk of a stream should tell the usage so far."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionBody(GenerationBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


class ChatBody(GenerationBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


_NOT_YET: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "ebnf": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": ("",),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "stop_regex": ("", []),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Known fields that are refused, with the values (besides null) at which they change nothing."""

MAX_NAME_CHARACTERS = 64
"""Of an unknown field's name in an error."""

Body = TypeVar("Body", bound=msgspec.Struct)


def decode_body(raw: bytes, kind: type[Body], *, is_strict: bool = False) -> tuple[Body, list[str]]:
    """The body, and the names of fields that nobody here knows, of which a strict one has none. Raises `ApiError`."""
    if not raw or raw.isspace():
        raise ApiError(400, f"the body is empty: {_expected(kind)} was expected", code="invalid_json")
    try:
        values = msgspec.json.decode(raw)
    except RecursionError:
        raise too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(values, dict):
        raise ApiError(400, f"the body must be {_expected(kind)}", code="invalid_json")
    check_depth(values, raw)
    known = _field_names(kind)
    ignored = []
    for name, value in values.items():
        if name in known:
            if name == "stream_options" and isinstance(value, dict):
                ignored += [f"{name}.{option}" for option in value if option not in _field_names(StreamOptions)]
            continue
        if name not in _NOT_YET:
            ignored.append(name)
        elif value is not None and value not in _NOT_YET[name]:
            raise ApiError(400, f"{name} is not supported yet", param=name, code="unsupported_parameter")
    if is_strict and ignored:
        raise _unknown_field(ignored[0], known)
    try:
        return msgspec.convert(values, kind), ignored
    except msgspec.ValidationError as error:
        raise as_field_error(str(error), kind, values) from error


def _expected(kind: type[msgspec.Struct]) -> str:
    """What a body must be, in words."""
    required = [field.encode_name for field in msgspec.structs.fields(kind) if field.required]
    return "a JSON object" + (f" with at least {' and '.join(required)}" if required else "")


def _unknown_field(name: str, known: set[str]) -> ApiError:
    options = {f"stream_options.{option}" for option in _field_names(StreamOptions)}
    close = difflib.get_close_matches(name, options if name.startswith("stream_options.") else known, n=1)
    hint = f"did you mean {close[0]}?" if close else "leave it out"
    message = f"there is no field {name[:MAX_NAME_CHARACTERS]!r}; {hint} (the server has --strict-fields)"
    return ApiError(400, message, param=name[:MAX_NAME_CHARACTERS], code="unknown_parameter")


def _field_names(kind: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(kind)}
