"""`noria bench front`: what HTTP and text cost by themselves, and what an idle server costs.

Starts the server over a scripted engine (no model), sends streams through it, and reads from the operating system how
much processor time the front and the engine process took: per streamed token, and per second when idle. Linux only.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from noria.bench.serve import Load, run_load
from noria.bench.workload import WorkloadRequest
from noria.errors import NoriaError
from noria.observe.cpu import process_cpu_s


def measure_front(*, num_streams: int, num_tokens: int, step_s: float, idle_s: float) -> dict[str, Any]:
    """`num_streams` streams of `num_tokens` tokens at once, from an engine that takes `step_s` for a step; then
    `idle_s` seconds of nothing. Costs are processor time: microseconds per token, and percent of one core."""
    engine = {"step_s": step_s, "max_model_len": num_tokens + 64, "max_num_seqs": num_streams, "num_blocks": 2**16}
    with scripted_server(engine) as (front_pid, url, engine_pid):
        load = Load(url=url)
        run_load(load, [WorkloadRequest("warm up", 8)] * 8)
        before = _cpu_s(front_pid), _cpu_s(engine_pid)
        timelines, wall_s = run_load(load, [WorkloadRequest("x", num_tokens)] * num_streams)
        front_s, engine_s = _cpu_s(front_pid) - before[0], _cpu_s(engine_pid) - before[1]
        num_streamed = sum(timeline.num_generated for timeline in timelines)
        time.sleep(1.0)  # what the last requests leave behind is not idleness
        before = _cpu_s(front_pid), _cpu_s(engine_pid)
        time.sleep(idle_s)
        idle = _cpu_s(front_pid) - before[0], _cpu_s(engine_pid) - before[1]
    return {
        "streams": num_streams,
        "tokens": num_streamed,
        "failed": sum(timeline.error is not None for timeline in timelines),
        "wall_s": round(wall_s, 2),
        "front_us_per_token": round(front_s / num_streamed * 1e6, 1),
        "engine_us_per_token": round(engine_s / num_streamed * 1e6, 1),
        "idle_s": idle_s,
        "idle_front_percent": round(100 * idle[0] / idle_s, 3) if idle_s else None,
        "idle_engine_percent": round(100 * idle[1] / idle_s, 3) if idle_s else None,
    }


@contextmanager
def scripted_server(engine: Mapping[str, Any]) -> Iterator[tuple[int, str, int]]:
    """A server over `build_scripted_engine(**engine)`: its process id, its URL, and its engine's process id."""
    settings = json.dumps({"server": {"port": 0}, "engine": dict(engine)})
    command = [sys.executable, "-m", "noria.server.scripted", settings]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            url, engine_pid = _wait_for_start(server)
            assert server.stderr is not None
            reading = threading.Thread(target=server.stderr.read, daemon=True)  # a full pipe would stop the server
            reading.start()
            yield server.pid, url, engine_pid
        finally:
            server.terminate()
            server.wait()
        reading.join()


def _wait_for_start(server: subprocess.Popen[str]) -> tuple[str, int]:
    """The server's URL and its engine's process id, as its log names them."""
    assert server.stderr is not None
    log = ""
    for line in server.stderr:
        log += line
        found = re.search(r"engine process (\d+)[\s\S]*Noria serves .* at (http://\S+)", log)
        if found:
            return found[2], int(found[1])
    raise NoriaError(f"the server did not start:\n{log}")


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far, in user and kernel mode."""
    seconds = process_cpu_s(pid)
    if seconds is None:
        raise NoriaError("processor times are read from /proc, which this system does not have")
    return seconds
