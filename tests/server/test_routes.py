"""Tokens of texts, readiness and load, and what the server was started with."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import Call, running_server

from noria.fakes.tokenizer import ByteTokenizer
from noria.server.request_body import BODIES_AT_ONCE
from noria.text.chat import encode_chat

SERVING = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


def post(server, path, **body):
    return server.request("POST", path, body)


# --- tokens ---


def test_a_prompt_and_its_tokens(server):
    answer = post(server, "/tokenize", prompt="né", return_token_strs=True)
    assert answer.status == 200
    assert answer.json == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [110, 195, 169],
        "token_strs": ["<0x6E>", "<0xC3>", "<0xA9>"],
    }
    assert post(server, "/tokenize", prompt="").json["tokens"] == []
    assert post(server, "/detokenize", tokens=[110, 195, 169]).json == {"prompt": "né", "content": "né"}


def test_messages_have_the_tokens_that_a_chat_has(server):
    messages = [{"role": "user", "content": "hello"}]
    tokens = post(server, "/tokenize", messages=messages).json["tokens"]
    assert tokens == encode_chat(ByteTokenizer(), messages)
    assert len(tokens) == server.chat(messages=messages, max_tokens=1).json["usage"]["prompt_tokens"]
    without = post(server, "/tokenize", messages=messages, add_generation_prompt=False).json["tokens"]
    assert tokens[: len(without)] == without != tokens


def test_llama_cpps_form(server):
    assert post(server, "/tokenize", content="hé").json == {"tokens": [104, 195, 169]}
    pieces = post(server, "/tokenize", content="hé", with_pieces=True).json["tokens"]
    assert pieces == [{"id": 104, "piece": "h"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert post(server, "/tokenize", content="<eos>").json == {"tokens": [257]}
    assert len(post(server, "/tokenize", content="<eos>", parse_special=False).json["tokens"]) == 5


def test_what_comes_back_is_what_went_in(server):
    text = "<bos>Grüße, 世界 🌍\n\0<eos>"
    tokens = post(server, "/tokenize", prompt=text).json["tokens"]
    assert post(server, "/detokenize", tokens=tokens).json["prompt"] == text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "content"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(server, path, body, param):
    answer = post(server, path, **body)
    assert answer.status == (404 if param == "model" else 400), answer.body
    assert answer.error["param"] == param
    assert server.is_healthy()


def test_fields_that_nobody_knows_are_told_here_too(server):
    answer = post(server, "/tokenize", prompt="a", colour="red")
    assert answer.headers["x-noria-ignored-fields"] == "colour"


def test_a_body_that_is_no_json_or_too_large(server):
    assert server.request("POST", "/tokenize", b"{").error["code"] == "invalid_json"
    assert server.request("POST", "/tokenize", b" " * (33 * 2**20)).error["code"] == "body_too_large"


@pytest.mark.parametrize("field", ["prompt", "content", "messages"])
def test_a_text_that_cannot_fit_is_refused_unread(server, field):
    text = "x" * 8000
    answer = post(server, "/tokenize", **{field: [{"role": "user", "content": text}] if field == "messages" else text})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert answer.error["param"] == field


def test_bodies_of_json_routes_are_held_only_until_they_are_understood():
    with running_server(server={"max_body_bytes": 1000}) as server:
        for _ in range(2 * BODIES_AT_ONCE):
            assert post(server, "/tokenize", prompt="x" * 400).status == 200
            assert server.request("POST", "/tokenize", b"{" * 900).status == 400
            refused = post(server, "/tokenize", prompt="x" * 1000)
            assert (refused.status, refused.headers["connection"]) == (413, "close")


# --- readiness, load, information ---


def test_ready_is_whether_a_request_would_be_taken():
    engine = {"step_s": 0.05, "max_num_seqs": 1, "load_s": 0.5, "scheduling": {"max_num_queued_reqs": 1}}
    with running_server(engine, wait=False) as server:
        refused = server.get("/ready")
        assert (refused.status, refused.json["code"]) == (503, "loading")
        assert server.get("/ping").status == server.get("/health").status == 503
        server.wait_until(lambda: server.get("/ready").status == 200)
        assert server.get("/ready").json == {"status": "ready"}
        running = Call(server, prompt="x", max_tokens=60)
        server.wait_until(lambda: server.get("/load").json["num_running"] == 1)
        assert server.get("/ready").status == 200
        waiting = Call(server, prompt="yyy", max_tokens=1)
        server.wait_until(lambda: server.get("/ready").status == 503)
        assert server.get("/ready").json["code"] == "queue_full"
        assert server.complete(prompt="z").error["code"] == "queue_full", "and so it is"
        assert server.get("/health").status == 200, "a full server is a healthy one"
        server.wait_until(lambda: server.get("/load").json["num_waiting"] == 1)
        load = server.get("/load").json
        assert (load["server_load"], load["num_running"], load["queued_prompt_tokens"]) == (2, 1, 3)
        assert 0 < load["kv_cache_usage"] < 1
        running.result()
        waiting.result()
        server.wait_until(lambda: server.get("/ready").status == 200)
        assert server.get("/load").json["server_load"] == 0


def test_server_info_has_the_options_and_no_secret():
    with running_server({}, {"api_key": ["my-secret"], "drain_s": 7}) as server:
        server.headers = {"Authorization": "Bearer my-secret"}
        info = server.get("/server_info")
        assert info.json["server"]["drain_s"] == 7
        assert info.json["engine"]["max_num_seqs"] == 64
        assert info.json["models"] == ["scripted"]
        assert b"secret" not in info.body
        assert "api_key" not in info.json["server"]


def test_ping_may_be_posted(server):
    assert server.request("POST", "/ping").status == server.get("/ping").status == 200
