"""Faults that users of other servers ran into, as clients of a real server meet them: `docs/field_reports.md`. Ids are
those of that table; what other files test is named there."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serving import Call, Response, Server, parse_events, running_server

PATHS = ("/v1/completions", "/v1/chat/completions")


def body_of(path: str, text: str = "hi", **fields: Any) -> dict[str, Any]:
    """A request of either endpoint with this text for its prompt."""
    chat = path.endswith("/chat/completions")
    return ({"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}) | fields


def ask(server: Server, path: str, text: str = "hi", **fields: Any) -> Response:
    return server.request("POST", path, body_of(path, text, **fields))


def text_of(choice: dict[str, Any]) -> str:
    """Of a whole answer's choice or of a chunk's."""
    if "text" in choice:
        return str(choice["text"])
    return str(choice.get("message", choice.get("delta", {})).get("content") or "")


def assert_refused(response: Response, param: str) -> None:
    assert (response.status, response.error["param"]) == (400, param), response.body[:300]


@pytest.fixture(autouse=True)
def next_request_is_served(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever was sent to the shared server, it serves the next one and holds nothing."""
    yield
    if "server" in request.fixturenames:
        server: Server = request.getfixturevalue("server")
        assert server.complete(prompt="x", max_tokens=1).status == 200
        server.wait_quiet()


# --- B, C: whose prompts and requests are whose ---


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_b9_no_salt_makes_another_tenants_prefix_findable(guarded: Server, path: str, stream: bool) -> None:
    """The salt is the caller's to choose, so what keeps tenants apart is the key. Each finds its own again."""
    for alices, bobs in ((None, None), ("s", "s"), ("s", None), (None, "key#1"), (None, "alices")):
        found = []
        for key, salt in (("alices", alices), ("alices", alices), ("bobs", bobs), ("bobs", bobs)):
            guarded.headers = {"Authorization": f"Bearer {key}"}
            fields: dict[str, Any] = {"max_tokens": 1} | ({"cache_salt": salt} if salt else {})
            if stream:
                fields |= {"stream": True, "stream_options": {"include_usage": True}}
            response = ask(guarded, path, f"{stream:d}{alices}{bobs}: a prompt of a block or several", **fields)
            usage = response.events[-1]["usage"] if stream else response.json["usage"]
            found.append(usage["prompt_tokens_details"]["cached_tokens"] > 0)
        assert found == [False, True, False, True], (alices, bobs)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    with running_server({"checked": True, "max_model_len": 512}, {"api_key": ["alices", "bobs"]}) as server:
        yield server


@pytest.mark.parametrize("how", ["header", "field"])
def test_c6_requests_of_one_id_are_different_requests(how: str) -> None:
    """Eight at once over both endpoints, with two sequences each, and one that its client leaves."""
    with running_server({"checked": True, "step_s": 0.005, "max_model_len": 512}) as server:
        server.headers = {"X-Request-Id": "mine"} if how == "header" else {}
        own: dict[str, Any] = {"request_id": "mine"} if how == "field" else {}
        left = http.client.HTTPConnection(server.host, server.port)
        body = {"prompt": "x", "max_tokens": 400, "stream": True} | own
        left.request("POST", PATHS[0], json.dumps(body), server.headers)
        stream_left = left.getresponse()
        assert stream_left.readline().startswith(b"data: ")
        kinds = list(itertools.product(PATHS, (False, True))) * 2
        calls = [
            Call(server, path=path, **body_of(path, "one and the same", max_tokens=60, n=2, stream=stream, **own))
            for path, stream in kinds
        ]
        server.wait_until(lambda: server.metric("num_requests_arrived_total") == 17)
        stream_left.close()
        left.close()
        for call, (_, stream) in zip(calls, kinds, strict=True):
            response = call.result()
            answers = response.events if stream else [response.json]
            for index in (0, 1):
                text = "".join(text_of(c) for a in answers for c in a["choices"] if c["index"] == index)
                assert len(text) == 60
            if how == "field":
                assert {answer["id"].partition("-")[2] for answer in answers} == {"mine"}
        server.wait_quiet()


# --- D: streams ---


@pytest.fixture(scope="module")
def talker() -> Iterator[Server]:
    """Says this again and again, a byte at a time."""
    with running_server({"text": "é😀 wörld, 日本\n"}) as server:
        yield server


@pytest.mark.parametrize("path", PATHS)
def test_d1_characters_of_several_tokens_are_whole_wherever_the_answer_ends(talker: Server, path: str) -> None:
    """Cut after each byte, also within a character, a stream says what the whole answer says; and no more than what is
    not complete is ever behind."""
    data = "é😀 wörld, 日本\n".encode()
    for max_tokens in range(1, len(data) + 3):
        expected = (data * 2)[:max_tokens].decode(errors="replace")
        assert text_of(ask(talker, path, max_tokens=max_tokens).json["choices"][0]) == expected
        events = ask(talker, path, max_tokens=max_tokens, stream=True).events
        pieces = [text for event in events if (text := text_of(event["choices"][0]))]
        assert "".join(pieces) == expected
        assert all("\ufffd" not in piece for piece in pieces[:-1])
        assert len(pieces) >= len(expected.replace("\ufffd", "")), "each character is sent when it is complete"


@pytest.mark.parametrize(
    ("field", "value"), [("n", 0), ("temperature", "hot"), ("max_tokens", -1), ("stop", [""]), ("logit_bias", {"a": 1})]
)
def test_d4_a_stream_that_cannot_begin_is_an_ordinary_error(server: Server, field: str, value: Any) -> None:
    for path in PATHS:
        response = ask(server, path, stream=True, **{field: value})
        assert_refused(response, field)
        assert response.headers["content-type"] == "application/json"


def kill_the_engine(server: Server) -> None:
    os.kill(server.engine_pid, signal.SIGKILL)


def shut_down(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)


def abort(server: Server) -> None:
    assert server.request("POST", "/abort_requests", {"abort_all": True}).status == 200


def nothing(server: Server) -> None:
    pass


@pytest.mark.parametrize(
    ("end", "max_tokens", "errors"),
    [
        (nothing, 20, {None}),
        (abort, 4000, {None}),
        (kill_the_engine, 4000, {"engine_error"}),
        (shut_down, 4000, {"engine_error"}),
        (nothing, 4000, {"deadline_exceeded"}),
    ],
    ids=["finished", "aborted", "engine killed", "shut down", "overdue"],
)
def test_d5_every_stream_says_how_it_ends(
    end: Callable[[Server], None], max_tokens: int, errors: set[str | None]
) -> None:
    """Both endpoints, running and still queued: the last event but [DONE] is an error, or each choice has had its
    finish reason, once; and never both."""
    engine: dict[str, Any] = {"step_s": 0.02, "max_num_seqs": 4}
    if errors == {"deadline_exceeded"}:
        engine["scheduling"] = {"request_deadline_s": 1.0}
    with running_server(engine, {"drain_s": 0.3, "enable_admin_api": True}) as server:
        fields = {"max_tokens": max_tokens, "n": 2, "stream": True}
        calls = [Call(server, path=path, **body_of(path, **fields)) for path in PATHS * 2]
        server.wait_until(lambda: server.metric("num_requests_arrived_total") == 8)
        end(server)
        for call in calls:
            events = parse_events(call.result().body)
            assert call.result().body.count(b"[DONE]") == 1
            codes = [event["error"]["code"] for event in events if "error" in event]
            finished = [c["index"] for e in events if "choices" in e for c in e["choices"] if c["finish_reason"]]
            if errors == {None}:
                assert (codes, sorted(finished)) == ([], [0, 1])
            else:
                assert (set(codes), len(codes), finished) == (errors, 1, [])
                assert "error" in events[-1]


# --- E: log-probabilities ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [{}, {"top_logprobs": None}, {"top_logprobs": 0}, {"top_logprobs": 3}])
def test_e1_each_endpoint_has_its_own_shape_of_logprobs(server: Server, top: dict[str, Any], stream: bool) -> None:
    def told(path: str, **fields: Any) -> list[Any]:
        response = ask(server, path, max_tokens=4, stream=stream, **fields)
        answers = response.events if stream else [response.json]
        given = [choice["logprobs"] for answer in answers for choice in answer["choices"]]
        return [logprobs for logprobs in given if logprobs is not None]

    chat = told(PATHS[1], logprobs=True, **top)
    assert all(set(logprobs) == {"content", "refusal"} for logprobs in chat)
    content = [entry for logprobs in chat for entry in logprobs["content"]]
    assert len(content) == 4
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["top_logprobs"] == []  # the scripted engine knows no alternatives
        assert bytes(entry["bytes"]).decode() == entry["token"]
    completions = told(PATHS[0], logprobs=top.get("top_logprobs") or 0)
    assert all(set(each) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"} for each in completions)
    assert sum(len(each["tokens"]) for each in completions) == 4
    assert told(PATHS[1]) == told(PATHS[1], logprobs=False) == told(PATHS[0]) == []


# --- G: what is not supported is not half supported ---

EXPLOSIVE: Any = {"type": "object"}
for _ in range(12):
    EXPLOSIVE = {"oneOf": [EXPLOSIVE, EXPLOSIVE]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_regex", "["), ("guided_regex", "(a{1,999}){1,999}"), ("guided_regex", ""), ("regex", ""),
        ("guided_choice", []), ("guided_choice", ["a"]), ("grammar", "root :== x"), ("grammar", "%llguidance"),
        ("guided_json", {}), ("guided_json", True), ("guided_json", False), ("guided_json", {"$ref": "#"}),
        ("guided_json", {"pattern": "^[a-z]+$", "maxLength": 3}), ("json_schema", EXPLOSIVE),
        ("structured_outputs", {"choice": []}), ("structured_outputs", {}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 2_000_000]}}}),
        ("response_format", {"type": "text", "json_schema": {}}),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}]),
        ("tool_choice", "required"),
    ],
)  # fmt: skip
def test_g_a_constraint_that_would_not_be_enforced_is_refused_by_name_at_little_cost(
    server: Server, field: str, value: Any
) -> None:
    for path in PATHS:
        start = time.monotonic()
        assert_refused(ask(server, path, max_tokens=1, **{field: value}), field)
        assert time.monotonic() - start < 2


# --- H: requests that must not hurt anybody ---


@pytest.mark.parametrize("key", ["258", "999999", "-1", "AI", "", "9" * 30, "1.0"])
def test_h1_a_bias_for_what_is_no_token_is_refused(server: Server, key: str) -> None:
    for path in PATHS:
        assert_refused(ask(server, path, logit_bias={"65": 1, key: 5}), "logit_bias")


@pytest.mark.parametrize("bad", [-1, 258, 2**31, 2**63, -(2**63), 2**64, 10**30])
def test_h2_ids_that_are_no_tokens_are_refused_wherever_they_stand(server: Server, bad: int) -> None:
    for prompt in ([bad], [97, bad], [[bad]], [[97], [97, bad]]):
        response = server.complete(prompt=prompt)
        assert response.status == 400
        assert response.error["param"].partition("[")[0] == "prompt"
    for field in ("stop_token_ids", "allowed_token_ids"):
        for path in PATHS:
            response = ask(server, path, **{field: [97, bad]})
            assert response.status == 400
            assert response.error["param"].partition("[")[0] == field
    assert server.request("POST", "/detokenize", {"tokens": [bad]}).status == 400


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
def test_h3_numbers_that_are_none_or_far_out_are_refused_in_strict_json(server: Server, field: str) -> None:
    bad = ["NaN", "Infinity", "-Infinity", "1e308", "-1e308", "1e999", '"NaN"', "true", "[0]"]
    for path, value in itertools.product(PATHS, bad):
        raw = json.dumps(body_of(path, max_tokens=1))[:-1] + f', "{field}": {value}}}'
        response = server.request("POST", path, raw.encode())
        assert response.status == 400, value
        json.loads(response.body, parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"), ({"n": -1}, "n"), ({"n": 1.5}, "n"), ({"n": 10**6}, "n"), ({"n": 10**30}, "n"),
        ({"prompt": [""] * 10**5}, "prompt"), ({"prompt": ["x"] * 10**5}, "prompt"),
        ({"prompt": [[97]] * 10**5}, "prompt"), ({"prompt": ["x"] * 1000, "n": 128}, "n"),
        ({"best_of": 1, "n": 2}, "best_of"), ({"best_of": 10**6}, "best_of"),
    ],
)  # fmt: skip
def test_h4_no_call_fans_out_without_limit(server: Server, fields: dict[str, Any], param: str) -> None:
    start = time.monotonic()
    assert_refused(server.complete(**{"prompt": "x", "max_tokens": 1} | fields), param)
    assert time.monotonic() - start < 2


def test_h6_a_prompt_of_nothing_is_refused_in_every_form() -> None:
    with running_server({"checked": True}, {"trust_request_chat_template": True}) as server:
        for prompt in ("", [""], ["a", ""], [], [[]], [[97], []]):
            assert_refused(server.complete(prompt=prompt, max_tokens=1), "prompt")
        for template in ("", "{{ '' }}", "{% for message in messages %}{% endfor %}", "{# nothing #}"):
            for stream in (False, True):
                assert_refused(server.chat(chat_template=template, max_tokens=1, stream=stream), "messages")
        assert_refused(server.chat(messages=[]), "messages")
        assert server.complete(prompt="x", max_tokens=1).status == 200
        server.wait_quiet()


@pytest.mark.parametrize(
    ("path", "field"), [(PATHS[0], "max_tokens"), (PATHS[1], "max_tokens"), (PATHS[1], "max_completion_tokens")]
)
def test_h7_no_length_means_for_ever(server: Server, path: str, field: str) -> None:
    for bad in (-1, 1.5, "5", True, [], 2**31, 2**63, 10**30):
        assert_refused(ask(server, path, **{field: bad}), field)
    assert_refused(ask(server, path, **{field: 5, "min_tokens": 6}), "min_tokens")
    for length, expected in ((0, 0), (7, 7), (None, None)):
        answer = ask(server, path, "x" * 400, **{field: length}).json
        usage = answer["usage"]
        fits = 512 - usage["prompt_tokens"]
        assert usage["completion_tokens"] == (fits if expected is None else expected)
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_h8_what_exceeds_the_context_is_refused_and_what_fits_is_answered_uncut(
    server: Server, path: str, stream: bool
) -> None:
    """Around the context of 512, with every length that may be asked for. The prompt is never shortened unasked."""
    overhead = ask(server, path, "x", max_tokens=1).json["usage"]["prompt_tokens"] - 1
    for num_prompt in (504, 508, 511, 512, 513, 700):
        for max_tokens in (0, 1, 4, 8, None):
            response = ask(
                server, path, "x" * (num_prompt - overhead), max_tokens=max_tokens, stream=stream,
                **({"stream_options": {"include_usage": True}} if stream else {}),
            )  # fmt: skip
            if num_prompt + (1 if max_tokens is None else max_tokens) <= 512:
                usage = response.events[-1]["usage"] if stream else response.json["usage"]
                expected = 512 - num_prompt if max_tokens is None else max_tokens
                assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, expected)
                continue
            assert (response.status, response.error["code"]) == (400, "context_length_exceeded")
            is_prompt_alone_too_long = num_prompt + min(1, 1 if max_tokens is None else max_tokens) > 512
            if not is_prompt_alone_too_long:
                assert response.error["param"] == "max_tokens"
            else:
                assert response.error["param"] == ("messages" if "chat" in path else "prompt")
            numbers = re.findall(r"\d+", response.error["message"])
            assert "512" in numbers
            if num_prompt <= 512:  # what is known to be longer from its size alone is not counted
                assert str(num_prompt) in numbers
                assert max_tokens is None or str(max_tokens) in numbers


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"temprature": 0}, "temprature"),
        ({"logit_biass": {}}, "logit_biass"),
        ({"maxTokens": 5, "Stop": None}, "maxTokens, Stop"),
        ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag"),
        ({"stream": True, "stream_options": {"usage": 1, "include_usage": True}, "x": 1}, "stream_options.usage, x"),
    ],
)
def test_h14_fields_that_nobody_knows_are_named_in_the_answer(
    server: Server, path: str, fields: dict[str, Any], told: str
) -> None:
    response = ask(server, path, max_tokens=1, **fields)
    assert response.status == 200
    assert response.headers["x-noria-ignored-fields"] == told


# --- J: metrics ---


def test_j5_what_waits_is_told_in_tokens_and_not_only_in_requests() -> None:
    """Two giants weigh more than ten dwarfs, and a prompt of several sequences as much as one."""
    with running_server({"step_s": 0.02, "max_num_seqs": 1}, {"enable_admin_api": True}) as server:
        for num_prompts, num_tokens, n in ((2, 2000, 1), (2, 2000, 3), (10, 10, 1)):
            Call(server, prompt="x", max_tokens=4000)
            server.wait_until(lambda: server.metric("num_requests_running") == 1)
            assert server.metric("num_queued_tokens") == 0
            for number in range(num_prompts):
                Call(server, prompt=str(number) * num_tokens, max_tokens=1, n=n)
            server.wait_until(lambda num=num_prompts * n: server.metric("num_requests_waiting") == num)
            assert server.metric("num_queued_tokens") == num_prompts * num_tokens
            assert server.get("/load").json["queued_prompt_tokens"] == num_prompts * num_tokens
            abort(server)
            server.wait_quiet()
