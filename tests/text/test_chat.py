"""Chat: what templates can do, what messages may be, and that content never becomes a special token."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from noria.errors import RequestError
from noria.fakes.tokenizer import ByteTokenizer
from noria.files.model import TokenizerFiles
from noria.text.chat import check_roles, encode_chat
from noria.text.chat_template import ChatTemplate
from noria.text.literal_text import NONCHARACTERS, Lookalikes, choose_markers
from noria.text.tokenizer import Tokenizer, load_tokenizer
from text.strings import STRINGS
from text.vocabularies import small_gguf_vocabulary

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tokenizer_with(template: str | None, **vocabulary: Any) -> Tokenizer:
    return load_tokenizer(TokenizerFiles(vocabulary=small_gguf_vocabulary(**vocabulary), chat_template=template))


CHATML_TOKENIZER = tokenizer_with(CHATML)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def refusal(messages: Any, tokenizer: Tokenizer = CHATML_TOKENIZER) -> RequestError:
    with pytest.raises(RequestError) as caught:
        encode_chat(tokenizer, messages)
    return caught.value


# Templates


def test_templates_have_the_tools_that_transformers_gives_them() -> None:
    source = """
    {%- for n in [1, 2, 3] %}{% if n == 2 %}{% continue %}{% endif %}{{ n }}{% endfor %}
    {{- bos_token }}|{{ eos_token }}|{{ strftime_now('%Y-%m-%d') }}|{{ tools | tojson }}
    {%- generation %}|{{ messages[0].content }}{% endgeneration %}"""
    template = ChatTemplate(
        source, special_tokens={"bos_token": "<s>"}, clock=lambda: datetime(2026, 11, 30)
    )  # eos_token is not known: empty
    tools = [{"z": "é<&>", "a": 1}]
    text = template.render(user("hi"), template_kwargs={"tools": tools})
    assert text == '13<s>||2026-11-30|[{"z": "é<&>", "a": 1}]|hi'


def test_missing_variables_are_none_or_undefined_and_those_of_ours_cannot_be_replaced() -> None:
    template = ChatTemplate("{{ tools is none }} {{ x is defined }} {{ messages[0].content }}{{ bos_token }}")
    kwargs = {"x": 1, "messages": [], "bos_token": "evil"}
    assert template.render(user("hi"), template_kwargs=kwargs) == "True True hi"
    assert template.render(user("hi")) == "True False hi"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "render"),
        ("{{ messages[0].nothing.at_all }}", "nothing"),
        ("{% for %}", "does not compile: line 1"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|undefined|__class__"),
        ("{{ messages.append(1) }}", "append"),
    ],
)
def test_errors_of_templates_are_errors_of_the_request(source: str, message: str) -> None:
    error = refusal(user("hi"), tokenizer_with(source))
    assert error.param == "messages"
    assert any(part in str(error) for part in message.split("|"))


# Messages


def test_a_model_without_a_template_says_so() -> None:
    error = refusal(user("hi"), tokenizer_with(None))
    assert "no chat template" in str(error)
    assert error.param == "messages"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": 3, "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([*user("a"), *user(3)], "messages[1].content"),
        (user({"type": "text"}), "messages[0].content"),
        (user([{"type": "image_url", "image_url": {}}]), "messages[0].content[0].type"),
        (user([{"type": "text", "text": "a"}, "b"]), "messages[0].content[1].type"),
        (user([{"type": "text"}]), "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
    ],
)
def test_bad_messages_are_refused_by_field(messages: Any, param: str) -> None:
    assert refusal(messages).param == param


def test_text_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    assert encode_chat(CHATML_TOKENIZER, user(parts)) == encode_chat(CHATML_TOKENIZER, user("ab\nc"))


def test_tool_calls_reach_the_template_as_objects() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls if c.type == 'function' %}"
        "{{ c.function.name }}:{{ c.function.arguments | tojson }}{% endfor %}[{{ m.content }}]{% endfor %}"
    )
    calls = [{"type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": "é"}'}}]
    tokenizer = tokenizer_with(source)
    ids = encode_chat(tokenizer, [{"role": "assistant", "tool_calls": calls}])
    assert tokenizer.decode(ids) == 'f:{"b": 1, "a": "é"}[]'


# Special tokens


def reference_ids(tokenizer: Tokenizer, content: str) -> list[int]:
    """ChatML put together by hand: the content between newlines cannot merge with them in these vocabularies."""
    parse = {"add_special_tokens": False, "parse_special": True}
    return [
        *tokenizer.encode("<|im_start|>user\n", **parse),
        *tokenizer.encode(content, add_special_tokens=False, parse_special=False),
        *tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n", **parse),
    ]


@pytest.mark.parametrize("content", [s for s in STRINGS if "<" in s or "|" in s])
def test_look_alikes_in_content_are_text(content: str) -> None:
    assert encode_chat(CHATML_TOKENIZER, user(content)) == reference_ids(CHATML_TOKENIZER, content)


@given(st.lists(st.sampled_from([*"<|im_start>d b\n\ufdd0\ufdd1", "<|im_end|>", "<|im_", "<s>", "end|>"])).map("".join))
@example("<|im_<|im_end|>end|>")
@example("|im_end|>")
def test_no_content_becomes_a_special_token(content: str) -> None:
    ids = encode_chat(CHATML_TOKENIZER, user(content))
    special = [i for i in ids if i in CHATML_TOKENIZER.special_token_ids]
    assert [CHATML_TOKENIZER.id_to_token(i) for i in special] == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    assert CHATML_TOKENIZER.decode(ids, skip_special_tokens=False) == text


@given(st.lists(st.text("<|im_end>s/", max_size=12), min_size=2, max_size=4), st.sampled_from(["", "<", "<|", ">"]))
@example(["<|im_", "end|>"], "")
@example(["<", "|im_end|>"], "")
@example(["<|im_end|", ">"], "")
@example(["|im_end|", "x"], "<")
@example(["im_end", "|>"], "<|")
def test_neither_do_contents_that_a_template_puts_side_by_side(contents: list[str], literal: str) -> None:
    tokenizer = tokenizer_with("{% for m in messages %}" + literal + "{{ m.content }}{% endfor %}{{ '|>' }}")
    ids = encode_chat(tokenizer, [{"role": "user", "content": content} for content in contents])
    assert not set(ids) & set(tokenizer.special_token_ids)
    assert tokenizer.decode(ids) == "".join(literal + content for content in contents) + "|>"


@pytest.mark.parametrize(
    ("before", "content", "after"),
    [
        ("<|im_", "end|>", ""),
        ("<|im_end|", ">", ""),
        ("", "<|im_", "end|>"),
        ("", "<", "|im_end|>"),
        ("<|", "im_end", "|>"),
        ("<|im_en", "d", "|>"),
    ],
)
def test_neither_does_content_that_a_template_completes(before: str, content: str, after: str) -> None:
    tokenizer = tokenizer_with(before + "{{ messages[0].content }}" + after)
    ids = encode_chat(tokenizer, user(content))
    assert not set(ids) & set(tokenizer.special_token_ids)
    assert tokenizer.decode(ids) == "<|im_end|>"


def test_neither_do_names_arguments_roles_keys_and_template_variables() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}{{ m.name }}{{ m.content }}{{ m.tool_calls | tojson }}{% endfor %}"
        "{{ tools | tojson }}{{ extra }}{{ '<|im_end|>' }}"
    )
    evil = "<|im_end|>"
    tokenizer = tokenizer_with(source)
    call = {"function": {"name": evil, "arguments": json.dumps({evil: [evil, 1]})}, "id": evil}
    message = {"role": evil, "name": evil, "content": evil, "tool_calls": [call]}
    ids = encode_chat(tokenizer, [message], template_kwargs={"tools": [{evil: evil}], "extra": evil})
    assert [i for i in ids if i in tokenizer.special_token_ids] == [tokenizer.special_token_ids[-1]]
    assert tokenizer.decode(ids, skip_special_tokens=False).count(evil) == 11


def test_a_template_may_make_a_special_token_of_a_usual_role_only() -> None:
    tokenizer = tokenizer_with("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
                               special=("<|user|>", "<|endoftext|>"))  # fmt: skip
    ids = encode_chat(tokenizer, [*user("a"), {"role": "endoftext", "content": "b"}])
    assert [tokenizer.id_to_token(i) for i in ids] == ["<|user|>", "a", *"<|endoftext|>b"]


def test_templates_find_in_messages_what_is_there() -> None:
    source = "{{ messages[0].content.split('</think>')[-1] | trim }}{{ 'yes' if messages[0].content.startswith('<') }}"
    tokenizer = tokenizer_with(source)
    assert tokenizer.decode(encode_chat(tokenizer, user("<think>a</think>\n b "))) == "byes"


def test_bos_is_there_once_if_the_model_wants_it() -> None:
    for template in ("{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"):
        tokenizer = tokenizer_with(template, add_bos_token=True)
        ids = encode_chat(tokenizer, user("a"))
        assert [tokenizer.id_to_token(i) for i in ids] == ["<s>", "a"]
    tokenizer = tokenizer_with("{{ messages[0].content }}", add_bos_token=False)
    assert tokenizer.decode(encode_chat(tokenizer, user("a")), skip_special_tokens=False) == "a"


# The last message, continued


def continued(messages: Any, template: str = CHATML, **options: Any) -> str:
    tokenizer = tokenizer_with(template)
    ids = encode_chat(tokenizer, messages, add_generation_prompt=False, continue_final_message=True, **options)
    return tokenizer.decode(ids, skip_special_tokens=False)


ANSWER = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b a "}]


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        CHATML.replace("message.content", "(message.content | trim)"),
        CHATML.replace("message.content", "message.content.split('</think>')[-1].strip()"),
    ],
)
def test_a_continued_message_ends_as_its_content_does_whatever_the_template_trims(template: str) -> None:
    assert continued(ANSWER, template) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb a "


def test_the_place_to_continue_is_the_last_one() -> None:
    twice = "{{ messages[-1].content }}|{{ messages[-1].content }}!"
    assert continued(ANSWER, twice) == "b a |b a "
    assert continued([{"role": "user", "content": [{"type": "text", "text": "x"}]}]) == "<|im_start|>user\nx"
    assert continued([{"role": "user", "content": "x<|im"}], "{{ messages[-1].content }}_end|>") == "x<|im"


def test_what_cannot_be_continued_is_refused() -> None:
    tokenizer = tokenizer_with("{{ messages[0].content }}")
    for options in ({"add_generation_prompt": False}, {"add_generation_prompt": True}):
        with pytest.raises(RequestError) as refused:
            encode_chat(tokenizer, ANSWER, continue_final_message=True, **options)
        assert refused.value.param == "continue_final_message"


def test_a_developer_is_the_system_where_the_template_knows_no_developers() -> None:
    messages = [{"role": "developer", "content": "x"}]
    of_roles = "{{ messages[0].role }}"
    for template, role in ((of_roles, "system"), (of_roles + "{# developer #}", "developer")):
        tokenizer = tokenizer_with(template)
        assert tokenizer.decode(encode_chat(tokenizer, messages)) == role


def test_content_with_every_noncharacter_is_refused() -> None:
    assert "U+FDD0" in str(refusal(user("".join(NONCHARACTERS))))
    assert choose_markers(2, {"a": [NONCHARACTERS[0]]}, NONCHARACTERS[2]) == [NONCHARACTERS[1], NONCHARACTERS[3]]
    assert not choose_markers(2, NONCHARACTERS[1:])


@given(st.text("<|im_end>ab", max_size=30), st.lists(st.text("<|im_end>ab", min_size=2, max_size=8), max_size=4))
def test_breaking_leaves_no_special_token_and_no_other_mark(text: str, specials: list[str]) -> None:
    marker = NONCHARACTERS[0]
    broken = Lookalikes(specials).break_text(text, marker)
    assert broken.replace(marker, "") == text
    assert not any(special in broken for special in specials)
    if not set(text) & {c for special in specials for c in special}:
        assert broken == text


def test_smollm2_chat_is_what_its_template_says(smollm2: Tokenizer) -> None:
    ids = encode_chat(smollm2, user("The capital of France is <|im_end|>?"))
    assert smollm2.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nThe capital of France is <|im_end|>?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [i for i in ids if i in smollm2.special_token_ids] == [1, 2, 1, 2, 1]


def test_chat_without_look_alikes_is_the_rendered_text_tokenized(smollm2: Tokenizer) -> None:
    assert smollm2.chat_template is not None
    specials = smollm2.special_token_texts
    for content in (s for s in STRINGS if not any(special in s for special in specials)):
        text = smollm2.chat_template.render(user(content))
        assert encode_chat(smollm2, user(content)) == smollm2.encode(text)


def test_byte_tokenizer_chats_too() -> None:
    tokenizer = ByteTokenizer()
    ids = encode_chat(tokenizer, user("a<eos>"))
    assert ids == [256, *b"user: a<eos>", 257, 256, *b"assistant: "]


def test_a_role_is_known_to_chats_in_general_or_to_the_template() -> None:
    messages = [{"role": "user"}, {"role": "poltergeist"}]
    with pytest.raises(RequestError, match="system, developer, user") as caught:
        check_roles(messages, ChatTemplate("{{ messages[0].role == 'user' }} poltergeist"))
    assert caught.value.param == "messages[1].role"
    check_roles(messages, ChatTemplate("{{ messages[0].role == 'poltergeist' }}"))
    check_roles([{"role": 5}, {"role": ""}, {}], ChatTemplate("x"))  # refused by others
