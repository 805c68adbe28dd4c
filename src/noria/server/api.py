"""How one call is understood and answered, as far as the two generating endpoints have it in common: `GenerationApi`.

A call is understood in two steps, `sampling` and `encode_prompts`, of which the second may take long and runs in any
thread. It is answered either whole (`answer`) or as a stream: `opening`, `chunks` for each bunch of news, `closing`.
No engine, no HTTP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from noria.errors import ContextLengthError
from noria.kv.prefix import PrefixKey
from noria.sampling import SamplingParams
from noria.server.answers import Answer, PromptTokensDetails, Usage
from noria.server.bodies import GenerationBody
from noria.server.envelope import ChunkTemplate, Envelope, new_call_id
from noria.server.errors import ApiError
from noria.server.generation import Generation, News
from noria.server.served import ServedModel
from noria.server.token_texts import TokenTexts
from noria.text.tokenizer import Tokenizer

MAX_ID_CHARACTERS = 256
MAX_SALT_CHARACTERS = 1024
"""It travels with each sequence of a call."""
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 16 * 1024
"""Of all bad words together: they are tokenised while others wait."""


class GenerationApi(ABC):
    """One call to a generating endpoint. `renamed` maps names of `SamplingParams` and the engine to the body's."""

    shows_prompts = False
    """Whether an answer tells the prompts again."""
    ID_PREFIX: ClassVar[str]
    ANSWER: ClassVar[type[Answer]]
    CHUNK: ClassVar[type[Answer]]

    def __init__(self, body: GenerationBody, model: ServedModel, call_id: str | None = None) -> None:
        """Raises `ApiError` for fields that contradict each other. Without a `call_id` it gets a new one."""
        _check_fields(body)
        self.renamed: dict[str, str] = {}
        self.is_abandoned = False
        """Set when nobody waits for an answer any more; looked at between prompts, which are encoded in any thread."""
        self._body = body
        self._model = model
        self._tokenizer = model.tokenizer
        self._texts = TokenTexts(model.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self.call_id = call_id or new_call_id()
        self._envelope = Envelope(self.ID_PREFIX, model.name, self.call_id, body.request_id)
        self._templates: dict[int, ChunkTemplate] = {}
        self._is_plain = not (body.return_token_ids or body.wants_continuous_usage)
        self._num_told = 0
        self._generation: Generation | None = None

    @abstractmethod
    def sampling(self) -> SamplingParams:
        """The sampling parameters. Raises `RequestError` or `ApiError` naming the field that is out of bounds."""

    @abstractmethod
    def encode_prompts(self) -> list[list[int]]:
        """Token ids of each prompt; the same errors."""

    @abstractmethod
    def answer(self, generation: Generation) -> bytes:
        """The whole answer, when all sequences have ended."""

    def prefix_key(self, tenant: str | None) -> PrefixKey:
        """Under which name the KV of these prompts is cached: within a tenant, only who knows the salt finds it."""
        return PrefixKey(tenant=tenant, salt=self._body.cache_salt)

    def opening(self, generation: Generation) -> list[bytes]:
        """The first chunks of a stream; the others are of the same call."""
        self._generation = generation
        return []

    def chunks(self, bunch: Sequence[News]) -> list[bytes]:
        """The chunks for a bunch of news, in order."""
        return [chunk for news in bunch for chunk in self._chunks_of(news)]

    def num_entries(self, bunch: Sequence[News]) -> int:
        """How many tokens and log-probabilities the chunks for a bunch of news will tell."""
        return sum(self._entries_of(news) for news in bunch)

    def _entries_of(self, news: News) -> int:
        if news.logprobs is None:
            return len(news.token_ids)
        return sum(1 + len(position.top) for position in news.logprobs)

    def closing(self) -> list[bytes]:
        """The last chunk: the usage, if it was asked for."""
        assert self._generation is not None
        return [self._envelope.encode(self.CHUNK, [], self._generation.usage)] if self._body.wants_usage else []

    def _chunks_of(self, news: News) -> Iterator[bytes]:
        self._num_told += len(news.token_ids)
        if self._is_plain and news.is_plain:
            if news.text:
                yield self._template(news.choice).fill(news.text)
        elif news.text or news.logprobs or news.finish_reason or (self._body.return_token_ids and news.token_ids):
            yield self._chunk(self._news_choice(news))

    @abstractmethod
    def _plain_choice(self, choice: int) -> Any:
        """A choice with nothing but a text, `TEXT_MARK`."""

    @abstractmethod
    def _news_choice(self, news: News) -> Any:
        """The choice that tells of `news`."""

    def _chunk(self, choice: Any, **extensions: Any) -> bytes:
        usage = self._usage_so_far() if self._body.wants_continuous_usage else None
        return self._envelope.encode(self.CHUNK, [choice], usage, **extensions)

    def _template(self, choice: int) -> ChunkTemplate:
        """For chunks of that choice with nothing but a text."""
        template = self._templates.get(choice)
        if template is None:
            plain = self._plain_choice(choice)
            template = self._templates[choice] = self._envelope.template(self.CHUNK, plain)
        return template

    def _usage_so_far(self) -> Usage:
        """Of the tokens told of in this chunk and those before it: a bunch may have brought more."""
        assert self._generation is not None
        usage = self._generation.usage
        num_prompt = usage.prompt_tokens
        cached = PromptTokensDetails(usage.prompt_tokens_details.cached_tokens)
        return Usage(num_prompt, self._num_told, num_prompt + self._num_told, cached)

    def _make_sampling(
        self, *, n: int | None, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        body = self._body
        given = {name: getattr(body, name) for name in _SAME_IN_SAMPLING}
        given |= {"n": n, "max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        given["stop_token_ids"] = tuple(body.stop_token_ids or ())
        given["allowed_token_ids"] = None if body.allowed_token_ids is None else tuple(body.allowed_token_ids)
        given["logit_bias"] = token_biases(body.logit_bias or {})
        given["bad_words"] = bad_word_spellings(self._tokenizer, body.bad_words or ())
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{**self._model.sampling_defaults, **given})

    @contextmanager
    def _size_bound(self) -> Iterator[int]:
        """The most tokens that a text may have before it is tokenised.

        What `truncate_prompt_tokens` cuts off need not fit, but all of it must be tokenised to cut it.
        """
        most = self._model.max_model_len
        if self._body.truncate_prompt_tokens is None:
            yield most
            return
        most *= TRUNCATED_LENGTHS
        try:
            yield most
        except ContextLengthError as error:
            raise ContextLengthError(
                f"the text has at least {most} tokens, the most it may have before truncate_prompt_tokens cuts it: "
                "cut it before it is sent",
                param=error.param or "prompt",
            ) from None

    def _truncated(self, token_ids: list[int], max_tokens: int | None) -> list[int]:
        """The end of a prompt, of the length that `truncate_prompt_tokens` wants."""
        num_kept = self._body.truncate_prompt_tokens
        if num_kept is None:
            return token_ids
        if num_kept == -1:
            # Where nothing is left for the prompt, its refusal has the numbers.
            num_kept = max(1, self._model.max_model_len - (1 if max_tokens is None else max_tokens))
        return token_ids[-num_kept:]


TRUNCATED_LENGTHS = 4
"""With `truncate_prompt_tokens` a text may be as many times as long as the context can hold."""

_SAME_IN_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
)  # fmt: skip
"""Fields of the body that `SamplingParams` has under the same name and in the same form."""


def token_biases(biases: Mapping[str, float]) -> dict[int, float]:
    """OpenAI's `logit_bias`, whose keys are token ids written as JSON texts, with numbers for keys."""
    for key in biases:
        if not (key.isascii() and key.removeprefix("-").isdigit() and len(key) <= 20 and str(int(key)) == key):
            raise ApiError(
                400,
                f"logit_bias: its keys are token ids such as '50256', and {key[:40]!r} is none",
                param="logit_bias",
                code="invalid_value",
            )
    return {int(key): bias for key, bias in biases.items()}


def bad_word_spellings(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences that write one of the words, at the beginning of a text or behind a space."""
    if len(words) > MAX_BAD_WORDS or sum(map(len, words)) > MAX_BAD_WORD_CHARACTERS:
        raise ApiError(
            400,
            f"bad_words takes up to {MAX_BAD_WORDS} words and {MAX_BAD_WORD_CHARACTERS} characters in all",
            param="bad_words",
            code="invalid_value",
        )
    spellings: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        if not bare:
            raise ApiError(400, "bad_words holds an empty word", param="bad_words", code="invalid_value")
        for text in (bare, " " + bare):
            spellings[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(spellings)


def _check_fields(body: GenerationBody) -> None:
    def refuse(param: str, message: str) -> ApiError:
        return ApiError(400, f"{param} {message}", param=param, code="invalid_value")

    if body.stream_options is not None and not body.stream:
        raise refuse("stream_options", "needs stream to be true")
    if body.prompt_logprobs is not None and body.stream:
        raise refuse("prompt_logprobs", "cannot be streamed: leave stream out")
    num_kept = body.truncate_prompt_tokens
    if num_kept is not None and num_kept != -1 and num_kept < 1:
        raise refuse("truncate_prompt_tokens", "must be at least 1, or -1 for what fits into the context")
    request_id, salt = body.request_id, body.cache_salt
    if request_id is not None and not (
        0 < len(request_id) <= MAX_ID_CHARACTERS and request_id.isascii() and request_id.isprintable()
    ):
        raise refuse("request_id", f"must be 1 to {MAX_ID_CHARACTERS} printable ASCII characters")
    if salt is not None and not 0 < len(salt) <= MAX_SALT_CHARACTERS:
        raise refuse("cache_salt", f"must be 1 to {MAX_SALT_CHARACTERS} characters; leave it out for none")
