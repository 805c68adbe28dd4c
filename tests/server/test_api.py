"""What the two generating endpoints and the small ones answer."""

import json
import time

import pytest
from serving import running_server

import noria


def joined(events, field="text"):
    if field == "text":
        return "".join(choice["text"] for event in events for choice in event["choices"])
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


def test_a_completion_has_openais_shape(server):
    response = server.complete(model="scripted", prompt="Hello", max_tokens=5, temperature=0)
    assert response.status == 200
    answer = response.json
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "scripted"
    [choice] = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert len(choice["text"]) == 5
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_chat_completion_has_openais_shape(server):
    answer = server.chat(max_tokens=5).json
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"]) == 5
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("n", [1, 3])
def test_the_joined_stream_equals_the_whole_answer(server, n):
    body = {"prompt": "one and the same", "max_tokens": 20, "n": n}
    whole = server.complete(**body).json
    events = server.complete(**body, stream=True, stream_options={"include_usage": True}).events
    for choice in whole["choices"]:
        pieces = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [p["finish_reason"] for p in pieces] == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 20 * n
    assert not any("usage" in event for event in events[:-1])
    assert len({event["id"] for event in events}) == 1


def test_the_joined_chat_stream_equals_the_whole_answer(server):
    whole = server.chat(max_tokens=20).json["choices"][0]
    response = server.chat(max_tokens=20, stream=True)
    events = response.events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(events, "content") == whole["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert response.headers["cache-control"] == "no-cache"


def test_no_usage_chunk_unless_it_is_asked_for(server):
    events = server.complete(prompt="x", max_tokens=2, stream=True).events
    assert all(event["choices"] for event in events)


def test_prompts_may_be_text_ids_or_lists_of_either(server):
    text = server.complete(prompt="ab", max_tokens=4).json["choices"][0]["text"]
    ids = server.complete(prompt=[97, 98], max_tokens=4).json["choices"][0]["text"]
    both = server.complete(prompt=["ab", "xyz"], max_tokens=4, n=2).json
    lists = server.complete(prompt=[[97, 98], [120, 121, 122]], max_tokens=4).json
    assert text == ids == both["choices"][0]["text"] == both["choices"][1]["text"] == lists["choices"][0]["text"]
    assert both["choices"][2]["text"] == both["choices"][3]["text"] == lists["choices"][1]["text"] != text
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert both["usage"]["prompt_tokens"] == 5
    assert both["usage"]["completion_tokens"] == 16


def test_cached_tokens_are_told(server):
    prompt = "a prompt of more than two blocks, to be found again"
    cold = server.complete(prompt=prompt, max_tokens=2).json
    warm = server.complete(prompt=prompt, max_tokens=2).json
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) // 16 * 16
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]


def test_a_stop_string_ends_the_answer_and_is_not_counted_beyond(server):
    whole = server.complete(prompt="stop here", max_tokens=30).json["choices"][0]["text"]
    stop = whole[10:12]
    cut = whole[: whole.index(stop)]
    answer = server.complete(prompt="stop here", max_tokens=30, stop=stop).json
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (cut, "stop", stop)
    assert answer["usage"]["completion_tokens"] == len(cut) + 2
    events = server.complete(prompt="stop here", max_tokens=30, stop=[stop, "never"], stream=True).events
    assert joined(events) == cut
    assert events[-1]["choices"][0]["stop_reason"] == stop
    server.wait_quiet()


def test_completion_logprobs(server):
    [choice] = server.complete(prompt="x", max_tokens=4, logprobs=0).json["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"] == [-1.0] * 4
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["top_logprobs"] == [{token: -1.0} for token in logprobs["tokens"]]
    events = server.complete(prompt="x", max_tokens=4, logprobs=0, stream=True).events
    assert [o for e in events for o in e["choices"][0]["logprobs"]["text_offset"]] == [0, 1, 2, 3]


def test_chat_logprobs(server):
    [choice] = server.chat(max_tokens=3, logprobs=True).json["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
    assert all(entry["logprob"] == -1.0 for entry in content)


def test_unknown_fields_are_accepted_and_named(server):
    response = server.complete(prompt="x", max_tokens=1, temprature=0, zebra=None)
    assert response.status == 200
    assert response.headers["x-noria-ignored-fields"] == "temprature, zebra"
    assert "x-noria-ignored-fields" not in server.complete(prompt="x", max_tokens=1, user="me").headers
    streamed = server.complete(prompt="x", max_tokens=1, zebra=1, stream=True)
    assert streamed.headers["x-noria-ignored-fields"] == "zebra"


def test_strict_fields_refuse_what_nobody_knows():
    with running_server(server={"strict_fields": True}) as server:
        refused = server.complete(prompt="x", max_tokens=1, temprature=0)
        assert refused.status == 400
        assert refused.error == {
            "message": "there is no field 'temprature'; did you mean temperature? (the server has --strict-fields)",
            "type": "invalid_request_error",
            "param": "temprature",
            "code": "unknown_parameter",
        }
        option = server.chat(max_tokens=1, stream=True, stream_options={"include_usages": True}).error
        assert option["param"] == "stream_options.include_usages"
        assert "did you mean stream_options.include_usage?" in option["message"]
        long = server.complete(prompt="x", **{"z" * 10_000: 1}).error
        assert "leave it out" in long["message"]
        assert len(long["param"]) < 100
        assert server.request("POST", "/tokenize", {"prompt": "x", "promt": "y"}).error["param"] == "promt"
        # Known and without an effect, or not supported at a value that changes nothing: both are known.
        assert server.complete(prompt="x", max_tokens=1, user="me", suffix="", logprobs=None).status == 200


def test_names_of_unknown_fields_cannot_break_the_header(server):
    response = server.complete(prompt="x", max_tokens=1, **{"a\r\nX-Evil: 1": 1, "b\0\x7f\u00e9": 1})
    assert response.status == 200
    assert response.headers["x-noria-ignored-fields"] == "a??X-Evil: 1, b???"
    many = server.complete(prompt="x", max_tokens=1, **{f"unknown_{i}": 1 for i in range(20000)})
    assert many.headers["x-noria-ignored-fields"].startswith("unknown_0, unknown_1, ")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": ["x"] * 9, "n": 128}, "n"),
        ({"prompt": [[256]] * 100_000}, "prompt"),
        ({"prompt": "x", "stop": "a" * 1_000_000, "n": 16}, "stop"),
        ({"prompt": [256] * 200_000, "n": 128}, "prompt"),
    ],
)
def test_what_is_too_much_is_refused_at_little_cost(server, body, param):
    start = time.monotonic()
    response = server.complete(**body, max_tokens=1)
    assert time.monotonic() - start < 2
    assert (response.status, response.error["param"]) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x", "z": "DEEP"}]},
        {"chat_template_kwargs": {"z": "DEEP"}},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}]},
    ],
)
def test_nesting_beyond_measure_is_the_clients_mistake(server, body):
    whole = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1} | body
    raw = json.dumps(whole).replace('"DEEP"', "[" * 900 + "]" * 900)
    response = server.request("POST", "/v1/chat/completions", raw.encode())
    assert response.status == 400
    assert response.error["type"] == "invalid_request_error"


def test_null_means_the_default(server):
    body = dict.fromkeys(
        ["n", "temperature", "top_p", "stop", "seed", "stream", "stream_options", "logprobs", "user", "best_of",
         "logit_bias", "echo", "suffix", "top_k", "stop_token_ids", "priority"]
    )  # fmt: skip
    assert server.complete(prompt="x", **body, max_tokens=1).status == 200
    assert len(server.complete(prompt="x" * 500, max_tokens=None).json["choices"][0]["text"]) == 12


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "x", "min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "temperature": 3}, "temperature"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "n": True}, "n"),
        ({"prompt": "x", "n": 10**400}, "n"),
        ({"prompt": "x", "max_tokens": 10**400}, "max_tokens"),
        ({"prompt": "x", "seed": 2**64}, "seed"),
        ({"prompt": "x", "seed": -(2**63) - 1}, "seed"),
        ({"prompt": "x", "top_k": 2**64}, "top_k"),
        ({"prompt": "x", "top_k": -2}, "top_k"),
        ({"prompt": "x", "stop_token_ids": [2**64]}, "stop_token_ids"),
        ({"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "stop": [1]}, "stop[0]"),
        ({"prompt": "x", "stream": "yes"}, "stream"),
        ({"prompt": "x", "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", []]}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, 258]}, "prompt"),
        ({"prompt": [1, 2**40]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "x", "echo": 1}, "echo"),
        ({"prompt": "x", "best_of": 2, "n": 3}, "best_of"),
        ({"prompt": "x", "best_of": 129}, "best_of"),
        ({"prompt": "x", "best_of": 0, "n": 0}, "best_of"),
        ({"prompt": "x", "logit_bias": {"999999": 5}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"-1": 5}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"AI": -100}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": [5]}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"5": "1"}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"5": 10**400}}, "logit_bias"),
        ({"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids"),
        ({"prompt": "x", "allowed_token_ids": [258]}, "allowed_token_ids"),
        ({"prompt": "x", "stop_token_ids": [258]}, "stop_token_ids"),
        ({"prompt": "x", "bad_words": [""]}, "bad_words"),
        ({"prompt": "x", "bad_words": "x"}, "bad_words"),
        ({"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt": "x", "echo": True, "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"prompt": "x", "request_id": ""}, "request_id"),
        ({"prompt": "x", "request_id": "a\r\nb"}, "request_id"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "x", "guided_regex": "a*"}, "guided_regex"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"prompt": "x", "priority": "high"}, "priority"),
        ({"prompt": "x", "priority": 1.5}, "priority"),
        ({"prompt": "x", "priority": True}, "priority"),
        ({"prompt": "x", "priority": 2**31}, "priority"),
        ({"prompt": "x", "priority": -(2**31) - 1}, "priority"),
        ({"prompt": "x", "priority": 10**400}, "priority"),
    ],
)
def test_bad_fields_are_refused_by_name(server, body, param):
    response = server.complete(**body)
    assert response.status == 400
    assert response.error["type"] == "invalid_request_error"
    assert response.error["param"] == param
    streamed = server.complete(**{"stream": True} | body)
    assert (streamed.status, streamed.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"priority": 2**31}, "priority"),
        ({"max_completion_tokens": 600}, "max_completion_tokens"),
        ({"max_tokens": 600}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"chat_template": "{{ messages[0].content }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"documents": ["x"]}, "documents[0]"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ],
)
def test_bad_chat_fields_are_refused_by_name(server, body, param):
    response = server.chat(**body)
    assert response.status == 400
    assert response.error["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_what_cannot_go_together_is_refused_by_name(server, body, param):
    response = server.complete(**body)
    assert (response.status, response.error["param"]) == (400, param)


def test_values_that_change_nothing_are_accepted_for_what_is_not_supported(server):
    assert server.chat(max_tokens=1, tools=[], tool_choice="none", response_format={"type": "text"}).status == 200


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'"x"', b"null", b'{"prompt": "x", "temperature": NaN}', b'{"prompt": Infinity}',
            b"\xff\xfe", b'{"prompt": "x"} trailing', b'{"prompt": "\\ud800"}',
            b'{"prompt": "x", "user": "\\udc00\\ud800"}', b'{"prompt": "x", "\\ud83d": 1}',
            b'{"prompt": "\xed\xa0\x80"}',
            b'{"prompt": "x", "temperature": 1e999}', b'{"prompt": "x", "unknown": -Infinity}']
)  # fmt: skip
def test_what_is_no_json_object_is_refused(server, raw):
    response = server.request("POST", "/v1/completions", raw)
    assert response.status == 400
    assert response.error["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("body", "numbers"),
    [({"prompt": "x" * 512}, ["512"]), ({"prompt": "x" * 500, "max_tokens": 13}, ["500", "13", "513", "512"])],
)
def test_what_exceeds_the_context_is_refused_with_the_numbers(server, body, numbers):
    for stream in (False, True):
        response = server.complete(**body, stream=stream)
        assert response.status == 400
        assert response.error["code"] == "context_length_exceeded"
        assert all(number in response.error["message"] for number in numbers)


def test_one_bad_prompt_of_a_list_refuses_the_call_and_leaves_nothing_behind(server):
    assert server.complete(prompt=["fine", "x" * 600], n=3).status == 400
    server.wait_quiet()


def test_models_and_their_names(server):
    listed = server.get("/v1/models").json
    assert listed["object"] == "list"
    [card] = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("scripted", "model", 512)
    assert server.get("/v1/models/scripted").json == card
    assert server.get("/v1/models/").status == 404
    for response in (server.get("/v1/models/org/other"), server.complete(model="other", prompt="x")):
        assert response.status == 404
        assert response.error["code"] == "model_not_found"


def test_the_small_routes(server):
    assert server.get("/version").json == {"version": noria.__version__}
    assert server.get("/health").json == {"status": "ok", "phase": "ready"}
    assert server.get("/nowhere").status == 404
    assert server.get("/nowhere").error["type"] == "invalid_request_error"
    assert server.get("/v1/completions").status == 405
    assert server.metric("generation_tokens_total") > 0


def test_metrics_add_up_after_all_that(server):
    server.wait_quiet()
    arrived = server.metric("num_requests_arrived_total")
    reasons = ("stop", "length", "abort", "error", "timeout")
    assert arrived == sum(server.metric("request_success_total", finished_reason=reason) for reason in reasons)
    assert server.metric("request_success_total", finished_reason="error") == 0


def test_a_body_that_is_too_large_is_refused_and_nobody_else_notices(server):
    response = server.request("POST", "/v1/completions", b" " * (33 * 2**20))
    assert response.status == 413
    assert server.complete(prompt="x", max_tokens=1).status == 200


def test_json_is_json(server):
    """Text that must be escaped comes back as it went in."""
    answer = server.complete(prompt='quote " and \u2028 and é and 😀', max_tokens=3)
    json.loads(answer.body)
    assert answer.status == 200
