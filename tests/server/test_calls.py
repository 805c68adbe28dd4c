"""Calls are counted once, whatever becomes of them and however many sequences they have; and the log tells of each."""

from __future__ import annotations

import random
import re
import socket
import threading
import time

import pytest
from serving import Call, running_server

OUTCOMES = ("finished", "aborted", "refused", "failed")
REASONS = ("stop", "length", "abort", "error", "timeout")


def counts(server):
    return {outcome: int(server.metric("calls_ended_total", outcome=outcome)) for outcome in OUTCOMES}


def check_sums(server):
    """What the page promises, of a server at rest or not: it is one page, so one moment."""
    page = server.get("/metrics").body.decode()

    def value(name, **labels):
        wanted = "".join(f'(?=[^}}]*{label}="{text}")' for label, text in labels.items())
        return sum(float(v) for v in re.findall(rf"^noria:{name}{{{wanted}[^}}]*}} (\S+)$", page, flags=re.MULTILINE))

    in_progress = value("calls_in_progress")
    assert value("calls_submitted_total") == value("calls_ended_total") + in_progress
    under_way = value("num_requests_running") + value("num_requests_waiting")
    assert value("num_requests_submitted_total") == value("num_requests_arrived_total") + value(
        "num_requests_refused_total"
    )
    assert value("num_requests_arrived_total") == value("request_success_total") + under_way
    assert value("e2e_request_latency_seconds_count") == value("request_success_total")
    assert value("generation_tokens_total") == value("request_generation_tokens_sum") + value(
        "unfinished_generation_tokens"
    )
    assert value("arrived_prompt_tokens_total") == value("request_prompt_tokens_sum") + value(
        "unfinished_prompt_tokens"
    )
    assert value("call_duration_seconds_count") == value("calls_ended_total")
    return value


def cut_stream(server, **body):
    """A stream that its client leaves after the first bytes."""
    import json

    data = json.dumps(body | {"stream": True}).encode()
    with socket.create_connection((server.host, server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        received = b""
        while b"data: " not in received:
            received += connection.recv(1000)


def test_each_outcome_is_counted_once_whatever_n():
    engine = {"step_s": 0.005, "max_num_seqs": 4, "scheduling": {"max_num_queued_reqs": 4}}
    with running_server(engine) as server:
        assert server.complete(prompt="abc", max_tokens=5, n=3).status == 200
        assert len(server.complete(prompt="abcd", max_tokens=7, stream=True).events) == 7
        assert server.complete(prompt=["ab", "c"], max_tokens=2).status == 200
        assert server.complete(prompt="x", max_tokens=-1).status == 400
        assert server.request("POST", "/v1/completions", b"{").status == 400
        assert server.complete(prompt="x", model="other").status == 404
        assert server.complete(prompt="x", n=100).status == 400
        holding = Call(server, prompt="hold", max_tokens=100, n=8)
        server.wait_until(lambda: server.metric("num_requests_waiting") == 4)
        assert server.complete(prompt="x", n=2).status == 503
        holding.result()
        for _ in range(5):
            cut_stream(server, prompt="left", max_tokens=3000)
        server.wait_quiet()
        server.wait_until(lambda: counts(server)["aborted"] == 5)
        assert counts(server) == {"finished": 4, "aborted": 5, "refused": 5, "failed": 0}
        value = check_sums(server)
        assert value("call_prompt_tokens_total", outcome="finished") == 3 + 4 + 3 + 4, (
            "a prompt counts once, whatever n"
        )
        assert value("call_completion_tokens_total", outcome="finished") == 15 + 7 + 4 + 800
        assert value("call_prompt_tokens_total", outcome="aborted") == 5 * 4
        assert value("call_completion_tokens_total", outcome="aborted") >= 5
        assert value("call_time_to_first_token_seconds_count") == 4 + 5
        assert value("num_requests_refused_total", reason="queue_full") >= 1
        assert value("request_success_total", finished_reason="length") == 3 + 1 + 2 + 8
        assert value("request_success_total", finished_reason="abort") >= 5


def test_a_failure_is_ours_and_a_deadline_too():
    with running_server({"step_s": 0.02, "scheduling": {"request_deadline_s": 0.3}}) as server:
        assert server.complete(prompt="x", max_tokens=1000).status == 503
        assert counts(server) == {"finished": 0, "aborted": 0, "refused": 0, "failed": 1}
        check_sums(server)


def test_the_sums_hold_at_every_moment_of_a_busy_server():
    """Streams and whole answers, cut, refused and finished, under preemption, while somebody looks."""
    engine = {"num_blocks": 24, "max_model_len": 256, "max_num_seqs": 6, "checked": True, "step_s": 0.001,
              "scheduling": {"max_num_queued_reqs": 10}}  # fmt: skip
    rng = random.Random(3)
    with running_server(engine) as server:
        over = threading.Event()

        def make_calls(seed):
            own = random.Random(seed)
            while not over.is_set():
                body = {
                    "prompt": "p" * own.randrange(1, 60),
                    "max_tokens": own.randrange(1, 150),
                    "n": own.choice([1, 3]),
                }
                if own.random() < 0.3:
                    cut_or_refused(body)
                else:
                    server.complete(**body, stream=own.random() < 0.5)

        def cut_or_refused(body):
            call = threading.Thread(target=cut_stream, args=(server,), kwargs=body, daemon=True)
            call.start()
            call.join(0.5)  # one that is refused has no stream to be cut

        callers = [threading.Thread(target=make_calls, args=(seed,), daemon=True) for seed in range(5)]
        for caller in callers:
            caller.start()
        until = time.monotonic() + 4
        num_looks = 0
        while time.monotonic() < until:
            check_sums(server)
            num_looks += 1
            time.sleep(rng.random() * 0.05)
        over.set()
        for caller in callers:
            caller.join(20)
        server.wait_quiet()
        value = check_sums(server)
        assert num_looks > 20
        assert value("num_preemptions_total") > 0
        assert value("calls_ended_total", outcome="finished") > 10


def test_calls_that_wait_and_that_run():
    with running_server({"step_s": 0.02, "max_num_seqs": 1}) as server:
        running = Call(server, prompt="xy", max_tokens=60, n=1)
        server.wait_until(lambda: server.metric("calls_in_progress", stage="running") == 1)
        waiting = Call(server, prompt="z", max_tokens=1, n=2)
        server.wait_until(lambda: server.metric("num_requests_waiting") == 2)
        assert server.metric("calls_in_progress", stage="waiting") == 1
        assert server.metric("call_prompt_tokens_in_progress") == 3
        assert 0 < server.metric("call_completion_tokens_in_progress") < 60
        running.result()
        waiting.result()
        server.wait_until(lambda: server.metric("calls_in_progress", stage="running") == 0)


# --- vLLM's names ---


def test_vllms_names_are_there_when_they_are_asked_for():
    with running_server({"max_model_len": 512, "step_s": 0.002}, {"metrics_compat": "vllm"}) as server:
        server.complete(prompt="abc", max_tokens=20, n=2)
        page = server.get("/metrics").body.decode()
    labels = '{engine="0",model_name="scripted"}'
    for series in (
        f"vllm:num_requests_running{labels} 0.0", f"vllm:num_requests_waiting{labels} 0.0",
        f"vllm:kv_cache_usage_perc{labels} 0.0", f"vllm:generation_tokens_total{labels} 40.0",
        f"vllm:prompt_tokens_total{labels} 6.0", f"vllm:num_preemptions_total{labels} 0.0",
        f"vllm:prefix_cache_queries_total{labels} 6.0", f"vllm:prefix_cache_hits_total{labels} 0.0",
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="scripted"} 2.0',
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="scripted",reason="capacity"} 0.0',
    ):  # fmt: skip
        assert f"\n{series}\n" in page, series
    histograms = {
        "time_to_first_token_seconds": 22, "inter_token_latency_seconds": 19, "e2e_request_latency_seconds": 21,
        "request_time_per_output_token_seconds": 19, "request_queue_time_seconds": 21,
        "request_prefill_time_seconds": 21, "request_decode_time_seconds": 21, "request_inference_time_seconds": 21,
        "request_prompt_tokens": 9, "request_generation_tokens": 9, "iteration_tokens_total": 13,
    }  # fmt: skip
    for name, num_bounds in histograms.items():
        assert f"\nvllm:{name}_count{labels}" in page, name
        assert len(re.findall(rf"^vllm:{name}_bucket{{", page, flags=re.MULTILINE)) == num_bounds + 1, name
    assert 'vllm:cache_config_info{block_size="16",' in page


def test_without_the_option_they_are_not(server):
    assert "vllm:" not in server.get("/metrics").body.decode()


# --- the access log ---


def test_a_line_for_each_request_and_nothing_of_what_it_said():
    with running_server({"step_s": 0.002}, {"access_log": True, "api_key": ["k"]}) as server:
        server.headers = {"Authorization": "Bearer k"}
        answer = server.complete(prompt="MY-PROMPT", max_tokens=4, user="MY-NAME").json
        server.chat(messages=[{"role": "user", "content": "MY-PROMPT"}], max_tokens=3, stream=True)
        server.complete(prompt="MY-PROMPT", max_tokens=-1)
        server.get("/v1/models?q=MY-QUERY")
        server.get("/nothing%0Ahere INFO noria.access: GET /forged 200".replace(" ", "%20"))
        server.request("GET", "/v1/models", headers={"Authorization": "Bearer MY-KEY"})
        for path in ("/health", "/metrics", "/ready"):
            server.get(path)
        cut_with_key = b'{"prompt": "MY-PROMPT", "max_tokens": 4000, "stream": true}'
        with socket.create_connection((server.host, server.port)) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\nContent-Length: %d\r\n\r\n"
            connection.sendall(head % len(cut_with_key) + cut_with_key)
            received = b""
            while b"data: " not in received:
                received += connection.recv(1000)
        server.wait_until(lambda: any("outcome=aborted" in line for line in server.log))
    lines = [line.partition("noria.access: ")[2].strip() for line in server.log if "noria.access" in line]
    number, tenant = r"\d+\.\d{4}", r"key#[0-9a-f]{16}"
    expected = [
        rf"POST /v1/completions 200 tenant={tenant} id={answer['id'].removeprefix('cmpl-')} outcome=finished "
        rf"prompt_tokens=9 completion_tokens=4 ttft_s={number} duration_s={number}",
        rf"POST /v1/chat/completions 200 tenant={tenant} id=\w+ outcome=finished prompt_tokens=\d+ completion_tokens=3 "
        rf"ttft_s={number} duration_s={number}",
        rf"POST /v1/completions 400 tenant={tenant} (id=\w+ )?outcome=refused duration_s={number}",
        rf"GET /v1/models 200 tenant={tenant} duration_s={number}",
        rf"GET /nothing%0Ahere%20INFO%20noria.access%3A%20GET%20/forged%20200 404 tenant={tenant} duration_s={number}",
        rf"GET /v1/models 401 duration_s={number}",
        rf"POST /v1/completions 200 tenant={tenant} id=\w+ outcome=aborted prompt_tokens=9 completion_tokens=\d+ "
        rf"ttft_s={number} duration_s={number}",
    ]
    assert len(lines) == len(expected), lines
    for pattern in expected:  # a call may be over only after its client has sent the next
        assert sum(re.fullmatch(pattern, line) is not None for line in lines) == 1, (pattern, lines)
    assert "MY-" not in "".join(server.log)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_open_server_on_a_public_address_is_warned_of(host):
    with running_server({}, {"host": host}) as server:
        assert any("no API keys" in line for line in server.log) == (host == "0.0.0.0")
        assert any(f"listening on http://{host}:" in line for line in server.log)
        assert any("at http://127.0.0.1:" in line for line in server.log)  # which a client can ask


# --- the client's name for a request ---


def test_a_name_in_the_header_comes_back_and_stands_in_the_log():
    with running_server({}, {"access_log": True, "api_key": ["k"]}) as server:
        key = {"Authorization": "Bearer k"}
        named = {"X-Request-Id": "a-1.b:c/2"}
        whole = server.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2}, headers=key | named)
        call_id = whole.headers["x-noria-call-id"]
        assert whole.headers["x-request-id"] == "a-1.b:c/2"
        assert whole.json["id"] == f"cmpl-{call_id}", "our own names do not depend on it"
        streamed = {"prompt": "x", "max_tokens": 2, "stream": True, "request_id": "mine"}
        stream = server.request("POST", "/v1/completions", streamed, headers=key | named)
        assert stream.headers["x-request-id"] == "a-1.b:c/2"
        assert stream.events[0]["id"] == "cmpl-mine", "the body's field names the answer, the header the request"
        for method, path, body, headers, status in (
            ("GET", "/v1/models", None, key, 200),
            ("GET", "/v1/models", None, {}, 401),
            ("POST", "/v1/completions", {"prompt": 5}, key, 400),
            ("GET", "/nowhere", None, key, 404),
            ("GET", "/health", None, {}, 200),
        ):
            answer = server.request(method, path, body, headers=headers | named)
            assert (answer.status, answer.headers["x-request-id"]) == (status, "a-1.b:c/2")
        server.wait_until(lambda: any("/nowhere" in line for line in server.log))
        lines = [line for line in server.log if "noria.access" in line]
        assert len(lines) == 6
        assert all(" request_id=a-1.b:c/2 " in line for line in lines)
        assert f" id={call_id} request_id=a-1.b:c/2 outcome=finished" in lines[0]


def test_without_a_name_a_call_goes_by_its_own(server):
    answer = server.complete(prompt="x", max_tokens=1)
    assert answer.headers["x-request-id"] == answer.headers["x-noria-call-id"]
    assert "x-request-id" not in server.get("/health").headers


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b"5", 400), ({"model": "another"}, 404), ({"max_tokens": -1}, 400), (b" " * 2000, 413)],
)
def test_refusals_have_the_id_of_their_call_too(path, body, status):
    if isinstance(body, dict):
        body = body | {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    with running_server(server={"access_log": True, "max_body_bytes": 1000}) as server:
        answer = server.request("POST", path, body)
        call_id = answer.headers["x-noria-call-id"]
        assert answer.status == status
        assert re.fullmatch("[0-9a-f]{32}", call_id)
        assert answer.headers["x-request-id"] == call_id
        server.wait_until(lambda: any(f"{path} {status} id={call_id} outcome=refused" in line for line in server.log))


def test_before_the_model_is_there_a_call_has_its_id_as_well():
    with running_server({"load_s": 2.0}, wait=False) as server:
        answer = server.complete(prompt="x")
        assert (answer.status, answer.error["code"]) == (503, "loading")
        assert answer.headers["x-request-id"] == answer.headers["x-noria-call-id"]


@pytest.mark.parametrize("name", ["", "a b", "a\tb", 'a"b', "é", "x" * 257, "a\\b", "<b>"])
def test_a_name_that_is_not_fit_to_be_told_is_passed_over(server, name):
    headers = {"X-Request-Id": name}
    answer = server.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=headers)
    assert answer.status == 200
    assert answer.headers["x-request-id"] == answer.headers["x-noria-call-id"]
    assert "x-request-id" not in server.request("GET", "/version", headers=headers).headers


def test_two_requests_may_have_one_name(server):
    calls = [
        server.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "same"})
        for _ in range(2)
    ]
    assert [call.headers["x-request-id"] for call in calls] == ["same", "same"]
    assert calls[0].json["id"] != calls[1].json["id"]
