"""`noria bench startup`: how long from `noria serve` to the first streamed token.

Starts the server as a user would, polls /health, sends a streamed request as soon as it is 200, and stops the clock at
the first chunk with text; several times, one after the other. The memory of the server's processes is sampled
meanwhile (`noria.bench.memory`).
"""

from __future__ import annotations

import http.client
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from noria.bench.memory import PeakMemory
from noria.errors import NoriaError, OptionError

POLL_S = 0.01
STOP_S = 10.0
"""How long a server may take to end when it is told to."""


def measure_startup(arguments: Sequence[str], *, num_runs: int, timeout_s: float = 300.0) -> dict[str, Any]:
    """`arguments` are those of `noria serve`, without a port. Times in seconds, memory in MB.

    Memory is that of one more run, whose time does not count: to look at it takes time.
    """
    if num_runs < 1:
        raise OptionError(f"--runs must be at least 1, not {num_runs}")
    runs = [_one_run(arguments, timeout_s, lambda pid: nullcontext()) for _ in range(num_runs)]
    result: dict[str, Any] = {"runs": num_runs}
    for name in ("listening_s", "ready_s", "first_token_s"):
        values = [run[name] for run in runs]
        result[name] = round(statistics.median(values), 3)
        result[f"{name[:-2]}_max_s"] = round(max(values), 3)
    return result | _measure_memory(arguments, timeout_s)


def _measure_memory(arguments: Sequence[str], timeout_s: float) -> dict[str, int]:
    watches: list[PeakMemory] = []

    def watch(pid: int) -> PeakMemory:
        watches.append(PeakMemory(pid))
        return watches[0]

    _one_run(arguments, timeout_s, watch)
    peaks = {"peak_pss_mb": watches[0].peak_bytes, "peak_model_file_mb": watches[0].peak_model_file_bytes}
    return {name: round(peak / 1e6) for name, peak in peaks.items()}


def _one_run(
    arguments: Sequence[str], timeout_s: float, watch: Callable[[int], AbstractContextManager[object]]
) -> dict[str, float]:
    """Seconds from the start of a server to each stage; `watch(pid)` is entered while it starts and answers."""
    port = _free_port()
    began_s = time.perf_counter()
    command = [sys.executable, "-m", "noria.cli", "serve", *arguments, "--port", str(port), "--log-level", "warning"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    times: dict[str, float] = {}
    try:

        def wait_for(name: str, holds: Callable[[], bool]) -> None:
            while not holds():
                if server.poll() is not None:
                    raise NoriaError(f"the server ended while starting: {server.communicate()[1].strip()}")
                if time.perf_counter() - began_s > timeout_s:
                    raise NoriaError(f"the server was not ready after {timeout_s} s")
                time.sleep(POLL_S)
            times[name] = time.perf_counter() - began_s

        with watch(server.pid):
            wait_for("listening_s", lambda: _health(port) is not None)
            wait_for("ready_s", lambda: _health(port) == 200)
            _first_token(port)
            times["first_token_s"] = time.perf_counter() - began_s
        return times
    finally:
        _stop(server)


def _stop(server: subprocess.Popen[str]) -> None:
    """Ends it, by force if it does not end by itself; what it still says is read, so that it need not wait for us."""
    with server:
        server.terminate()
        try:
            server.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _health(port: int) -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


def _first_token(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
                return
        raise NoriaError("the server's first answer had no text")
    finally:
        connection.close()
