"""Prompts that are told: echo, their log-probabilities, scoring without generating; and the best of several."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from scripted_calls import MODEL, answer, assembled, comparable, events_of, logprob_of, make_api, run, start, stream

from noria.core.events import FinishReason, RequestEvent
from noria.core.plan import TokenLogprobs
from noria.errors import RequestError
from noria.fakes.tokenizer import ByteTokenizer
from noria.kv.prefix import PrefixKey
from noria.outputs import CompletionOutput
from noria.server.api import bad_word_spellings, token_biases
from noria.server.bodies import CompletionBody
from noria.server.completions import CompletionsApi, best_outputs
from noria.server.errors import ApiError
from noria.server.served import ServedModel
from noria.server.token_texts import LOWEST_LOGPROB, TokenTexts

BOS = ByteTokenizer.BOS


def scores(choice: int, prompt: bytes, start: int = 1, end: int | None = None, **last: Any) -> RequestEvent:
    """What the engine says of the tokens of a prompt from the second on."""
    ids = list(prompt)[: end or len(prompt)]
    told = tuple(logprob_of(ids[position], position) for position in range(start, len(ids)))
    return RequestEvent(str(choice), prompt_logprobs=told, **last)


def test_scoring_tells_one_entry_per_prompt_token_the_first_null() -> None:
    """`echo` with `max_tokens` 0, as evaluations send it."""
    body = {"prompt": [list(b"ok? Yes")], "echo": True, "logprobs": 1, "max_tokens": 0}
    told = answer(body, [[scores(0, b"ok? Yes", end=3)], [scores(0, b"ok? Yes", 3, finish_reason=FinishReason.LENGTH)]])
    [choice] = told["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ok? Yes", "length")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list("ok? Yes")
    assert logprobs["text_offset"] == list(range(7))
    assert logprobs["token_logprobs"] == [None] + [-0.5 - position for position in range(1, 7)]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"l": -1.25, "k": -1.5}  # one alternative, and the token itself
    assert told["usage"]["completion_tokens"] == 0


def test_echo_joins_what_was_given_and_what_was_generated() -> None:
    body = {"prompt": "é=", "echo": True, "logprobs": 0, "max_tokens": 2}
    told = answer(body, [[scores(0, "é=".encode())], events_of(0, list(b"xy"), [1])])
    [choice] = told["choices"]
    assert choice["text"] == "é=xy"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "=", "x", "y"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -2.5, -0.5, -1.5]
    assert choice["logprobs"]["top_logprobs"][1:4] == [{"bytes:\\xa9": -1.5}, {"=": -2.5}, {"x": -0.5}]
    assert choice["text"][choice["logprobs"]["text_offset"][3] :] == "xy"


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("others_first", [False, True])
def test_an_echo_in_a_stream_comes_before_its_choices_and_amounts_to_the_whole(
    logprobs: int | None, others_first: bool
) -> None:
    """The other sequences of a prompt may have tokens before its log-probabilities are known."""
    body = {"prompt": ["abc", "de"], "n": 2, "echo": True, "logprobs": logprobs, "return_token_ids": True}
    first = [[scores(0, b"abc", end=2)], [scores(0, b"abc", 2)], [scores(2, b"de")]]
    rest = [[e] for choice in (1, 0, 3, 2) for e in events_of(choice, [*b"xy", 0x30 + choice], [1, 2])]
    bunches = rest[:2] + first + rest[2:] if others_first else first + rest
    if logprobs is None:
        bunches = rest
    whole = comparable(answer(body, bunches))
    body |= {"stream_options": {"include_usage": True}}
    chunks = stream(body, bunches)
    assert assembled(chunks, whole) == whole
    firsts: dict[int, str] = {}
    for chunk in chunks[:-1]:
        firsts.setdefault(chunk["choices"][0]["index"], chunk["choices"][0]["text"])
    assert firsts == {0: "abc", 1: "abc", 2: "de", 3: "de"}


def test_a_sequence_that_ends_before_its_prompt_was_scored_does_not_keep_the_others() -> None:
    body = {"prompt": "abc", "n": 2, "echo": True, "logprobs": 0}
    aborted = RequestEvent("0", finish_reason=FinishReason.ABORT)
    chunks = stream(body, [events_of(1, list(b"x"), []), [scores(0, b"abc", end=2)], [aborted]])
    told = [(c["choices"][0]["index"], c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks]
    assert told == [(1, "abc", None), (1, "x", "length"), (0, "abc", None), (0, "", "abort")]
    assert chunks[0]["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.5, None]


def test_half_a_character_at_the_end_of_a_prompt_is_told_once() -> None:
    smile = list("😀".encode())
    body = {"prompt": [*b"a", *smile[:2]], "echo": True, "logprobs": None}
    assert answer(body, [events_of(0, smile[2:], [])])["choices"][0]["text"] == "a😀"
    assert answer(body, [events_of(0, [], [])])["choices"][0]["text"] == "a\ufffd"


def test_offsets_go_on_in_a_character_that_the_prompt_began() -> None:
    smile = list("😀".encode())
    body = {"prompt": [*b"a", *smile[:2]], "logprobs": 0}
    [choice] = answer(body, [events_of(0, [*smile[2:], *b"b"], [])])["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("😀b", [0, 0, 1])


def test_special_tokens_in_an_echo() -> None:
    """A text is echoed as it was given; ids are told as generated ones would be."""
    bodies = [{"prompt": "<bos>hi"}, {"prompt": [BOS, *b"hi"]}, {"prompt": [BOS, *b"hi"], "skip_special_tokens": False}]
    end = RequestEvent("0", finish_reason=FinishReason.LENGTH, prompt_logprobs=tuple(map(logprob_of, b"hi", (1, 2))))
    for body, text, offsets in zip(
        bodies, ["<bos>hi", "hi", "<bos>hi"], [[0, 5, 6], [0, 0, 1], [0, 5, 6]], strict=True
    ):
        [choice] = answer(body | {"echo": True, "logprobs": 0, "max_tokens": 0}, [[end]])["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)


def test_a_bos_that_the_tokenizer_put_is_scored_and_not_shown() -> None:
    served = ServedModel("m", ByteTokenizer(wants_bos=True), 512, MODEL.text_work)
    api = CompletionsApi(CompletionBody(prompt="hi", echo=True, logprobs=0, max_tokens=0), served)
    assert api.encode_prompts() == [[BOS, *b"hi"]]
    told = tuple(map(logprob_of, b"hi", (1, 2)))
    _, generation, _ = start(
        {"prompt": [BOS, *b"hi"], "echo": True, "logprobs": 0, "max_tokens": 0},
        [[RequestEvent("0", finish_reason=FinishReason.LENGTH, prompt_logprobs=told)]],
    )
    run(generation.wait())
    [choice] = json.loads(api.answer(generation))["choices"]
    assert choice["text"] == "hi"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]
    assert choice["logprobs"]["tokens"] == ["<bos>", "h", "i"]


@pytest.mark.parametrize("chat", [False, True])
def test_prompt_logprobs_have_vllms_shape(chat: bool) -> None:
    prompt = b"abc"
    body: dict[str, Any] = {"prompt_logprobs": 1, "return_token_ids": True, "max_tokens": 1}
    body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "abc"}
    if chat:
        prompt = bytes(i % 256 for i in make_api(body).encode_prompts()[0])
    told = answer(body, [[scores(0, prompt)], events_of(0, [65], [])])
    entries = told["prompt_logprobs"] if chat else told["choices"][0]["prompt_logprobs"]
    assert len(entries) == len(prompt)
    assert entries[0] is None
    own, other = prompt[1], (prompt[1] + 1) % 256
    assert entries[1] == {
        str(own): {"logprob": -1.5, "rank": 2, "decoded_token": chr(own)},
        str(other): {"logprob": -1.25, "rank": 1, "decoded_token": chr(other)},
    }
    assert told["choices"][0]["token_ids"] == [65]
    ids = told["prompt_token_ids"] if chat else told["choices"][0]["prompt_token_ids"]
    assert ids == make_api(body).encode_prompts()[0]


def test_extensions_are_there_only_if_they_were_asked_for() -> None:
    whole = answer({"prompt": "x"}, [events_of(0, [65], [])])
    assert set(whole["choices"][0]) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    chat = answer({"messages": [{"role": "user", "content": "x"}]}, [events_of(0, [65], [])])
    assert set(chat) == {"id", "object", "created", "model", "choices", "usage"}
    assert set(chat["choices"][0]) == {"index", "message", "logprobs", "finish_reason", "stop_reason"}


def test_tokens_may_be_told_as_ids() -> None:
    body = {"prompt": "x", "logprobs": 2, "return_tokens_as_token_ids": True}
    logprobs = answer(body, [events_of(0, [65], [])])["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:65"]
    assert set(logprobs["top_logprobs"][0]) == {"token_id:65", "token_id:66"}


def test_alternatives_that_are_no_characters_stay_apart() -> None:
    half = TokenLogprobs(0xF0, -1.0, 1, ((0xF0, -1.0), (0xF1, -2.0), (0xF2, -math.inf)))
    logprobs = TokenTexts(ByteTokenizer()).completion([half], 3, lambda token_id: 0)
    assert logprobs.top_logprobs == [{"bytes:\\xf0": -1.0, "bytes:\\xf1": -2.0, "bytes:\\xf2": LOWEST_LOGPROB}]


def test_numbers_that_json_cannot_hold_do_not_go_out() -> None:
    bad = TokenLogprobs(65, -math.inf, 1, ((66, math.nan),))
    event = RequestEvent("0", (65,), (bad,), FinishReason.LENGTH, prompt_logprobs=(bad,))
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1}
    for body in (chat | {"prompt_logprobs": 1}, {"prompt": "xy", "echo": True, "logprobs": 1, "prompt_logprobs": 1}):
        text = json.dumps(answer(body, [[event]]))
        assert "Infinity" not in text
        assert "NaN" not in text
        assert str(LOWEST_LOGPROB) in text


# The best of several


def output(index: int, *logprobs: float) -> CompletionOutput:
    return CompletionOutput(index=index, logprobs=[TokenLogprobs(65, value, 1) for value in logprobs])


def test_the_best_have_the_highest_log_probability_per_token() -> None:
    outputs = [output(0, -1.0), output(1, -0.5, -0.6, -0.7), output(2, -0.7, -0.7), output(3, -0.5, -0.9)]
    assert [best.index for best in best_outputs(outputs, 2)] == [1, 2]  # of equals the first
    assert [best.index for best in best_outputs(outputs, 4)] == [0, 1, 2, 3]


def test_best_of_gives_n_of_each_prompt_and_counts_all() -> None:
    body = {"prompt": ["a", "b"], "n": 1, "best_of": 2, "max_tokens": 3}
    lengths = {0: 3, 1: 1, 2: 1, 3: 2}  # a made-up log-probability falls with the position, so the shortest are best
    bunches = [events_of(choice, [65 + choice] * length, []) for choice, length in lengths.items()]
    told = answer(body, bunches)
    assert [(choice["index"], choice["text"], choice["logprobs"]) for choice in told["choices"]] == [
        (0, "B", None),
        (1, "C", None),
    ]
    assert told["usage"]["completion_tokens"] == 7


# Fields


@pytest.mark.parametrize("key", ["AI", "", "1.5", " 1", "+1", "01", "1_0", "１", "9" * 30])
def test_keys_of_a_logit_bias_are_token_ids(key: str) -> None:
    with pytest.raises(ApiError) as refused:
        token_biases({key: 1.0})
    assert refused.value.content.error.param == "logit_bias"


def test_a_logit_bias_arrives_with_numbers_for_keys() -> None:
    assert make_api({"prompt": "x", "logit_bias": {"65": -100, "7": 2.5}}).sampling().logit_bias == {65: -100, 7: 2.5}
    with pytest.raises(RequestError) as refused:
        make_api({"prompt": "x", "logit_bias": {"65": 101}}).sampling()
    assert refused.value.param == "logit_bias"


def test_bad_words_are_looked_for_with_and_without_a_space() -> None:
    assert bad_word_spellings(MODEL.tokenizer, ["ab", " ab"]) == ((97, 98), (32, 97, 98))
    served = ByteTokenizer(wants_bos=True)
    assert bad_word_spellings(served, ["a"]) == ((97,), (32, 97))
    for words in ([""], ["  "], ["x"] * 1025, ["x" * 20000]):
        with pytest.raises(ApiError):
            bad_word_spellings(served, words)


def test_every_sampling_field_arrives() -> None:
    body = {
        "n": 3, "max_tokens": 7, "temperature": 0.5, "top_p": 0.4, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "seed": 11, "stop": ["a"], "stop_token_ids": [3],
        "include_stop_str_in_output": True, "ignore_eos": True, "min_tokens": 2, "logit_bias": {"1": 2},
        "allowed_token_ids": [1, 2], "skip_special_tokens": False, "prompt_logprobs": 2,
    }  # fmt: skip
    for endpoint in ({"prompt": "x"}, {"messages": []}):
        sampling = make_api(endpoint | body).sampling()
        expected = body | {"stop": ("a",), "stop_token_ids": (3,), "logit_bias": {1: 2}, "allowed_token_ids": (1, 2)}
        assert {name: getattr(sampling, name) for name in body} == expected
    assert make_api({"messages": [], "max_tokens": 7, "max_completion_tokens": 8}).sampling().max_tokens == 8


@pytest.mark.parametrize(
    ("keep", "max_tokens", "kept"),
    [(3, None, 3), (600, None, 600), (-1, None, 511), (-1, 12, 500), (-1, 0, 512), (-1, 600, 1), (None, None, 600)],
)
def test_prompts_are_truncated_from_the_left(keep: int | None, max_tokens: int | None, kept: int) -> None:
    ids = [*range(97, 123), *[65] * 574]
    body = {"prompt": ids, "truncate_prompt_tokens": keep, "max_tokens": max_tokens}
    assert make_api(body).encode_prompts() == [ids[-kept:]]
    chat = {"messages": [{"role": "user", "content": "x" * 700}], "truncate_prompt_tokens": keep}
    [encoded] = make_api(chat | {"max_tokens": max_tokens}).encode_prompts()
    assert len(encoded) == (kept if keep is not None else len(encoded))


def test_what_is_echoed_of_a_truncated_prompt_is_what_was_left() -> None:
    body = {"prompt": "abcdef", "echo": True, "truncate_prompt_tokens": 2}
    assert answer(body, [events_of(0, list(b"!"), [])])["choices"][0]["text"] == "ef!"


def test_a_clients_id_is_told_and_a_salt_goes_into_the_prefix_key() -> None:
    api = make_api({"prompt": "x", "request_id": "mine", "cache_salt": "s"})
    assert api.prefix_key("t") == PrefixKey(tenant="t", salt="s")
    assert "mine" not in api.call_id
    assert answer({"prompt": "x", "request_id": "mine"}, [events_of(0, [65], [])])["id"] == "cmpl-mine"
