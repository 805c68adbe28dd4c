"""What the start-up benchmark does with a server that does not do as it is told."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from noria.bench import startup
from noria.errors import NoriaError

DEAF = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", file=sys.stderr, flush=True)
time.sleep(60)
"""


def test_a_server_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "STOP_S", 0.1)
    server = subprocess.Popen([sys.executable, "-c", DEAF], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    assert server.stderr.readline() == "deaf\n"
    startup._stop(server)
    assert server.returncode == -signal.SIGKILL


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(NoriaError, match=r"ended while starting: .*absent"):
        startup.measure_startup([str(tmp_path / "absent.gguf")], num_runs=1)
