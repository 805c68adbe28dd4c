"""`/v1/chat/completions`: its messages in, its choices and chunks out. No engine, no HTTP."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from noria.sampling import SamplingParams
from noria.server.answers import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    TokenIds,
)
from noria.server.api import GenerationApi
from noria.server.bodies import ChatBody
from noria.server.envelope import TEXT_MARK
from noria.server.errors import ApiError
from noria.server.generation import Generation, News
from noria.server.served import ServedModel
from noria.text.chat import check_roles, encode_chat


class ChatApi(GenerationApi):
    """How one request to this endpoint is understood and answered."""

    ID_PREFIX, ANSWER, CHUNK = "chatcmpl", ChatAnswer, ChatChunk

    def __init__(self, body: ChatBody, model: ServedModel, call_id: str | None = None) -> None:
        super().__init__(body, model, call_id)
        self._chat = body
        self.renamed |= {"prompt": "messages", "logprobs": "top_logprobs"}
        self._max_tokens = body.max_tokens
        if body.max_completion_tokens is not None:
            self._max_tokens = body.max_completion_tokens
            self.renamed["max_tokens"] = "max_completion_tokens"
        self._request_template = model.request_template(body.chat_template)
        if "chat_template" in (body.chat_template_kwargs or {}):
            param = "chat_template_kwargs.chat_template"
            raise ApiError(400, f"{param}: a template is no variable of itself", param=param, code="invalid_value")

    def sampling(self) -> SamplingParams:
        body = self._chat
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
        return self._make_sampling(
            n=body.n,
            max_tokens=self._max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
        )

    def encode_prompts(self) -> list[list[int]]:
        body = self._chat
        continues = bool(body.continue_final_message)
        template = self._request_template or self._tokenizer.chat_template
        if template is not None:
            check_roles(body.messages, template)
        with self._size_bound() as most:
            token_ids = encode_chat(
                self._tokenizer,
                body.messages,
                add_generation_prompt=not continues
                if body.add_generation_prompt is None
                else body.add_generation_prompt,
                continue_final_message=continues,
                template=template,
                template_kwargs=self._template_variables(),
                max_num_tokens=most,
            )
        return [self._truncated(token_ids, self._max_tokens)]

    def opening(self, generation: Generation) -> list[bytes]:
        """A chunk for each choice that says who speaks."""
        super().opening(generation)
        first = self._prompt_extensions(generation)
        chunks = []
        for choice in range(len(generation.outputs)):
            chunks.append(self._chunk(ChatChunkChoice(choice, ChatDelta(role="assistant", content="")), **first))
            first = {}
        return chunks

    def answer(self, generation: Generation) -> bytes:
        choices = [
            ChatChoice(
                index=i,
                message=ChatMessage(content=output.text),
                logprobs=None if output.logprobs is None else self._texts.chat(output.logprobs),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                token_ids=self._token_ids(output.token_ids),
            )
            for i, output in enumerate(generation.outputs)
        ]
        extensions = self._prompt_extensions(generation)
        if self._chat.prompt_logprobs is not None:
            [result] = generation.results
            extensions["prompt_logprobs"] = self._texts.prompt(result.prompt_logprobs or (), self._chat.prompt_logprobs)
        return self._envelope.encode(self.ANSWER, choices, generation.usage, **extensions)

    def _template_variables(self) -> dict[str, Any]:
        """What the template may look at besides the messages; fields of their own win over `chat_template_kwargs`."""
        body = self._chat
        own = {"documents": body.documents, "reasoning_effort": body.reasoning_effort}
        return (body.chat_template_kwargs or {}) | {name: value for name, value in own.items() if value is not None}

    def _prompt_extensions(self, generation: Generation) -> dict[str, Any]:
        if not self._chat.return_token_ids:
            return {}
        return {"prompt_token_ids": generation.results[0].prompt_token_ids}

    def _token_ids(self, token_ids: TokenIds) -> TokenIds | UnsetType:
        return token_ids if self._chat.return_token_ids else UNSET

    def _plain_choice(self, choice: int) -> Any:
        return ChatChunkChoice(choice, ChatDelta(content=TEXT_MARK))

    def _news_choice(self, news: News) -> Any:
        return ChatChunkChoice(
            news.choice,
            ChatDelta(content=news.text or UNSET),
            None if news.logprobs is None else self._texts.chat(news.logprobs),
            news.finish_reason,
            news.stop_reason,
            self._token_ids(news.token_ids),
        )
