"""Every check is met by an app that does all things right, and finds the fault that is planted for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import uvicorn
from faults import FAULTS, fault_of
from faulty import KEY, MODEL, FaultyApp

from noria.conformance.catalogue import CHECKS
from noria.conformance.client import Server
from noria.conformance.contract import Check, Outcome
from noria.conformance.run import run_check, run_checks

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
    yield Peer(app, Server(f"http://127.0.0.1:{port}", MODEL, KEY, timeout_s=3))
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
    result = run_check(peer.server, check)
    peer.app.switch()
    assert result.outcome is Outcome.FAIL, result
    assert result.reason
