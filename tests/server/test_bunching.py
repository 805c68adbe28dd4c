"""However tokens are bunched, a stream says what the whole answer says: texts, stops, usage, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_calls import all_cuts, answer, assembled, comparable, events_of, run, start, stream

from noria.core.events import FinishReason
from noria.fakes.tokenizer import ByteTokenizer

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
COMPLETION: dict[str, Any] = {"prompt": "hé", "logprobs": 2}
EXTRAS = {"return_token_ids": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def without_stream_options(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "stream_options"}


def check(body: dict[str, Any], bunches: Any, expected: Any = None) -> Any:
    """The stream amounts to the whole answer (and to what is expected); returns the latter."""
    whole = comparable(answer(without_stream_options(body), bunches))
    chunks = stream(body, bunches)
    assert assembled(chunks, whole) == whole
    check_usage(chunks, body)
    assert expected is None or whole == expected
    return whole


def check_usage(chunks: list[Any], body: dict[str, Any]) -> None:
    """The last chunk has the usage; with continuous statistics each has what it and those before it told."""
    assert chunks[-1]["choices"] == []
    num_told = 0
    for chunk in chunks:
        if body["stream_options"].get("continuous_usage_stats"):
            if chunk["choices"]:
                num_told += len(chunk["choices"][0].get("token_ids", ()))
            assert chunk["usage"]["completion_tokens"] == num_told
            assert chunk["usage"]["total_tokens"] == num_told + chunk["usage"]["prompt_tokens"]
        else:
            assert ("usage" in chunk) == (chunk is chunks[-1])


@pytest.mark.parametrize("body", [COMPLETION, COMPLETION | {"echo": True}, CHAT], ids=["completion", "echo", "chat"])
@pytest.mark.parametrize("extras", [EXTRAS, {"stream_options": {"include_usage": True}}], ids=["extras", "plain"])
@pytest.mark.parametrize(
    ("text", "stop", "include"),
    [
        ("a😀b€", [], False),
        ("They jump", ["jum"], False),
        ("xENDy😀", ["DyZ", "END", "ND"], True),
        ("ab\ufffdé", ["é€", "\ufffdé"], False),
    ],
)
def test_every_way_to_cut_a_text(body: Any, extras: Any, text: str, stop: list[str], include: bool) -> None:
    body = body | extras | {"stop": stop, "include_stop_str_in_output": include}
    if body.get("echo"):
        body = {name: value for name, value in body.items() if name != "logprobs"}  # the prompt's come from the engine
    token_ids = list(text.encode())[:9]
    expected = None
    for cuts in all_cuts(len(token_ids)):
        expected = check(body, [[event] for event in events_of(0, token_ids, cuts)], expected)


TOKENS = st.one_of(
    st.text("ab<é😀", max_size=12).map(lambda text: list(text.encode())),
    st.lists(st.sampled_from([*b"ab<", 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 256]), max_size=16),
)
STOPS = st.lists(st.text("ab<é😀", min_size=1, max_size=4) | st.just("\ufffd"), max_size=3)


@settings(deadline=None)  # an example runs in milliseconds, but the machine may stand still
@given(st.data())
def test_any_bunching_of_any_sequences(data: st.DataObject) -> None:
    """Two prompts, two sequences each, ended by themselves or from outside, cut and interleaved in any way."""
    drawn = {
        "stop": data.draw(STOPS),
        "include_stop_str_in_output": data.draw(st.booleans()),
        "skip_special_tokens": data.draw(st.booleans()),
        "n": 2,
    }
    is_chat = data.draw(st.booleans())
    body = (CHAT if is_chat else COMPLETION | {"prompt": ["hé", "x"]}) | EXTRAS | drawn
    reason = st.sampled_from([FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT])
    outputs = [(data.draw(TOKENS), data.draw(reason)) for _ in range(2 if is_chat else 4)]
    expected = None
    for _ in range(2):
        bunches = data.draw(interleaved(outputs))
        expected = check(body, bunches, expected)


@st.composite
def interleaved(draw: Any, outputs: list[tuple[list[int], FinishReason]]) -> list[Any]:
    """Events of all sequences, in order within each, in bunches."""
    waiting = []
    for choice, (token_ids, reason) in enumerate(outputs):
        cuts = sorted(draw(st.lists(st.integers(0, len(token_ids)), max_size=6)))
        waiting.append(events_of(choice, token_ids, cuts, reason))
    bunches: list[Any] = [[]]
    while any(waiting):
        choice = draw(st.sampled_from([choice for choice, events in enumerate(waiting) if events]))
        bunches[-1].append(waiting[choice].pop(0))
        if draw(st.booleans()):
            bunches.append([])
    return bunches


def test_the_usual_chunk_is_sent_as_soon_as_there_is_text() -> None:
    """One chunk for each token that adds text, and none for what may still become a stop string."""
    chunks = stream({"prompt": "x", "stop": ["ENDS"]}, [[e] for e in events_of(0, list(b"aENDb"), [1, 2, 3, 4])])
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "ENDb"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_what_a_stop_string_ended_is_ended_in_the_engine() -> None:
    first, rest = events_of(0, list(b"abc"), [2])
    _, generation, engine = start({"prompt": "x", "stop": "b"}, [[first], [rest]])
    run(generation.wait())
    assert engine.ended == [0]
    assert generation.usage.completion_tokens == 2


def test_an_end_token_has_no_text_but_counts() -> None:
    eos = [[e] for e in events_of(0, [*b"ab", ByteTokenizer.EOS], [1, 2], FinishReason.STOP)]
    whole = check(COMPLETION | EXTRAS, eos)
    assert whole["choices"][0]["text"] == "ab"
    assert whole["usage"]["completion_tokens"] == 3
    assert whole["choices"][0]["token_ids"] == [*b"ab", ByteTokenizer.EOS]
