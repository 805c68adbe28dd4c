"""What a request leaves out is sampled as the model recommends; what it says wins. And models without a template."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from scripted_calls import MODEL

from noria.errors import RequestError
from noria.fakes.tokenizer import ByteTokenizer
from noria.sampling import SamplingParams
from noria.server.api import GenerationApi
from noria.server.bodies import ChatBody, CompletionBody
from noria.server.chat import ChatApi
from noria.server.completions import CompletionsApi
from noria.server.errors import as_api_error

DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}


def api(is_chat: bool, defaults: dict[str, Any] = DEFAULTS, **fields: Any) -> GenerationApi:
    model = replace(MODEL, sampling_defaults=defaults)
    if is_chat:
        return ChatApi(ChatBody(messages=[{"role": "user", "content": "hi"}], **fields), model)
    return CompletionsApi(CompletionBody(prompt="hi", **fields), model)


@pytest.mark.parametrize("is_chat", [True, False])
def test_fields_of_a_request_win(is_chat: bool) -> None:
    assert api(is_chat).sampling() == SamplingParams(**DEFAULTS)
    own = api(is_chat, temperature=1.0, top_k=0, max_tokens=5).sampling()
    assert own == SamplingParams(temperature=1.0, top_k=0, max_tokens=5, top_p=0.95, repetition_penalty=1.05)
    assert api(is_chat, {}).sampling() == SamplingParams()


def test_without_a_chat_template_messages_are_refused_and_prompts_are_not() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = None
    model = replace(MODEL, tokenizer=tokenizer)
    chat = ChatApi(ChatBody(messages=[{"role": "user", "content": "hi"}]), model)
    with pytest.raises(RequestError, match=r"no chat template.*send a prompt as a completion") as caught:
        chat.encode_prompts()
    error = as_api_error(caught.value, {})
    assert error.status == 400
    assert json.loads(error.body)["error"]["param"] == "messages"
    assert CompletionsApi(CompletionBody(prompt="hi"), model).encode_prompts() == [[*b"hi"]]
