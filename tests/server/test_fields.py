"""Fields of the two generating endpoints, from the HTTP body to the answer, over an engine that checks every plan."""

from __future__ import annotations

import json

import pytest

from noria.fakes.tokenizer import ByteTokenizer


def test_scoring_a_list_of_prompts(server):
    """As lm-eval's local-completions does: lists of token ids, echo, log-probabilities, a token that is thrown away."""
    prompts = [list(b"first one"), list(b"the second"), list(b"third" * 20)]
    for max_tokens in (0, 1):
        answer = server.complete(
            prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1234
        ).json
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        for prompt, choice in zip(prompts, answer["choices"], strict=True):
            logprobs = choice["logprobs"]
            # The scripted engine gives the token at position p the log-probability -p.
            assert logprobs["token_logprobs"][: len(prompt)] == [None] + [-float(p) for p in range(1, len(prompt))]
            assert {len(entries) for entries in logprobs.values()} == {len(prompt) + max_tokens}
            assert choice["text"][: len(prompt)] == bytes(prompt).decode()
            assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 3 * max_tokens
        assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_scoring_again_is_not_taken_from_the_cache(server):
    body = {"prompt": "a prompt that is longer than two blocks of tokens", "echo": True, "logprobs": 0, "max_tokens": 0}
    first, second = server.complete(**body).json, server.complete(**body).json
    assert first["choices"] == second["choices"]
    assert second["choices"][0]["logprobs"]["token_logprobs"][-1] == 1.0 - len(body["prompt"])


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_streamed_echo_amounts_to_the_whole(server, logprobs, max_tokens):
    body = {"prompt": ["one", "four"], "n": 2, "echo": True, "max_tokens": max_tokens, "logprobs": logprobs}
    whole = server.complete(**body).json
    events = server.complete(**body, stream=True, stream_options={"include_usage": True}).events
    for choice in whole["choices"]:
        told = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in told) == choice["text"]
        assert told[-1]["finish_reason"] == choice["finish_reason"] == "length"
        for name in choice["logprobs"] or ():
            assert [v for c in told for v in (c["logprobs"] or {name: []})[name]] == choice["logprobs"][name]
    assert events[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


def test_nothing_generated_is_an_answer_too(server):
    whole = server.complete(prompt="x", max_tokens=0).json
    assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == ("", "length")
    events = server.chat(max_tokens=0, stream=True).events
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, "length"]
    assert server.complete(prompt="x" * 512, max_tokens=0, echo=True).json["choices"][0]["text"] == "x" * 512


def test_best_of_counts_what_it_threw_away(server):
    answer = server.complete(prompt="x", max_tokens=3, n=2, best_of=4).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 12


def test_continuous_usage_adds_up(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    for events in (
        server.complete(prompt="abc", max_tokens=5, stream=True, stream_options=options).events,
        server.chat(max_tokens=5, stream=True, stream_options=options).events,
    ):
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[-2:] == [5, 5]
        assert events[-1]["choices"] == []
    ignored = server.complete(prompt="abc", max_tokens=5, stream=True, stream_options={"continuous_usage_stats": True})
    assert not any("usage" in event for event in ignored.events)  # as elsewhere, only beside include_usage


def test_token_ids_are_told_in_both_forms(server):
    body = {"prompt": "abc", "max_tokens": 4, "return_token_ids": True}
    [choice] = server.complete(**body).json["choices"]
    assert choice["prompt_token_ids"] == list(b"abc")
    assert bytes(choice["token_ids"]).decode() == choice["text"]
    events = server.complete(**body, stream=True).events
    assert events[0]["choices"][0]["prompt_token_ids"] == list(b"abc")
    assert [i for event in events for i in event["choices"][0]["token_ids"]] == choice["token_ids"]
    chat = server.chat(max_tokens=4, return_token_ids=True).json
    assert len(chat["choices"][0]["token_ids"]) == 4
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    streamed = server.chat(max_tokens=4, return_token_ids=True, stream=True).events
    assert streamed[0]["prompt_token_ids"] == chat["prompt_token_ids"]


def test_stop_strings_may_be_included(server):
    whole = server.complete(prompt="stop here", max_tokens=30).json["choices"][0]["text"]
    stop = whole[10:12]
    body = {"prompt": "stop here", "max_tokens": 30, "stop": stop, "include_stop_str_in_output": True}
    end = whole.index(stop) + 2
    assert server.complete(**body).json["choices"][0]["text"] == whole[:end]
    assert "".join(c["choices"][0]["text"] for c in server.complete(**body, stream=True).events) == whole[:end]


def test_a_prompt_may_be_cut_to_what_fits(server):
    for prompt in ("x" * 600, list(b"x" * 600)):
        answer = server.complete(prompt=prompt, max_tokens=12, truncate_prompt_tokens=-1).json
        assert answer["usage"]["prompt_tokens"] == 500
        assert (
            server.complete(prompt=prompt, max_tokens=1, truncate_prompt_tokens=7).json["usage"]["prompt_tokens"] == 7
        )
    assert server.complete(prompt="x" * 600, max_tokens=512, truncate_prompt_tokens=-1).status == 400


def test_two_calls_may_bring_the_same_id(server):
    from serving import Call

    calls = [Call(server, prompt="x" * 50, max_tokens=200, request_id="mine") for _ in range(4)]
    answers = [call.result().json for call in calls]
    assert {answer["id"] for answer in answers} == {"cmpl-mine"}
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {200}
    assert server.chat(max_tokens=1, request_id="r").json["id"] == "chatcmpl-r"


def test_a_salt_keeps_prefixes_apart(server):
    prompt = "a prompt that several tenants send, longer than two blocks"

    def cached(**salt):
        answer = server.complete(prompt=prompt, max_tokens=1, **salt).json
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(), cached(cache_salt="a"), cached(cache_salt="b")] == [0, 0, 0]
    assert cached() == cached(cache_salt="a") == cached(cache_salt="b") == len(prompt) // 16 * 16


def test_fields_that_change_nothing_here_are_accepted(server):
    response = server.chat(
        max_tokens=1, user="u", metadata={"a": "b"}, store=False, service_tier="auto", safety_identifier="s",
        prompt_cache_key="k", spaces_between_special_tokens=False, skip_special_tokens=True, parallel_tool_calls=True,
    )  # fmt: skip
    assert response.status == 200
    assert "x-noria-ignored-fields" not in response.headers


# Chat


def prompt_of(server, **body):
    answer = server.chat(max_tokens=1, return_token_ids=True, **body)
    assert answer.status == 200, answer.body
    return ByteTokenizer().decode(answer.json["prompt_token_ids"], skip_special_tokens=False)


def test_the_last_message_may_be_continued(server):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am "}]
    assert prompt_of(server, messages=messages).endswith("<bos>assistant: I am <eos><bos>assistant: ")
    for body in ({}, {"add_generation_prompt": False}):
        assert prompt_of(server, messages=messages, continue_final_message=True, **body).endswith("assistant: I am ")
    assert prompt_of(server, messages=messages, add_generation_prompt=False).endswith("I am <eos>")


def test_parts_and_developers_are_understood(server):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert prompt_of(server, messages=messages).startswith("<bos>system: Be brief.<eos><bos>user: a\nb<eos>")


def test_templates_of_requests_run_only_where_they_are_trusted():
    from serving import running_server

    template = "{{ messages[0].content }}|{{ reasoning_effort }}|{{ documents[0].title }}|{{ mood }}"
    body = {"chat_template": template, "reasoning_effort": "low", "documents": [{"title": "t"}]}
    with running_server({"checked": True}, {"trust_request_chat_template": True}) as trusting:
        assert prompt_of(trusting, **body, chat_template_kwargs={"mood": "good"}) == "hi|low|t|good"


def test_lone_surrogates_within_arguments_are_no_trouble(server):
    """They are JSON within JSON, which the strict parser does not look into."""
    call = {"function": {"name": "f", "arguments": json.dumps({"a": "\ud800", "b": float("nan")})}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    assert server.chat(messages=messages, max_tokens=1).status == 200


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("chat/completions", {"prompt": "x"}, "messages is required; a prompt goes to /v1/completions"),
        ("completions", {"messages": []}, "prompt is required; messages go to /v1/chat/completions"),
        ("completions", {}, "prompt is required"),
        (
            "completions",
            {"prompt": "x", "temperature": "hot"},
            "temperature: Expected a number or null, got a string",
        ),
        ("completions", {"prompt": 5}, "prompt: Expected a string or an array, got an integer"),
    ],
)
def test_errors_speak_of_json_and_say_where_a_body_belongs(server, path, body, message):
    reply = server.request("POST", f"/v1/{path}", body)
    assert (reply.status, reply.json["error"]["message"]) == (400, message)
