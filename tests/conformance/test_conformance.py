"""Every check is met by an app that does all things right, and finds the fault that is planted for it."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import uvicorn
from faults import FAULTS, MORE_FAULTS, fault_of
from faulty import KEY, MODEL, FaultyApp

from noria.cli.app import run
from noria.conformance.catalogue import CHECKS, choose
from noria.conformance.client import Response, Server
from noria.conformance.contract import Check, NotSupported, Outcome, Unmet
from noria.conformance.run import run_check, run_checks
from noria.conformance.sse import read_events

NAMES = [check.name for check in CHECKS]


@dataclass
class Peer:
    app: FaultyApp
    server: Server


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    """The faulty app behind a real HTTP server on loopback."""
    app = FaultyApp()
    config = uvicorn.Config(app, port=0, http="h11", loop="asyncio", lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Peer(app, Server(f"http://127.0.0.1:{port}", MODEL, KEY, timeout_s=20))
    server.should_exit = server.force_exit = True
    thread.join(10)


def test_there_are_enough_checks_and_each_has_a_name_of_its_own():
    assert len(CHECKS) >= 120
    assert len(set(NAMES)) == len(NAMES)
    assert all(check.expected and "|" not in check.expected for check in CHECKS)


def test_every_check_has_a_fault_and_every_fault_a_check():
    assert [check.name for check in CHECKS if fault_of(check) is None] == []
    common = {name.removeprefix("completions-").removeprefix("chat-") for name in NAMES} | set(NAMES)
    assert set(FAULTS) <= common


def test_an_app_without_faults_passes_every_check(peer: Peer):
    peer.app.switch()
    results = run_checks(peer.server, CHECKS)
    assert [(result.name, result.reason) for result in results if result.outcome is not Outcome.PASS] == []


@pytest.mark.parametrize("check", CHECKS, ids=NAMES)
def test_a_check_finds_its_fault(peer: Peer, check: Check):
    peer.app.switch(fault_of(check) or "")
    # One fault is that nothing ends: it need not be waited for so long.
    server = dataclasses.replace(peer.server, timeout_s=2) if check.name == "connection-close" else peer.server
    result = run_check(server, check)
    peer.app.switch()
    assert result.outcome is Outcome.FAIL, result
    assert result.reason


def test_a_refusal_that_names_what_a_check_needs_is_no_failure(peer: Peer):
    [check] = choose(["completions-logit-bias"])
    peer.app.switch("forbid:logit_bias")
    result = run_check(peer.server, check)
    assert (result.outcome, result.reason[:12]) == (Outcome.NOT_SUPPORTED, "logit_bias: ")
    peer.app.switch("refuse:logit_bias")  # without its name
    assert run_check(peer.server, check).outcome is Outcome.FAIL
    peer.app.switch("forbid:top_k")
    [check] = choose(["completions-top-k-type"])
    assert run_check(peer.server, check).outcome is Outcome.NOT_SUPPORTED
    peer.app.switch()


@pytest.mark.parametrize(("name", "fault"), MORE_FAULTS)
def test_a_check_finds_that_there_is_too_little_to_look_at(peer: Peer, name: str, fault: str):
    [check] = choose([name])
    peer.app.switch(fault)
    result = run_check(peer.server, check)
    peer.app.switch()
    assert result.outcome is Outcome.FAIL, result


def refusal(message: str, param: str | None = None) -> object:
    return {"error": {"message": message, "type": "x", "param": param, "code": "logit_bias"}}


@pytest.mark.parametrize(
    ("need", "content", "names_it"),
    [
        ("n", refusal("first\nn is a letter\nlast"), False),
        ("n", refusal("wrong", "n"), True),
        ("n", refusal("`n` is too much"), True),
        ("n", {"detail": [{"loc": ["body", "n"], "msg": "extra fields"}]}, True),
        ("n", {"detail": [{"loc": ["body", "top_n"], "msg": "n is a letter"}]}, False),
        ("n", {"n": "a key\nis no word"}, False),
        ("logit_bias", refusal("Unsupported: LOGIT_BIAS"), True),
        ("logit_bias", refusal("wrong", "temperature"), False),
        ("logit_bias", "no logit_bias here", True),
        ("logit_bias", b"<html>no logit_bias here</html>", True),
        ("logit_bias", b"<html>no logit_biases here</html>", False),
    ],
)
def test_a_refusal_names_a_need_in_what_it_says_and_not_by_the_way(need: str, content: object, names_it: bool):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    server = Server("http://x", needs=(need,))
    with pytest.raises(NotSupported if names_it else Unmet):
        server.supported(Response(400, {}, body), "/v1/completions")


def test_a_missing_endpoint_is_not_supported(peer: Peer):
    peer.app.switch("no-chat")
    outcomes = {run_check(peer.server, check).outcome for check in choose(["chat-shape", "chat-stream-joined"])}
    peer.app.switch()
    assert outcomes == {Outcome.NOT_SUPPORTED}


def test_without_a_key_nobody_can_tell_whether_one_is_wanted(peer: Peer):
    [check] = choose(["wrong-key"])
    assert run_check(dataclasses.replace(peer.server, api_key=None), check).outcome is Outcome.NOT_SUPPORTED


def test_the_command_prints_a_table_and_its_exit_code_tells_of_failures(peer: Peer, capsys: pytest.CaptureFixture[str]):
    arguments = ["conformance", peer.server.url + "/v1/", "--api-key", KEY, "--only", "models-*", "--only", "*-created"]
    peer.app.switch()
    assert run(arguments) == 0
    printed = capsys.readouterr().out
    assert "models-list" in printed
    assert "chat-created" in printed
    assert printed.splitlines()[-3] == "standard          10 pass, 0 fail, 0 not supported"
    peer.app.switch("answer:created=1.5")
    assert run(arguments) == 1
    assert "-> created is 1.5" in capsys.readouterr().out
    assert run([*arguments, "--json"]) == 1
    peer.app.switch()
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == MODEL
    assert found["counts"]["standard"] == {"pass": 8, "fail": 2, "not supported": 0}
    assert {check["name"] for check in found["checks"] if check["outcome"] == "fail"} == {
        "chat-created",
        "completions-created",
    }


def test_the_command_waits_for_a_server_that_is_loading(peer: Peer, capsys: pytest.CaptureFixture[str]):
    arguments = ["conformance", peer.server.url, "--api-key", KEY, "--only", "chat-shape"]
    peer.app.switch()
    peer.app.num_loading = 2
    assert run(arguments) == 0
    peer.app.switch("always-loading")
    assert run([*arguments, "--timeout-s", "0.1"]) == 1
    peer.app.switch()
    assert "is not ready: 503" in capsys.readouterr().err


def test_what_cannot_be_begun_is_told_in_a_line(peer: Peer, capsys: pytest.CaptureFixture[str]):
    assert run(["conformance", "http://127.0.0.1:1"]) == 1
    assert "nothing answers at http://127.0.0.1:1" in capsys.readouterr().err
    assert run(["conformance", peer.server.url, "--only", "no-such-check"]) == 2
    assert "'no-such-check'" in capsys.readouterr().err
    peer.app.switch("models:-data")
    assert run(["conformance", peer.server.url, "--api-key", KEY]) == 1
    peer.app.switch()
    assert "--model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "events"),
    [
        (b"data: a\n\ndata:b\n\n", ["a", "b"]),
        (b"\xef\xbb\xbfdata: a\r\n\r\ndata: b\r\rdata: c\n\n", ["a", "b", "c"]),
        (b": a comment\n\nevent: x\nid: 1\ndata: a\ndata: b\n\n", ["a\nb"]),
        ("data: \u2028\n\n".encode(), ["\u2028"]),
        (b"", []),
    ],
)
def test_event_streams_are_read_as_the_standard_says(body: bytes, events: list[str]):
    assert read_events(body) == events


@pytest.mark.parametrize("body", [b"data: a\n", b"data: a", b"data: \xff\n\n", b"<html>\n\n"])
def test_event_streams_that_clients_cannot_read_are_found(body: bytes):
    with pytest.raises(Unmet):
        read_events(body)


def test_the_page_lists_exactly_the_checks_that_there_are():
    script = Path(__file__).parents[2] / "scripts" / "conformance_table.py"
    assert subprocess.run([sys.executable, script, "--check"]).returncode == 0, f"run {script.name}"


def test_every_difference_on_the_page_has_a_note():
    script = load_script()
    page = script.PAGE.read_text()
    notes = set(re.findall(r"`([a-z0-9-]+)`", page.split("## Where they differ")[1].split("## All checks")[0]))
    columns = script.columns_of(page)
    assert len(columns) >= 2
    differing = {name for column in columns.values() for name, outcome in column.items() if outcome != "pass"}
    assert sorted(differing - notes) == []
    assert [name for name in columns["Noria"] if columns["Noria"][name] == "fail"] == []


def test_results_become_columns(tmp_path: Path):
    script = load_script()
    page = f"before\n{script.COUNTS}{script.END}\nbetween\n{script.TABLE}{script.END}\nafter\n"
    first = script.updated(page, {"One": {CHECKS[0].name: "pass"}})
    columns = script.columns_of(first)
    assert columns["One"][CHECKS[0].name] == "pass"
    results = tmp_path / "two.json"
    results.write_text(json.dumps({"checks": [{"name": CHECKS[1].name, "outcome": "fail"}]}))
    second = script.updated(first, columns | {"Two": script.read_results(str(results))})
    assert f"| `{CHECKS[1].name}` | {CHECKS[1].expected} | {CHECKS[1].source} |  | fail |" in second
    assert "1 pass, 0 fail, 0 not supported | 0 pass, 1 fail, 0 not supported |" in second
    assert script.updated(second, script.columns_of(second)) == second


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "conformance_table", Path(__file__).parents[2] / "scripts" / "conformance_table.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
