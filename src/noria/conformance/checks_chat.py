"""`/v1/chat/completions` alone: messages, roles, content parts, tools, response formats."""

from __future__ import annotations

import json
from typing import Any

from noria.conformance.client import Server
from noria.conformance.contract import Source, Theme, expect
from noria.conformance.endpoints import CHAT

THEME = Theme("chat")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ANSWER_SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}


def said(*messages: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in messages]


def prompt_tokens(server: Server, messages: list[dict[str, Any]]) -> int:
    return int(server.answer(CHAT, messages=messages, max_tokens=1)["usage"]["prompt_tokens"])


@THEME.check("the answer is the assistant's", Source.OPENAI)
def assistant_role(server: Server) -> None:
    message = server.answer(CHAT)["choices"][0]["message"]
    expect(message["role"] == "assistant", f"the role is {message['role']!r}")


@THEME.check("a system message is part of the prompt", Source.OPENAI)
def system_message(server: Server) -> None:
    alone = prompt_tokens(server, said(("user", "Hello there")))
    more = prompt_tokens(server, said(("system", "Answer in rhymes, " * 20), ("user", "Hello there")))
    expect(more > alone + 20, f"{more} prompt tokens with 60 words of a system message, {alone} without")


@THEME.check("a developer message is part of the prompt", Source.OPENAI, needs=("developer",))
def developer_message(server: Server) -> None:
    alone = prompt_tokens(server, said(("user", "Hello there")))
    more = prompt_tokens(server, said(("developer", "Answer in rhymes, " * 20), ("user", "Hello there")))
    expect(more > alone + 20, f"{more} prompt tokens with 60 words of a developer message, {alone} without")


@THEME.check("earlier turns are part of the prompt", Source.OPENAI)
def multi_turn(server: Server) -> None:
    alone = prompt_tokens(server, said(("user", "And now?")))
    turns = said(("user", "Tell me of rivers. " * 10), ("assistant", "They flow. " * 10), ("user", "And now?"))
    expect(prompt_tokens(server, turns) > alone + 40, "three turns are hardly longer than one")


@THEME.check("content may be a list of text parts, and means the same", Source.OPENAI)
def content_parts(server: Server) -> None:
    text = "Tell me of rivers."
    plain = server.answer(CHAT, messages=said(("user", text)))
    parts = server.answer(CHAT, messages=said(("user", [{"type": "text", "text": text}])))
    counts = [answer["usage"]["prompt_tokens"] for answer in (plain, parts)]
    expect(counts[0] == counts[1], f"{counts[0]} prompt tokens as a string, {counts[1]} as a part")
    texts = [CHAT.text(answer["choices"][0]) for answer in (plain, parts)]
    expect(texts[0] == texts[1], f"{texts[0]!r} as a string, {texts[1]!r} as a part")


@THEME.check("all text parts of a message count", Source.OPENAI)
def several_parts(server: Server) -> None:
    part = {"type": "text", "text": "Tell me of rivers and of mountains."}
    one, three = (prompt_tokens(server, said(("user", [part] * count))) for count in (1, 3))
    expect(three > one + 8, f"{three} prompt tokens with three parts, {one} with one")


@THEME.check("a part of an unknown type is refused", Source.OPENAI)
def unknown_part(server: Server) -> None:
    server.refusal(CHAT, messages=said(("user", [{"type": "smell", "smell": "rose"}])))


@THEME.check("an image that cannot be understood is refused, not passed over", Source.OPENAI)
def image_part(server: Server) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    response = server.post(CHAT, messages=said(("user", [{"type": "text", "text": "What is it?"}, part])))
    response.error(400, 415, 422, 501)


@THEME.check("no messages are refused", Source.OPENAI)
def messages_empty(server: Server) -> None:
    server.refusal(CHAT, messages=[])


@THEME.check("missing messages are refused", Source.OPENAI)
def messages_missing(server: Server) -> None:
    server.send("POST", CHAT.path, {"model": server.model, "max_tokens": 2}).error(400, 422)


@THEME.check("a message that is no object is refused", Source.OPENAI)
def message_not_an_object(server: Server) -> None:
    server.refusal(CHAT, messages=["hello"])


@THEME.check("a message without a role is refused", Source.OPENAI)
def message_without_role(server: Server) -> None:
    server.refusal(CHAT, messages=[{"content": "hello"}])


@THEME.check("a message of an unknown role is refused", Source.OPENAI)
def unknown_role(server: Server) -> None:
    server.refusal(CHAT, messages=said(("poltergeist", "hello")))


@THEME.check("a user's message without content is refused", Source.OPENAI)
def message_without_content(server: Server) -> None:
    server.refusal(CHAT, messages=[{"role": "user"}])


@THEME.check("content that is a number is refused", Source.OPENAI)
def content_number(server: Server) -> None:
    server.refusal(CHAT, messages=said(("user", 5)))


@THEME.check("empty content is content", Source.OPENAI)
def content_empty(server: Server) -> None:
    server.answer(CHAT, messages=said(("user", "")), max_tokens=2)


@THEME.check("a message may have a name", Source.OPENAI)
def message_name(server: Server) -> None:
    server.answer(CHAT, messages=[{"role": "user", "name": "ada", "content": "hello"}], max_tokens=2)


@THEME.check("max_completion_tokens bounds the tokens of an answer", Source.OPENAI)
def max_completion_tokens(server: Server) -> None:
    body = {"model": server.model, "temperature": 0} | CHAT.prompt("Tell me a very long story of a river")
    response = server.send("POST", CHAT.path, body | {"max_completion_tokens": 3})
    count = server.supported(response, CHAT.path).json["usage"]["completion_tokens"]
    expect(count <= 3, f"{count} tokens with max_completion_tokens 3")


@THEME.check("tools with tool_choice none: a text, and no calls", Source.OPENAI, needs=("tools", "tool_choice"))
def tools_none(server: Server) -> None:
    choice = server.answer(CHAT, tools=[TOOL], tool_choice="none")["choices"][0]
    expect(not choice["message"].get("tool_calls"), f"there are calls: {choice['message']}")
    server.must_look_at(CHAT, "tools", "all of them")


@THEME.check(
    "tool_choice required: a call of a tool, its arguments a string", Source.OPENAI, needs=("tools", "tool_choice")
)
def tools_required(server: Server) -> None:
    answer = server.answer(CHAT, tools=[TOOL], tool_choice="required", max_tokens=200)
    [choice] = answer["choices"]
    calls = choice["message"].get("tool_calls")
    expect(calls, f"no calls: {choice['message']}")
    for call in calls:
        expect(call["type"] == "function" and isinstance(call["id"], str), f"a call is {call}")
        expect(call["function"]["name"] == "get_weather", f"the tool called is {call['function']['name']!r}")
        expect(isinstance(call["function"]["arguments"], str), "arguments are no string")


@THEME.check("calls and results of tools may stand in the history", Source.OPENAI, needs=("tool_calls", "tool"))
def tool_history(server: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "The weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    ]
    server.answer(CHAT, messages=messages, max_tokens=4)


@THEME.check("response_format text is the default", Source.OPENAI, needs=("response_format",))
def response_format_text(server: Server) -> None:
    plain, text = server.text(CHAT), server.text(CHAT, response_format={"type": "text"})
    expect(plain == text, f"{text!r} with it, {plain!r} without")


@THEME.check("response_format json_object makes JSON", Source.OPENAI, needs=("response_format", "json_object"))
def response_format_json(server: Server) -> None:
    messages = said(("user", 'Answer with JSON: {"answer": "yes"} or {"answer": "no"}. Is water wet?'))
    answer = server.answer(CHAT, messages=messages, response_format={"type": "json_object"}, max_tokens=120)
    [choice] = answer["choices"]
    text = CHAT.text(choice)
    expect(text.strip()[:1] in ("{", ""), f"the text is {text[:80]!r}")
    if choice["finish_reason"] == "stop":
        expect(isinstance(_parsed(text), dict), f"not a JSON object: {text[:80]!r}")


@THEME.check(
    "response_format json_schema makes what the schema says", Source.OPENAI, needs=("response_format", "json_schema")
)
def response_format_schema(server: Server) -> None:
    schema = {"name": "answer", "strict": True, "schema": ANSWER_SCHEMA}
    messages = said(("user", "Is water wet? Answer yes or no."))
    form = {"type": "json_schema", "json_schema": schema}
    text = server.text(CHAT, messages=messages, response_format=form, max_tokens=60)
    expect(_parsed(text) in ({"answer": "yes"}, {"answer": "no"}), f"the text is {text[:80]!r}")


@THEME.check("an unknown response_format is refused", Source.OPENAI)
def response_format_unknown(server: Server) -> None:
    server.refusal(CHAT, response_format={"type": "interpretive_dance"})


@THEME.check("a template that comes with a request is refused unless allowed", Source.OURS)
def chat_template(server: Server) -> None:
    response = server.post(CHAT, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    response.error(400, 403, 422)


@THEME.check("chat_template_kwargs are accepted", Source.EXTENSION, needs=("chat_template_kwargs",))
def chat_template_kwargs(server: Server) -> None:
    server.answer(CHAT, chat_template_kwargs={"enable_thinking": False})
    server.must_look_at(CHAT, "chat_template_kwargs", "none")


@THEME.check(
    "continue_final_message goes on with the assistant's words", Source.EXTENSION, needs=("continue_final_message",)
)
def continue_final_message(server: Server) -> None:
    messages = said(("user", "Count."), ("assistant", "One, two, three,"))
    fields = {"messages": messages, "max_tokens": 1, "add_generation_prompt": False}
    closed = server.answer(CHAT, **fields)["usage"]["prompt_tokens"]
    goes_on = server.answer(CHAT, **fields, continue_final_message=True)["usage"]["prompt_tokens"]
    expect(goes_on < closed, f"{goes_on} prompt tokens with the turn left open, {closed} with its end")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
