"""`/tokenize` and `/detokenize`, in the two forms that clients know.

vLLM's: a prompt or messages give tokens, their count and the context's length. llama.cpp's: a content gives tokens.
The text of tokens is answered under both names, since the question is the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from noria.server.bodies import ChatBody
from noria.server.chat import ChatApi
from noria.server.errors import ApiError, as_api_error, unavailable
from noria.server.reading import AnyBody, read_json
from noria.server.request_body import while_connected
from noria.server.routes import RouteSpec, json_answer
from noria.server.served import ServedModel
from noria.server.state import ServerState
from noria.text.tokenizer import Tokenizer, check_size


class TokenizeBody(msgspec.Struct, kw_only=True):
    """One of `prompt`, `messages` and `content`, which is llama.cpp's word for a prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    """With a prompt: whether the model's BOS comes first if it wants one. Default: yes."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special: bool | None = None
    """The same with a content. Default: no."""
    parse_special: bool | None = None
    with_pieces: bool | None = None


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class ContentTokens(msgspec.Struct):
    tokens: list[int]


class Piece(msgspec.Struct):
    id: int
    piece: str | list[int]
    """Its text, or its bytes if they are no text by themselves."""


class ContentPieces(msgspec.Struct):
    tokens: list[Piece]


class DetokenizeBody(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


class DetokenizeAnswer(msgspec.Struct):
    prompt: str
    content: str


class TokenRoutes:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    def specs(self) -> list[RouteSpec]:
        return [
            RouteSpec(
                path="/tokenize",
                handler=self.tokenize,
                methods=("POST",),
                summary="The tokens of a text or of messages.",
                body=TokenizeBody,
                answers=(TokenizeAnswer, ContentTokens, ContentPieces),
            ),
            RouteSpec(
                path="/detokenize",
                handler=self.detokenize,
                methods=("POST",),
                summary="The text of tokens.",
                body=DetokenizeBody,
                answers=(DetokenizeAnswer,),
            ),
        ]

    async def tokenize(self, request: Request) -> Response:
        body, headers = await self._read(request, TokenizeBody)
        model = self._state.served_model(body.model)
        given = [name for name in ("prompt", "messages", "content") if getattr(body, name) is not None]
        if len(given) != 1:
            raise ApiError(
                400,
                f"give one of prompt, messages and content, not {' and '.join(given) or 'none'}",
                param=given[1] if given else "prompt",
                code="invalid_value" if given else "missing_required_parameter",
            )
        work, answer = self._state.text_work, partial(_answer, model, body)
        if body.messages is not None:
            working = work.run_chat(answer, is_foreign=False)
        else:
            num_bytes = len((body.prompt or body.content or "").encode(errors="surrogatepass"))
            working = work.run(answer, num_bytes=num_bytes)
        return json_answer(await while_connected(request.receive, working), headers=headers)

    async def detokenize(self, request: Request) -> Response:
        body, headers = await self._read(request, DetokenizeBody)
        tokenizer, config = self._state.served_model(body.model).tokenizer, self._state.config
        size = tokenizer.vocab_size if config is None or config.vocab_size is None else config.vocab_size
        if body.tokens and not (min(body.tokens) >= 0 and max(body.tokens) < size):
            raise ApiError(400, f"token ids are 0 .. {size - 1}", param="tokens", code="invalid_value")
        decode = partial(tokenizer.decode, body.tokens, skip_special_tokens=False)
        work = self._state.text_work.run(decode, num_bytes=len(body.tokens))
        text = await while_connected(request.receive, work)
        return json_answer(DetokenizeAnswer(text, text), headers=headers)

    async def _read(self, request: Request, kind: type[AnyBody]) -> tuple[AnyBody, dict[str, str]]:
        """The body and headers, as `read_json` has them, once there is a model. Raises `ApiError`."""
        if self._state.tokenizer is None:
            raise unavailable("the model is still loading", "loading")
        return await read_json(request, kind, self._state)


def _answer(model: ServedModel, body: TokenizeBody) -> TokenizeAnswer | ContentTokens | ContentPieces:
    tokenizer = model.tokenizer
    if body.content is not None:
        check_size(body.content, tokenizer, model.max_model_len, param="content")
        return _content_tokens(tokenizer, body, body.content)
    if body.messages is not None:
        tokens = _chat_tokens(model, body, body.messages)
    else:
        prompt = body.prompt or ""
        check_size(prompt, tokenizer, model.max_model_len, param="prompt")
        tokens = tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
    strings = [tokenizer.id_to_token(token) or "" for token in tokens] if body.return_token_strs else None
    return TokenizeAnswer(len(tokens), model.max_model_len, tokens, strings)


def _chat_tokens(model: ServedModel, body: TokenizeBody, messages: list[dict[str, Any]]) -> list[int]:
    """As the chat endpoint would have them."""
    chat = ChatBody(
        messages=messages,
        add_generation_prompt=body.add_generation_prompt,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    api = ChatApi(chat, model)
    try:
        return api.encode_prompts()[0]
    except Exception as error:
        raise as_api_error(error, api.renamed) from error


def _content_tokens(tokenizer: Tokenizer, body: TokenizeBody, content: str) -> ContentTokens | ContentPieces:
    tokens = tokenizer.encode(
        content, add_special_tokens=bool(body.add_special), parse_special=body.parse_special is not False
    )
    if not body.with_pieces:
        return ContentTokens(tokens)
    return ContentPieces([Piece(token, _piece(tokenizer.token_bytes(token))) for token in tokens])


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
