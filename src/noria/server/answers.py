"""What the generating endpoints answer, as msgspec structs: whole answers, and the chunks of streams.

What may be unset is there only if it was asked for, or has something to tell. All else is always there, null or not:
/openapi.json is made from these structs and says so. Numbers in them are finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from noria.core.events import FinishReason

TokenIds: TypeAlias = Sequence[int]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    """Token counts of a call. A prompt counts once, however many sequences it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(msgspec.Struct):
    """vLLM's extension: one possibility at one place of a prompt. `rank` 1 is the most probable token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""For each prompt token a map from token ids; null for the first, which nothing comes before."""


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry per token; `text_offset` says how many characters of the choice's text come before.

    The first token of an echoed prompt has no log-probability: null stands there.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    """A choice, or in a stream what is new of it. `finish_reason` is null until it has ended."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET
    token_ids: TokenIds | UnsetType = UNSET


class CompletionAnswer(msgspec.Struct, kw_only=True):
    """An answer of /v1/completions; a chunk of its streams has the same form, and a usage only where it tells one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: Sequence[CompletionChoice]
    usage: Usage | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """A token's text, and its exact bytes: half a character has bytes, but no text."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: TokenIds | UnsetType = UNSET


class ChatAnswer(msgspec.Struct, kw_only=True):
    """An answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: Sequence[ChatChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    """What is new of a message. The first of a choice says who speaks."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: TokenIds | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """A chunk of a stream of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: Sequence[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET


Answer: TypeAlias = CompletionAnswer | ChatAnswer | ChatChunk
