"""`/v1/chat/completions`: its messages in, its choices and chunks out. No engine, no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from noria.core.plan import TokenLogprobs
from noria.sampling import SamplingParams
from noria.server.bodies import ChatBody
from noria.server.envelope import TEXT_MARK, ChunkTemplate, Envelope
from noria.server.errors import ApiError
from noria.server.generation import Generation, News, Usage
from noria.server.served import ServedModel
from noria.text.chat import encode_chat


class ChatApi:
    """How one request to this endpoint is understood and answered."""

    def __init__(self, body: ChatBody, model: ServedModel) -> None:
        self.body = body
        self._request_template = model.request_template(body.chat_template)
        if "chat_template" in (body.chat_template_kwargs or {}):
            raise ApiError(
                400,
                "chat_template_kwargs are variables for the template; a template is a field of its own",
                param="chat_template_kwargs.chat_template",
                code="invalid_value",
            )
        self.renamed = {"prompt": "messages", "logprobs": "top_logprobs"}
        self._tokenizer = model.tokenizer
        self._max_model_len = model.max_model_len
        self._envelope = Envelope("chatcmpl", model.name)
        self.call_id = self._envelope.call_id
        self._templates: dict[int, ChunkTemplate] = {}
        if body.max_completion_tokens is not None:
            self.renamed["max_tokens"] = "max_completion_tokens"

    def sampling(self) -> SamplingParams:
        body = self.body
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return body.sampling(logprobs=(body.top_logprobs or 0) if body.logprobs else None, max_tokens=max_tokens)

    def encode_prompts(self) -> list[list[int]]:
        generation_prompt = self.body.add_generation_prompt
        return [
            encode_chat(
                self._tokenizer,
                self.body.messages,
                add_generation_prompt=True if generation_prompt is None else generation_prompt,
                template=self._request_template,
                template_kwargs=self.body.chat_template_kwargs,
                max_num_tokens=self._max_model_len,
            )
        ]

    def opening(self, num_choices: int) -> list[bytes]:
        """A chunk for each choice that says who speaks."""
        return [self._chunk(i, {"role": "assistant", "content": ""}) for i in range(num_choices)]

    def chunk(self, news: News) -> bytes:
        """One chunk for one piece of news."""
        if news.is_plain and news.text:
            return self._template(news.choice).fill(news.text)
        return self._chunk(
            news.choice,
            {"content": news.text} if news.text else {},
            logprobs=None if news.logprobs is None else self._logprobs(news.logprobs),
            finish_reason=news.finish_reason,
            stop_reason=news.stop_reason,
        )

    def _template(self, choice: int) -> ChunkTemplate:
        """For chunks of that choice with nothing but a text."""
        template = self._templates.get(choice)
        if template is None:
            plain = self._choice(choice, {"content": TEXT_MARK}, stop_reason=None)
            template = self._templates[choice] = self._envelope.template("chat.completion.chunk", plain)
        return template

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._envelope.encode("chat.completion.chunk", [], usage)

    def answer(self, generation: Generation) -> bytes:
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": output.text, "refusal": None},
                "logprobs": None if output.logprobs is None else self._logprobs(output.logprobs),
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
            }
            for i, output in enumerate(generation.outputs)
        ]
        return self._envelope.encode("chat.completion", choices, generation.usage)

    def _chunk(self, index: int, delta: dict[str, Any], **rest: Any) -> bytes:
        return self._envelope.encode("chat.completion.chunk", [self._choice(index, delta, **rest)])

    def _choice(self, index: int, delta: dict[str, Any], **rest: Any) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | rest

    def _logprobs(self, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {
            "content": [
                self._token(position.token_id, position.logprob)
                | {"top_logprobs": [self._token(token_id, value) for token_id, value in position.top]}
                for position in positions
            ],
            "refusal": None,
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        """A token's text, and its exact bytes: half a character has bytes, but no text."""
        return {
            "token": self._tokenizer.decode([token_id], skip_special_tokens=False),
            "logprob": logprob,
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }
