"""Chat messages to prompt tokens: checking, rendering, tokenizing.

Called by the front ends for `noria.LLM.chat`, the terminal chat and the chat API. What the template writes may
become special tokens; what a client writes (contents, names, arguments, roles, template variables) never does.
Images and other media are refused here; parsing the model's answer is not done here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from noria.errors import RequestError
from noria.text.chat_template import ChatTemplate
from noria.text.literal_text import Lookalikes, choose_markers
from noria.text.tokenizer import Tokenizer, check_size

KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that a template may make a special token of ('<|' + role + '|>'); any other role stays plain text."""


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template: ChatTemplate | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    max_num_tokens: int | None = None,
) -> list[int]:
    """Token ids of a conversation as the model's chat template writes it, with the BOS the model wants (once).

    `messages` are those of OpenAI's API; `template_kwargs` are further variables for the template (`tools`, ...), and
    `template` stands in for the model's own. With `continue_final_message` the text ends where the content of the last
    message does, so that the model goes on writing it. With `max_num_tokens`, a text that must have more is refused
    before it is tokenized. Raises `RequestError` naming the field (such as "messages[0].content") when they are not.
    """
    template = template or tokenizer.chat_template
    if template is None:
        raise RequestError(
            "this model has no chat template, so it cannot take messages; send a prompt as a completion instead",
            param="messages",
        )
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other: the last message is either "
            "continued or answered",
            param="continue_final_message",
        )
    checked = [_with_known_role(message, template) for message in check_messages(messages)]
    kwargs = dict(template_kwargs or {})
    markers = choose_markers(2, checked, kwargs, template.source)
    if not markers:
        raise RequestError(
            "messages use nearly every noncharacter from U+FDD0 to U+FDEF; leave two out", param="messages"
        )
    marker, end_marker = markers
    lookalikes = _lookalikes(tokenizer.special_token_texts)
    broken = [_break_message(message, lookalikes, marker) for message in checked]
    if continue_final_message:
        broken[-1]["content"] += end_marker
    text = template.render(
        broken,
        add_generation_prompt=add_generation_prompt,
        template_kwargs=lookalikes.break_in(kwargs, marker, whole_values=False),
    )
    if continue_final_message:
        text = _until_last(end_marker, text)
    if max_num_tokens is not None:
        check_size(text.replace(marker, ""), tokenizer, max_num_tokens, param="messages")
    return tokenizer.encode_rendered(text, marker=marker)


def check_roles(messages: Sequence[Mapping[str, Any]], template: ChatTemplate) -> None:
    """Raises `RequestError` for a role that neither chats in general nor this template know: it would be passed over.

    What is no message at all is left to `check_messages`.
    """
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not role or role in KNOWN_ROLES:
            continue
        if f"'{role}'" not in template.source and f'"{role}"' not in template.source:
            raise RequestError(
                f"messages[{index}].role is not one that the chat template knows: use one of {', '.join(KNOWN_ROLES)}",
                param=f"messages[{index}].role",
            )


def _with_known_role(message: dict[str, Any], template: ChatTemplate) -> dict[str, Any]:
    """OpenAI's newer word for the system's role becomes the older one where the template does not know it."""
    if message["role"] == "developer" and "developer" not in template.source:
        return message | {"role": "system"}
    return message


def _until_last(end_marker: str, text: str) -> str:
    """The text up to where the last message's content ended. The mark stands for it whatever the template trims."""
    end = text.rfind(end_marker)
    if end < 0:
        raise RequestError(
            "continue_final_message: the chat template does not write the content of the last message as it is",
            param="continue_final_message",
        )
    return text[:end].replace(end_marker, "")


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages in the form templates expect, or `RequestError`.

    Text parts are joined by newlines into one string, a missing content becomes "", and arguments of tool calls
    that are JSON text become the object.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of messages", param="messages")
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with a role and a content", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a non-empty string such as 'user'", param=f"{where}.role")
    checked = dict(message)
    tool_calls = message.get("tool_calls")
    if tool_calls:
        checked["tool_calls"] = _check_tool_calls(tool_calls, f"{where}.tool_calls")
    content = message.get("content")
    if content is None:
        if role != "assistant" or not tool_calls:
            raise RequestError(
                f"{where}.content is missing; only an assistant's message with tool_calls may have none",
                param=f"{where}.content",
            )
        checked["content"] = ""
    else:
        checked["content"] = _content_text(content, f"{where}.content")
    return checked


def _content_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"{where} must be a string or a list of text parts", param=where)
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            message = f"{where}[{index}].type is {kind!r}; this server takes parts of type 'text' only"
            raise RequestError(message, param=f"{where}[{index}].type")
        text = part.get("text")
        if not isinstance(text, str):
            raise RequestError(f"{where}[{index}].text must be a string", param=f"{where}[{index}].text")
        texts.append(text)
    return "\n".join(texts)


def _check_tool_calls(tool_calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(tool_calls, Sequence) or isinstance(tool_calls, str):
        raise RequestError(f"{where} must be a list", param=where)
    checked: list[dict[str, Any]] = []
    for index, call in enumerate(tool_calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{index}].function must be an object with a name", param=f"{where}[{index}]")
        checked.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return checked


def _arguments(arguments: Any) -> Any:
    """The object that JSON text stands for; anything else, and text that is not JSON (a model wrote it), as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _break_message(message: Mapping[str, Any], lookalikes: Lookalikes, marker: str) -> dict[str, Any]:
    broken: dict[str, Any] = lookalikes.break_in(message, marker)
    # Templates compare these with literals, and what is not one of the well-known values stays broken.
    if message["role"] in KNOWN_ROLES:
        broken["role"] = message["role"]
    for call, original in zip(broken.get("tool_calls") or (), message.get("tool_calls") or (), strict=True):
        if original.get("type") == "function":
            call["type"] = "function"
    return broken


@lru_cache(maxsize=8)
def _lookalikes(special_token_texts: tuple[str, ...]) -> Lookalikes:
    return Lookalikes(special_token_texts)
