"""`noria bench serve`: sends a workload to any OpenAI-compatible server and reports what came back, and when.

Greedy, end of sequence ignored, streamed. Each request is sent at its `arrival_s`. Times are the client's: from the
request to the chunks with text, so they include HTTP and the server's queue. Needs aiohttp (the `bench` extra).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from noria.bench.timeline import Timeline
from noria.bench.workload import WorkloadRequest
from noria.errors import NoriaError, OptionError

if TYPE_CHECKING:
    import aiohttp

Progress = Callable[[int, int], None]
"""Called with the number of new chunks and the number of requests that ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How a workload is sent. `rate_scale` stretches arrivals: 2 halves the rate."""

    url: str
    model: str | None = None
    rate_scale: float = 1.0
    timeout_s: float = 3600.0


def run_load(
    load: Load, requests: Sequence[WorkloadRequest], on_progress: Progress = lambda num_chunks, num_ended: None
) -> tuple[list[Timeline], float]:
    """Sends everything; returns what happened to each request, and the wall time in seconds."""
    return asyncio.run(_run(load, requests, on_progress))


async def _run(load: Load, requests: Sequence[WorkloadRequest], on_progress: Progress) -> tuple[list[Timeline], float]:
    aiohttp = import_aiohttp()
    timelines = [Timeline(request) for request in requests]
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=load.timeout_s),
        read_bufsize=2**20,
    ) as session:
        model = load.model or await first_model(session, load.url)
        began_s = time.perf_counter()
        calls = [_send(session, load, model, timeline, began_s, on_progress) for timeline in timelines]
        await asyncio.gather(*calls)
        return timelines, time.perf_counter() - began_s


def import_aiohttp() -> Any:
    """Only where it is needed: it is an extra."""
    try:
        import aiohttp
    except ModuleNotFoundError as error:
        raise OptionError(
            'this benchmark needs aiohttp: pip install "noria[bench]", or in a checkout pip install ".[bench]"'
        ) from error
    return aiohttp


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The name of the first model that the server lists."""
    try:
        async with session.get(f"{url}/v1/models") as response:
            return str((await response.json())["data"][0]["id"])
    except OSError as error:
        raise NoriaError(f"nothing answers at {url}: {error.strerror or error}") from error
    except (ValueError, LookupError, TimeoutError, import_aiohttp().ClientError) as error:
        raise NoriaError(f"{url}/v1/models does not answer as expected: {error!r}") from error


async def _send(
    session: aiohttp.ClientSession,
    load: Load,
    model: str,
    timeline: Timeline,
    began_s: float,
    on_progress: Progress,
) -> None:
    request = timeline.request
    await asyncio.sleep(max(0.0, began_s + request.arrival_s * load.rate_scale - time.perf_counter()))
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    timeline.start_s = time.perf_counter()
    try:
        async with session.post(
            f"{load.url}/v1/completions",
            data=msgspec.json.encode(body),
            headers={"Content-Type": "application/json"},
        ) as response:
            if response.status != 200:
                timeline.error = f"{response.status} {(await response.text())[:200]}"
            else:
                await _read_stream(response, timeline, on_progress)
    except (OSError, TimeoutError, msgspec.DecodeError, import_aiohttp().ClientError) as error:
        timeline.error = repr(error)[:200]
    on_progress(0, 1)


async def _read_stream(response: aiohttp.ClientResponse, timeline: Timeline, on_progress: Progress) -> None:
    timeline.error = "the stream ended without [DONE]"
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            timeline.error = None
            return
        event = msgspec.json.decode(data)
        if event.get("error"):
            timeline.error = str(event["error"])[:200]
            return
        if usage := event.get("usage"):
            timeline.num_prompt_tokens = usage["prompt_tokens"]
            timeline.num_generated = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            timeline.num_cached_tokens = details.get("cached_tokens") or 0
        # A chunk without text is no token: it must not fake a time.
        if event.get("choices") and event["choices"][0].get("text"):
            timeline.token_times_s.append(time.perf_counter())
            on_progress(1, 0)
