"""`noria bench disturb`: what outrageous requests of somebody else cost those who stream.

Sends a workload to a running server again and again, in turn by itself and beside requests of one kind that no server
should suffer from; asks `/health` all the while; and compares the gaps between tokens within pairs of runs. What
disturbs and what asks `/health` are processes of their own, so that they do not hold up the client that measures.
Needs aiohttp (the `bench` extra).
"""

from __future__ import annotations

import http.client
import json
import logging
import multiprocessing
import os
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any

from noria.bench.compare import spread
from noria.bench.serve import Load, run_load
from noria.bench.timeline import gaps_between_tokens, percentile, summarise_timelines
from noria.bench.workload import WorkloadRequest
from noria.errors import NoriaError, OptionError

logger = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 0.02
START_S = 30.0
ANSWER_S = 60.0
FAILURES = (OSError, http.client.HTTPException)
"""What a request may end with that is not answered, or not in HTTP."""

LARGE_BODY_BYTES = 64 * 2**20
LONG_PROMPT_CHARACTERS = 1_000_000
NESTED_LOOPS = "".join("{% for " + name + " in range(9999) %}" for name in "abc") + "{% endfor %}" * 3


class Disturbance(StrEnum):
    """One kind of request. Some are refused by default; it is for the server to do that without effort."""

    NONE = "none"
    """Nothing at all: how much two runs differ by themselves."""
    BODY = "body"
    """64 MiB that are no JSON, with a Content-Length that says so."""
    PROMPT = "prompt"
    """A million characters."""
    TRUNCATED = "truncated"
    """A million characters of which 16 tokens are to be kept: they must all be tokenised."""
    TEMPLATE = "template"
    """A chat template of nested loops that would run for hours."""


def make_request(disturbance: Disturbance) -> tuple[str, bytes]:
    """Path and body."""
    words = "The quick brown fox jumps over the lazy dog. "
    text = (words * (LONG_PROMPT_CHARACTERS // len(words) + 1))[:LONG_PROMPT_CHARACTERS]
    match disturbance:
        case Disturbance.NONE:
            raise ValueError("nothing is sent")
        case Disturbance.BODY:
            return "/v1/completions", b"x" * LARGE_BODY_BYTES
        case Disturbance.PROMPT:
            body: dict[str, Any] = {"prompt": text, "max_tokens": 1}
        case Disturbance.TRUNCATED:
            body = {"prompt": text, "max_tokens": 1, "truncate_prompt_tokens": 16}
        case Disturbance.TEMPLATE:
            messages = [{"role": "user", "content": "hello"}]
            body = {"messages": messages, "max_tokens": 1, "chat_template": NESTED_LOOPS}
            return "/v1/chat/completions", json.dumps(body).encode()
    return "/v1/completions", json.dumps(body).encode()


def measure_disturbance(
    load: Load,
    requests: Sequence[WorkloadRequest],
    disturbance: Disturbance,
    *,
    num_pairs: int,
    pause_s: float,
) -> dict[str, Any]:
    """Runs the workload once to warm up, then `num_pairs` times by itself and disturbed, in turn.

    One disturbing request follows the other, `pause_s` after its answer. Times in milliseconds; each figure as median,
    min and max over the runs; `ratio` is disturbed / alone within pairs. `pooled_itl_p99_ms` is that of all gaps of the
    runs alone, and of the disturbed ones: the p99 of one run depends on a handful of steps.
    """
    if num_pairs < 1:
        raise OptionError(f"--pairs must be at least 1, not {num_pairs}")
    if pause_s < 0:
        raise OptionError(f"--pause-s must not be negative, not {pause_s}")
    run_load(load, requests)
    runs: list[dict[str, Any]] = []
    gaps_s: tuple[list[float], list[float]] = [], []
    answers: Counter[str] = Counter()
    for number in range(2 * num_pairs):
        kind = disturbance if number % 2 else Disturbance.NONE
        with _beside(load.url, kind, pause_s) as (latencies_s, answered):
            timelines, wall_s = run_load(load, requests)
        figures = summarise_timelines(timelines, wall_s, "")
        figures["health_max_ms"] = round(max(latencies_s, default=float("nan")) * 1e3, 1)
        answers.update(answered)
        runs.append(figures)
        gaps_s[number % 2].extend(gaps_between_tokens(timelines))
        logger.info("run %d of %d is done: %s", number + 1, 2 * num_pairs, kind)
    alone, disturbed = runs[::2], runs[1::2]
    pooled_ms = [(percentile(gaps, 99) or float("nan")) * 1e3 for gaps in gaps_s]
    names = "itl_p99_ms", "tpot_p50_ms", "gen_tok_s", "health_max_ms"
    return {
        "disturbance": disturbance,
        "pairs": num_pairs,
        "failed": sum(run["failed"] for run in runs),
        "answers": dict(answers),
        "alone": {name: spread([run[name] for run in alone]) for name in names},
        "disturbed": {name: spread([run[name] for run in disturbed]) for name in names},
        "ratio": {
            name: spread([b[name] / a[name] for a, b in zip(alone, disturbed, strict=True) if a[name]])
            for name in names[:-1]
        },
        "pooled_itl_p99_ms": [round(value, 2) for value in pooled_ms],
        "pooled_itl_p99_ratio": round(pooled_ms[1] / pooled_ms[0], 3),
    }


@contextmanager
def _beside(url: str, disturbance: Disturbance, pause_s: float) -> Iterator[tuple[list[float], list[str]]]:
    """While the block runs, `/health` is asked, and disturbing requests are sent if they are any.

    The two lists are filled when the block has ended: seconds that `/health` took, and what came of the requests.
    """
    latencies_s: list[float] = []
    answered: list[str] = []
    with _helper(_ask_health, url, latencies_s):
        if disturbance is Disturbance.NONE:
            yield latencies_s, answered
        else:
            with _helper(_disturb, (url, disturbance, pause_s), answered):
                yield latencies_s, answered


@contextmanager
def _helper(target: Callable[[Connection, Any], None], argument: Any, results: list[Any]) -> Iterator[None]:
    """Runs `target(connection, argument)` in another process, from when it says that it is ready until it is told to
    end; extends `results` by what it then sends."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, argument), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_S):
            raise NoriaError("a helper of the benchmark did not start")
        ours.recv()
        yield
        ours.send(None)
        if not ours.poll(ANSWER_S):
            raise NoriaError("the last disturbing request was not answered")
        results.extend(ours.recv())
    except EOFError:
        raise NoriaError("a helper of the benchmark ended; its error is above") from None
    finally:
        process.kill()
        process.join()


def _ask_health(connection: Connection, url: str) -> None:
    latencies_s = []
    client = _connect(url)
    _health_s(client)
    connection.send(None)
    while not connection.poll(HEALTH_INTERVAL_S):
        latencies_s.append(_health_s(client))
    connection.send(latencies_s)


def _health_s(client: http.client.HTTPConnection) -> float:
    """How long a good answer of `/health` took; infinity if there was none. The next request may connect anew."""
    began_s = time.perf_counter()
    try:
        status, _ = _exchange(client, "GET", "/health")
    except FAILURES:
        client.close()
        return float("inf")
    return time.perf_counter() - began_s if status == 200 else float("inf")


def _disturb(connection: Connection, arguments: tuple[str, Disturbance, float]) -> None:
    url, disturbance, pause_s = arguments
    path, body = make_request(disturbance)
    # As from another machine: what it takes to send is not what it takes to be sent something.
    if hasattr(os, "nice"):
        os.nice(19)
    answered = []
    connection.send(None)
    while not connection.poll(pause_s):
        client = _connect(url)
        try:
            status, content = _exchange(client, "POST", path, body)
            answered.append(f"{status} {_code(content)}".strip())
        except FAILURES as error:  # the server may close before everything has been sent
            answered.append(type(error).__name__)
        finally:
            client.close()
    connection.send(answered)


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.netloc, timeout=ANSWER_S)


def _exchange(
    client: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
) -> tuple[int, bytes]:
    client.request(method, path, body, {"Content-Type": "application/json"})
    response = client.getresponse()
    return response.status, response.read()


def _code(content: bytes) -> str:
    """What an error says of itself to programs; empty if it is none, or says nothing."""
    try:
        return str(json.loads(content)["error"]["code"] or "")
    except (ValueError, LookupError, TypeError):
        return ""
