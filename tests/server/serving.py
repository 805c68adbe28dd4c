"""A server to test against: a real process on a free port, over a scripted engine, and small HTTP helpers."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    log: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with every request."""

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        timeout: float = 20.0,
        on_header: Callable[[], None] = lambda: None,
        headers: dict[str, str] | None = None,
    ) -> Response:
        """One request on a connection of its own. `body` is sent as JSON, or as it is if it is bytes."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(
                method, path, data, {"Content-Type": "application/json"} | self.headers | (headers or {})
            )
            got = connection.getresponse()
            on_header()
            answered = {name.lower(): value for name, value in got.getheaders()}
            return Response(got.status, answered, got.read())
        finally:
            connection.close()

    def get(self, path: str) -> Response:
        return self.request("GET", path)

    def complete(self, **body: Any) -> Response:
        return self.request("POST", "/v1/completions", body)

    def chat(self, **body: Any) -> Response:
        return self.request("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]} | body)

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series on /metrics."""
        text = self.get("/metrics").body.decode()
        for line in text.splitlines():
            if line.startswith(f"noria:{name}{{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name} {labels} in\n{text}")

    @property
    def engine_pid(self) -> int:
        """The engine process, as the server's log names it."""
        found = re.search(r"engine process (\d+)", "".join(self.log))
        assert found, self.log
        return int(found[1])

    def wait_until(self, holds: Any, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, "it did not come to hold in time; the log:\n" + "".join(self.log)
            time.sleep(0.02)

    def is_healthy(self) -> bool:
        return self.get("/health").status == 200

    def wait_quiet(self) -> None:
        """Until nothing runs, waits or holds a block, as the engine itself says."""
        self.wait_until(
            lambda: (
                self.metric("num_requests_running") == self.metric("num_requests_waiting") == 0
                and self.metric("kv_cache_usage_perc") == 0
            )
        )


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.json) == {"error"}
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """The JSON of each server-sent event; the last must be [DONE]."""
        assert self.headers["content-type"].startswith("text/event-stream")
        return parse_events(self.body)


class Call(threading.Thread):
    """A completion in the background; `response` and `ended_s` are set when it is over, `header_s` before."""

    def __init__(self, server: Server, *, path: str = "/v1/completions", **body: Any) -> None:
        super().__init__(daemon=True)
        self._server, self._path, self._body = server, path, body
        self.response: Response | None = None
        self.error: Exception | None = None
        self.header_s = self.ended_s = 0.0
        self.start()

    def run(self) -> None:
        try:
            self.response = self._server.request("POST", self._path, self._body, on_header=self._note_header)
        except Exception as error:
            self.error = error
        self.ended_s = time.monotonic()

    def _note_header(self) -> None:
        self.header_s = time.monotonic()

    def result(self, timeout_s: float = 15.0) -> Response:
        self.join(timeout_s)
        assert not self.is_alive(), "the call did not end"
        assert self.error is None, repr(self.error)
        assert self.response is not None
        return self.response


def parse_events(body: bytes) -> list[Any]:
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == "", "the stream does not end with an empty line"
    assert all(block.startswith("data: ") for block in blocks)
    contents = [block.removeprefix("data: ") for block in blocks]
    assert contents.pop() == "[DONE]"
    return [json.loads(content) for content in contents]


@contextmanager
def running_server(
    engine: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    *,
    wait: bool = True,
    environment: dict[str, str] | None = None,
) -> Iterator[Server]:
    """A server over a scripted engine; killed at the end if it still runs. See `running`."""
    settings = {"engine": engine or {}, "server": {"port": 0} | (server or {})}
    with running(["noria.server.scripted", json.dumps(settings)], wait=wait, environment=environment) as started:
        yield started


@contextmanager
def running(
    module: list[str], *, wait: bool = True, environment: dict[str, str] | None = None, timeout_s: float = 30.0
) -> Iterator[Server]:
    """A module with its arguments, as a server process. `environment` is added to this process's own."""
    process = subprocess.Popen(
        [sys.executable, "-m", *module],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | (environment or {}),
    )
    running = Server(process)
    assert process.stderr is not None
    reader = threading.Thread(target=_read_log, args=(running,), daemon=True)
    reader.start()
    try:
        deadline = time.monotonic() + timeout_s
        pattern = r"Noria serves .* at (https?://\S+)" if wait else r"listening on (https?://\S+)"
        while not running.url:
            assert time.monotonic() < deadline, "the server did not start; its log:\n" + "".join(running.log)
            assert process.poll() is None, "the server ended; its log:\n" + "".join(running.log)
            found = re.search(pattern, "".join(running.log))
            if found:
                running.url = found[1]
                running.port = int(running.url.rsplit(":", 1)[1])
            time.sleep(0.02)
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        reader.join(5)
        process.stderr.close()


def _read_log(server: Server) -> None:
    assert server.process.stderr is not None
    for line in server.process.stderr:
        server.log.append(line)
