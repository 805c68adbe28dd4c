"""Chat templates run in processes of their own, within limits, and are killed beyond them."""

import contextlib
import http.client
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from serving import Call, running_server

from noria.errors import RequestError
from noria.server.template_worker import LOWEST_PRIORITY
from noria.server.templates import MEMORY_BYTES, TemplateProcess

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
RECURSION = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def process():
    started = TemplateProcess(cpu_s=0.3, param="chat_template", niceness=LOWEST_PRIORITY)
    yield started
    started.close()


def render(process, source, messages=MESSAGES, **variables):
    return process.render(source, {"bos_token": "<s>"}, messages, add_generation_prompt=True, template_kwargs=variables)


def test_it_renders_what_a_template_renders(process):
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ add_generation_prompt }}{{ extra }}"
    assert render(process, source, extra="é\ud800") == "<s>hiTrueé\ud800"
    pid = process.pid
    assert render(process, "another") == "another"
    assert process.pid == pid
    assert process.num_killed == 0


@pytest.mark.parametrize("source", ["{% for %}", "{{ raise_exception('no such role') }}", "{{ messages.append(1) }}"])
def test_what_fails_is_the_requests_mistake_and_ends_nothing(process, source):
    with pytest.raises(RequestError) as refusal:
        render(process, source)
    assert refusal.value.param == "chat_template"
    assert process.num_killed == 0
    assert render(process, "ok") == "ok"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (LOOPS, "0.3 s of processor time|not done after 3 s"),
        (RECURSION, "0.3 s of processor time|not done after 3 s"),
        ("{{ 'a' * 10000000000 }}", "MiB of memory"),
        ("{% set n = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
         "MiB of memory"),
    ],
)  # fmt: skip
def test_what_takes_too_much_is_stopped_and_the_next_is_served(process, source, reason):
    with pytest.raises(RequestError, match=reason) as refusal:
        render(process, source)
    assert refusal.value.param == "chat_template"
    assert render(process, "ok") == "ok"


def test_a_text_that_is_too_large_does_not_come_back():
    process = TemplateProcess(cpu_s=30, param="messages")
    with contextlib.closing(process), pytest.raises(RequestError, match="70000000 bytes"):
        render(process, "{{ 'a' * 70000000 }}")


def test_it_has_the_lowest_priority_little_memory_and_no_secrets(process, monkeypatch):
    monkeypatch.setenv("NORIA_API_KEY", "secret")
    assert render(process, "ok") == "ok"
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == LOWEST_PRIORITY
    if sys.platform == "linux":
        assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
    [line] = [line for line in Path(f"/proc/{process.pid}/limits").read_text().splitlines() if "address space" in line]
    assert str(MEMORY_BYTES) in line
    assert b"secret" not in Path(f"/proc/{process.pid}/environ").read_bytes()


def test_a_process_that_died_is_replaced(process):
    render(process, "ok")
    os.kill(process.pid, signal.SIGKILL)
    time.sleep(0.1)
    assert render(process, "ok") == "ok"


def test_closing_does_not_wait_for_a_job():
    process = TemplateProcess(cpu_s=60, param="chat_template")
    errors = []

    def work():
        try:
            render(process, LOOPS)
        except RequestError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while process.pid is None:
        time.sleep(0.01)
    time.sleep(0.3)
    process.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(errors) == 1
    assert process.pid is None


# --- over HTTP ---


def test_request_templates_are_refused_by_default(server):
    for body in ({"chat_template": LOOPS}, {"chat_template": ""}):
        response = server.chat(**body)
        assert (response.status, response.error["param"]) == (400, "chat_template")
        assert "--trust-request-chat-template" in response.error["message"]
    response = server.chat(chat_template_kwargs={"chat_template": LOOPS})
    assert (response.status, response.error["param"]) == (400, "chat_template_kwargs.chat_template")
    assert server.chat(chat_template=None, max_tokens=1).status == 200


def test_a_trusted_request_template_is_used_and_a_hopeless_one_reported():
    options = {"trust_request_chat_template": True, "chat_template_timeout_s": 0.5}
    with running_server({"step_s": 0.01}, options) as server:
        answer = server.chat(chat_template="{{ bos_token }}{{ messages[0].content }}", max_tokens=1).json
        assert answer["usage"]["prompt_tokens"] == 1 + len("hi")
        stream = Call(server, prompt="x", max_tokens=200, stream=True)
        hopeless = [server.chat(chat_template=LOOPS, stream=is_stream) for is_stream in (False, True)]
        for response in hopeless:
            assert (response.status, response.error["param"]) == (400, "chat_template")
            assert "was stopped" in response.error["message"]
        assert server.chat(max_tokens=1).status == 200
        assert server.chat(chat_template="{{ messages[0].content }}", max_tokens=1).json["usage"]["prompt_tokens"] == 2
        assert stream.result().events[-1]["choices"][0]["finish_reason"] == "length"


def test_the_models_template_waits_for_no_request_template():
    options = {"trust_request_chat_template": True, "chat_template_timeout_s": 3.0}
    with running_server({}, options) as server:
        server.chat(max_tokens=1)
        threads = [threading.Thread(target=ask_for_the_hopeless, args=(server,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        start = time.monotonic()
        for _ in range(5):
            assert server.chat(max_tokens=1).status == 200
        assert time.monotonic() - start < 3.0
        assert any(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join()


def ask_for_the_hopeless(server):
    with contextlib.suppress(OSError, http.client.HTTPException):  # the server is killed before it can answer
        server.chat(chat_template=LOOPS)


def test_no_template_process_is_left_behind():
    for number in (signal.SIGKILL, signal.SIGTERM):
        with running_server() as server:
            server.chat(max_tokens=1)
            own = "noria.server.template_worker"
            children = [pid for pid in _children(server.process.pid) if own in _command(pid)]
            assert len(children) == 1
            server.process.send_signal(number)
            server.process.wait(10)
            server.wait_until(lambda pids=children: all(_command(pid) == "" for pid in pids))


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] + [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        if task.name != str(pid)
        for child in (task / "children").read_text().split()
    ]


def _command(pid: int) -> str:
    """Empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except FileNotFoundError:
        return ""
