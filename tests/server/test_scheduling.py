"""Priorities, caps, deadlines and policies as clients of a real server see them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from serving import Call, Server, running_server

SLOTS = {"max_num_seqs": 1, "step_s": 0.03}


def occupy(server: Server, max_tokens: int = 30, **body: Any) -> Call:
    """A request that has the only slot for a while."""
    call = Call(server, prompt="first", max_tokens=max_tokens, **body)
    server.wait_until(lambda: server.metric("num_requests_running") == 1)
    return call


def queue(server: Server, num_waiting: int, **body: Any) -> Call:
    """A request that is known to be the last of so many that wait."""
    call = Call(server, **{"max_tokens": 3} | body)
    server.wait_until(lambda: server.metric("num_requests_waiting") == num_waiting)
    return call


def num_ended(server: Server, reason: str) -> float:
    return server.metric("request_success_total", finished_reason=reason)


def assert_everybody_is_accounted_for(server: Server) -> None:
    page = server.get("/metrics").body.decode()
    arrived, running, waiting = (
        float(re.findall(rf"^noria:num_requests_{name}\{{.*\}} (\S+)$", page, flags=re.MULTILINE)[0])
        for name in ("arrived_total", "running", "waiting")
    )
    ended = [float(n) for n in re.findall(r"^noria:request_success_total\{.*\} (\S+)$", page, flags=re.MULTILINE)]
    reasons = re.findall(r"^noria:num_requests_waiting_by_reason\{.*\} (\S+)$", page, flags=re.MULTILINE)
    assert arrived == sum(ended) + running + waiting
    assert waiting == sum(map(float, reasons))


def assert_refused(server: Server, code: str, **body: Any) -> str:
    """Both ways of asking get the status, and not the beginning of a stream; returns what they were told."""
    for stream in (True, False):
        refused = server.complete(stream=stream, **body)
        assert (refused.status, refused.error["code"]) == (503, code)
        assert 1 <= int(refused.headers["retry-after"]) <= 5
        assert refused.headers["content-type"] == "application/json"
    message: str = refused.error["message"]
    return message


# --- priority ---


def test_an_urgent_request_goes_first():
    with running_server({**SLOTS, "scheduling": {"scheduling_policy": "priority"}}) as server:
        running = occupy(server)
        later = queue(server, 1, prompt="x", priority=3)
        normal = queue(server, 2, prompt="y")
        urgent_chat = server.chat(max_tokens=2, priority=-7)  # displaces the one that runs
        assert urgent_chat.status == 200
        assert running.is_alive()
        assert all(call.result().status == 200 for call in (running, later, normal))
        assert running.ended_s < normal.ended_s < later.ended_s
        assert server.metric("num_preemptions_total") == 1
        assert server.metric("preempted_tokens_total") > 0


@pytest.mark.parametrize("priority", [-(2**31), 2**31 - 1])
def test_the_bounds_of_priority_are_within(priority):
    with running_server({"scheduling": {"scheduling_policy": "priority"}}) as server:
        assert server.complete(prompt="x", max_tokens=1, priority=priority).status == 200


def test_a_priority_that_would_have_no_effect_is_refused_with_the_remedy(server):
    for response in (server.complete(prompt="x", priority=-1), server.chat(priority=5, stream=True)):
        assert (response.status, response.error["param"]) == (400, "priority")
        assert "--scheduling-policy priority" in response.error["message"]
    for harmless in (0, None):
        assert server.complete(prompt="x", max_tokens=1, priority=harmless).status == 200


# --- caps ---


def test_a_full_queue_is_said_before_anything_starts():
    with running_server({**SLOTS, "scheduling": {"max_num_queued_reqs": 2}}) as server:
        running = occupy(server)
        calls = [running, queue(server, 1, prompt="x"), queue(server, 2, prompt="x")]
        message = assert_refused(server, "queue_full", prompt="y")
        assert "1 requests run and 2 wait, at most 1 may run and 2 more wait" in message
        assert all(call.result().status == 200 for call in calls)
        assert server.complete(prompt="y", max_tokens=1).status == 200
        server.wait_until(lambda: server.metric("num_requests_refused_total", reason="queue_full") == 2)
        assert server.metric("num_requests_arrived_total") == 4
        assert_everybody_is_accounted_for(server)


def test_a_full_queue_says_when_to_come_back():
    """A request takes 0.9 s or somewhat more: half of six have begun after two or three seconds."""
    with running_server({**SLOTS, "scheduling": {"max_num_queued_reqs": 6}}) as server:
        calls = [Call(server, prompt="x", max_tokens=30) for _ in range(8)]
        server.wait_until(lambda: num_ended(server, "length") == 1)
        calls.append(queue(server, 6, prompt="x", max_tokens=30))
        for refused in (server.complete(prompt="y"), server.complete(prompt="y", stream=True), server.get("/ready")):
            assert refused.status == 503
            assert 2 <= int(refused.headers["retry-after"]) <= 8
        assert sorted(call.result().status for call in calls) == [200] * 8 + [503]


def test_a_call_of_which_one_sequence_has_no_place_leaves_none_behind():
    with running_server({**SLOTS, "scheduling": {"max_num_queued_reqs": 2}}) as server:
        running = occupy(server)
        assert_refused(server, "queue_full", prompt="y", n=3)
        assert_refused(server, "queue_full", prompt=["a", "b", "c"])
        server.wait_until(lambda: num_ended(server, "abort") == 2 * 2 * 2)
        assert server.metric("num_requests_waiting") == 0
        assert server.complete(prompt="y", max_tokens=1, n=2).status == 200
        assert running.result().status == 200
        assert_everybody_is_accounted_for(server)


def test_prompt_tokens_that_wait_are_capped():
    with running_server({**SLOTS, "scheduling": {"max_num_queued_tokens": 100}}) as server:
        running = occupy(server)
        waiting = queue(server, 1, prompt="x" * 80)
        assert server.metric("num_queued_tokens") == 80
        assert server.metric("num_requests_waiting_by_reason", reason="max_num_seqs") == 1
        message = assert_refused(server, "queue_full", prompt="y" * 21)
        assert all(number in message for number in ("80", "21", "100"))
        fits = Call(server, prompt="z" * 20, max_tokens=1)
        assert all(call.result().status == 200 for call in (running, waiting, fits))
        assert server.metric("num_queued_tokens") == 0


def test_a_stream_starts_while_its_request_still_waits():
    """Its header waits for the engine's word that it is in, not for its turn."""
    with running_server({**SLOTS, "step_s": 0.2}) as server:
        running = occupy(server, max_tokens=15)
        waiting = Call(server, prompt="x", max_tokens=1, stream=True)
        server.wait_until(lambda: waiting.header_s > 0)
        assert running.is_alive()
        assert waiting.result().status == 200
        assert waiting.ended_s - waiting.header_s > 1


# --- deadlines ---


def test_a_request_without_a_token_by_its_deadline_gets_503_with_the_numbers():
    with running_server({**SLOTS, "scheduling": {"first_token_deadline_s": 0.4}}) as server:
        running = occupy(server, max_tokens=40)
        late = server.complete(prompt="x")
        assert (late.status, late.error["code"]) == (503, "deadline_exceeded")
        assert late.headers["retry-after"] == "1"
        assert re.search(r"waited 0\.[4-9] s for its first token, over the server's limit of 0.4 s", late.body.decode())
        assert running.result().status == 200, "it had its first token in time"
        assert num_ended(server, "timeout") == 1
        assert_everybody_is_accounted_for(server)


def test_a_stream_that_is_overdue_ends_with_the_error():
    with running_server({"step_s": 0.03, "scheduling": {"request_deadline_s": 0.5}}) as server:
        *chunks, last = server.complete(prompt="x", max_tokens=500, stream=True).events
        assert last["error"]["code"] == "deadline_exceeded"
        assert "limit of 0.5 s" in last["error"]["message"]
        assert 5 < len(chunks) < 25
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        server.wait_quiet()


def test_one_overdue_sequence_ends_its_call_and_the_others_with_it():
    with running_server({**SLOTS, "scheduling": {"first_token_deadline_s": 0.3}}) as server:
        assert server.complete(prompt=["a", "b"], max_tokens=500).error["code"] == "deadline_exceeded"
        server.wait_quiet()
        assert (num_ended(server, "timeout"), num_ended(server, "abort")) == (1, 1)


# --- policies ---

PLUGIN = """
from noria.core.policies.fcfs import FcfsPolicy

class LastComeFirstServed(FcfsPolicy):
    def _dequeue(self):
        request = max(self, key=lambda r: r.arrival_number)
        self._discard(request)
        return request
"""


def test_a_policy_of_ones_own_is_loaded_by_its_import_path(tmp_path: Path):
    """Also in the engine's process, which is another one. It may make of priorities what it likes."""
    (tmp_path / "my_policy.py").write_text(PLUGIN)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    scheduling = {"scheduling_policy": "my_policy:LastComeFirstServed"}
    with running_server({**SLOTS, "scheduling": scheduling}, environment=environment) as server:
        running = occupy(server)
        earlier, later = queue(server, 1, prompt="x", priority=-1), queue(server, 2, prompt="y")
        assert all(call.result().status == 200 for call in (running, earlier, later))
        assert later.ended_s < earlier.ended_s


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm", "fair"])
def test_every_policy_serves(policy):
    engine = {"checked": True, "num_blocks": 24, "max_model_len": 384, "scheduling": {"scheduling_policy": policy}}
    with running_server(engine) as server:
        calls = [Call(server, prompt=f"{i} " * 20, max_tokens=60) for i in range(12)]
        assert {call.result().status for call in calls} == {200}
        assert server.metric("num_preemptions_total") > 0
        server.wait_quiet()
        assert_everybody_is_accounted_for(server)
        blocks = {s: server.metric("kv_cache_blocks", state=s) for s in ("held", "cached_idle", "free")}
        assert blocks["held"] == 0
        assert blocks["cached_idle"] > 0
        assert sum(blocks.values()) == 24
        assert server.metric("kv_cache_unused_slots") == 0
