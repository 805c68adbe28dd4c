"""Chunks that are filled in are what chunks encoded as a whole would be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from noria.config import ServerOptions
from noria.fakes.tokenizer import ByteTokenizer
from noria.server.bodies import ChatBody, CompletionBody
from noria.server.chat import ChatApi
from noria.server.completions import CompletionsApi
from noria.server.envelope import TEXT_MARK
from noria.server.generation import News
from noria.server.served import ServedModel
from noria.server.text_work import TextWork

TEXTS = ["a", "", 'he said "no"\n', "\\u0041", "é\U0001f600\x00", TEXT_MARK]


def apis() -> list[Any]:
    name = json.dumps(TEXT_MARK)  # it is the operator's choice
    model = ServedModel(name, ByteTokenizer(), 4096, TextWork(ServerOptions()))
    chat = ChatBody(messages=[{"role": "user", "content": "hi"}])
    return [CompletionsApi(CompletionBody(prompt="x", request_id=name), model), ChatApi(chat, model)]


@pytest.mark.parametrize("text", TEXTS)
def test_a_plain_chunk_differs_from_any_other_only_in_what_it_lacks(text: str) -> None:
    for api in apis():
        for choice in (0, 3, 0):
            plain = [json.loads(chunk) for chunk in api.chunks([News(choice, text, (65,), None, None, None)])]
            [whole] = [json.loads(chunk) for chunk in api.chunks([News(choice, text, (65,), None, "stop", None)])]
            assert whole["choices"][0]["finish_reason"] == "stop"
            whole["choices"][0]["finish_reason"] = None
            assert plain == ([whole] if text else [])  # a text that is held back makes no chunk
            assert whole["choices"][0]["index"] == choice
            assert all(list(chunk["choices"][0]) == list(whole["choices"][0]) for chunk in plain)
