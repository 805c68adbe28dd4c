"""`/v1/completions`: its prompts in, its choices and chunks out. No engine, no HTTP."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from noria.core.plan import TokenLogprobs
from noria.sampling import SamplingParams
from noria.server.bodies import CompletionBody
from noria.server.envelope import TEXT_MARK, ChunkTemplate, Envelope
from noria.server.errors import ApiError
from noria.server.generation import MAX_SEQUENCES, Generation, News, Usage
from noria.server.served import ServedModel
from noria.text.tokenizer import check_size


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry per token; `text_offset` counts characters from the beginning of the answer."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class CompletionsApi:
    """How one request to this endpoint is understood and answered."""

    def __init__(self, body: CompletionBody, model: ServedModel) -> None:
        self.body = body
        self.renamed: dict[str, str] = {}
        self._tokenizer = model.tokenizer
        self._max_model_len = model.max_model_len
        self._envelope = Envelope("cmpl", model.name)
        self.call_id = self._envelope.call_id
        self._offsets: dict[int, int] = {}
        self._templates: dict[int, ChunkTemplate] = {}

    def sampling(self) -> SamplingParams:
        return self.body.sampling(logprobs=self.body.logprobs, max_tokens=self.body.max_tokens)

    def encode_prompts(self) -> list[list[int]]:
        """Token ids of each prompt. A text may hold special tokens, as with other servers."""
        prompt = self.body.prompt
        if isinstance(prompt, str):
            return [self._encode(prompt)]
        if not prompt:
            raise ApiError(400, "prompt is an empty list", param="prompt", code="invalid_value")
        if all(isinstance(part, int) for part in prompt):
            return [prompt]  # type: ignore[list-item]
        if len(prompt) > MAX_SEQUENCES:
            raise ApiError(
                400,
                f"prompt lists {len(prompt)} prompts, more than {MAX_SEQUENCES}",
                param="prompt",
                code="invalid_value",
            )
        kinds = {type(part) for part in prompt}
        if len(kinds) > 1:
            raise ApiError(400, "prompt mixes texts and token ids", param="prompt", code="invalid_type")
        return [self._encode(part) if isinstance(part, str) else list(part) for part in prompt]  # type: ignore[arg-type]

    def _encode(self, text: str) -> list[int]:
        check_size(text, self._tokenizer, self._max_model_len, param="prompt")
        return self._tokenizer.encode(text)

    def opening(self, num_choices: int) -> list[bytes]:
        return []

    def chunk(self, news: News) -> bytes:
        """One chunk for one piece of news."""
        if news.is_plain:
            return self._template(news.choice).fill(news.text)
        logprobs = None
        if news.logprobs is not None:
            logprobs = self._logprobs(news.logprobs, self._offsets.get(news.choice, 0))
            self._offsets[news.choice] = self._offsets.get(news.choice, 0) + sum(map(len, logprobs.tokens))
        return self._envelope.encode(
            "text_completion",
            [CompletionChoice(news.choice, news.text, logprobs, news.finish_reason, news.stop_reason)],
        )

    def _template(self, choice: int) -> ChunkTemplate:
        """For chunks of that choice with nothing but a text."""
        template = self._templates.get(choice)
        if template is None:
            plain = CompletionChoice(choice, TEXT_MARK, None, None, None)
            template = self._templates[choice] = self._envelope.template("text_completion", plain)
        return template

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._envelope.encode("text_completion", [], usage)

    def answer(self, generation: Generation) -> bytes:
        choices = [
            CompletionChoice(
                i,
                output.text,
                None if output.logprobs is None else self._logprobs(output.logprobs, 0),
                output.finish_reason,
                output.stop_reason,
            )
            for i, output in enumerate(generation.outputs)
        ]
        return self._envelope.encode("text_completion", choices, generation.usage)

    def _logprobs(self, positions: Sequence[TokenLogprobs], offset: int) -> CompletionLogprobs:
        logprobs = CompletionLogprobs([], [], [], [])
        for position in positions:
            text = self._token_text(position.token_id)
            logprobs.text_offset.append(offset)
            logprobs.tokens.append(text)
            logprobs.token_logprobs.append(position.logprob)
            # As OpenAI does, the chosen token stands in the map even when it is not among the most probable.
            top = {self._token_text(token_id): value for token_id, value in position.top}
            top.setdefault(text, position.logprob)
            logprobs.top_logprobs.append(top)
            offset += len(text)
        return logprobs

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)
