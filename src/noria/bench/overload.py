"""`noria bench overload`: keeps any OpenAI-compatible server under more work than its KV memory holds, for a while.

Clients in a closed loop, giant prompts and bursts of urgent requests now and then, and clients that hang up. When time
is up it sends nothing more, waits for the rest, and asks the server what it has left. It does not judge the figures
(`overload_report` makes them), and it does not look at what the tokens are.

Everything is drawn from a seed, apart for each client, so that the same clients ask for the same however fast the
server is. Prompts are random token ids: none is a prefix of another. Needs aiohttp (the `bench` extra).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from noria.bench.overload_report import Call, Kind, summarise_overload
from noria.bench.serve import first_model, import_aiohttp
from noria.errors import OptionError

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

MAX_CUT = 8
"""A client that hangs up does so after at most this many tokens."""
GIANT_OUTPUT_TOKENS = 16
BURST_SIZE = 8
BURST_PROMPT_TOKENS = 16, 64
BURST_OUTPUT_TOKENS = 8, 32
BURST_PRIORITY = -10

BACK_OFF_S = 0.5
"""How long a client that got nothing waits: a closed loop over a server that refuses would be a flood otherwise."""
PROGRESS_S = 10.0
SETTLE_S = 5.0
"""How long the server's gauges may take to follow after the last stream has ended."""
GAUGES = {
    "left_running": "num_requests_running",
    "left_waiting": "num_requests_waiting",
    "left_kv_usage": "kv_cache_usage_perc",
}
GAUGE_PREFIXES = "noria:", "vllm:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """What is sent. Pairs are the bounds of what is drawn, inclusive; an interval of 0 means never."""

    url: str
    model: str | None
    pool_tokens: int
    working_set: float
    duration_s: float
    drain_s: float
    window_s: float
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    token_ids: tuple[int, int]
    giant_every_s: float
    giant_tokens: int
    burst_every_s: float
    abort_share: float
    priority: bool
    """Whether requests say a priority: servers without that policy refuse one."""
    seed: int

    def __post_init__(self) -> None:
        for name in ("pool_tokens", "working_set", "duration_s", "window_s", "giant_tokens"):
            if getattr(self, name) <= 0:
                raise OptionError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("drain_s", "giant_every_s", "burst_every_s"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name} must not be negative, not {getattr(self, name)}")
        for name, least in (("prompt_tokens", 1), ("output_tokens", 1), ("token_ids", 0)):
            low, high = getattr(self, name)
            if not least <= low <= high:
                raise OptionError(f"{name} must be two rising numbers from {least} on, not {low} {high}")
        if not 0 <= self.abort_share <= 1:
            raise OptionError(f"abort_share must be between 0 and 1, not {self.abort_share}")

    @property
    def num_clients(self) -> int:
        """So many that what their requests grow to adds up to the working set, on average."""
        mean_tokens = (sum(self.prompt_tokens) + sum(self.output_tokens)) / 2
        return max(1, round(self.working_set * self.pool_tokens / mean_tokens))


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    """What is read of a chunk; anything else in it is skipped."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(_Event)


def run_overload(load: Overload) -> dict[str, Any]:
    """Sends for `duration_s` and waits for at most `drain_s` more; returns the figures."""
    return asyncio.run(_run(load))


async def _run(load: Overload) -> dict[str, Any]:
    aiohttp = import_aiohttp()
    async with aiohttp.ClientSession(
        # One connection per request, as from independent clients: none is reused just when the server closes it.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=2**20,
    ) as session:
        sender = _Sender(load, session, load.model or await first_model(session, load.url))
        await sender.run()
        left = await _read_gauges(session, load.url)
    figures = summarise_overload(sender.calls, duration_s=load.duration_s, window_s=load.window_s)
    return {"clients": load.num_clients, "pool_tokens": load.pool_tokens} | figures | left


class _Sender:
    """Draws and sends requests, and keeps what happened to each."""

    def __init__(self, load: Overload, session: aiohttp.ClientSession, model: str) -> None:
        self.calls: list[Call] = []
        self._load = load
        self._session = session
        self._model = model
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        """A mistake of ours in a task. What servers do wrong is counted instead."""
        self._began_s = 0.0

    async def run(self) -> None:
        """Returns when everything has ended. What has not after `drain_s` is marked as hung and cut."""
        load = self._load
        logger.info("%d clients for %.0f s, seed %d", load.num_clients, load.duration_s, load.seed)
        self._began_s = time.perf_counter()
        for index in range(load.num_clients):
            self._start(self._be_client(random.Random(f"{load.seed} client {index}")))
        self._start(self._repeat(load.giant_every_s, self._send_giant, random.Random(f"{load.seed} giants")))
        self._start(self._repeat(load.burst_every_s, self._send_burst, random.Random(f"{load.seed} bursts")))
        deadline_s = load.duration_s + load.drain_s
        while self._tasks and self._now_s() < deadline_s:
            await asyncio.wait(self._tasks, timeout=min(PROGRESS_S, deadline_s - self._now_s()))
            if self._error is not None:
                raise self._error
            self._say_progress()
        for call in self.calls:
            if call.outcome == "open":
                call.outcome, call.end_s = "hung", self._now_s()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._error = self._error or task.exception()

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s

    def _say_progress(self) -> None:
        outcomes = Counter(call.outcome for call in self.calls)
        num_waiting = sum(call.outcome == "open" and not call.token_times_s for call in self.calls)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        logger.info("%.0f s: %s; %d wait for their first token", self._now_s(), counts, num_waiting)

    async def _be_client(self, draw: random.Random) -> None:
        """One request after the other."""
        load = self._load
        while self._now_s() < load.duration_s:
            call, prompt = self._draw(draw, "ordinary", draw.randint(*load.prompt_tokens), load.output_tokens)
            await self._send(call, prompt)
            if call.outcome not in ("finished", "aborted"):
                await asyncio.sleep(BACK_OFF_S)

    async def _repeat(self, every_s: float, send: Callable[[random.Random], None], draw: random.Random) -> None:
        """At every multiple of the interval, whether or not what was sent before has ended."""
        at_s = every_s
        while 0 < at_s < self._load.duration_s:
            await asyncio.sleep(max(0.0, at_s - self._now_s()))
            send(draw)
            at_s += every_s

    def _send_giant(self, draw: random.Random) -> None:
        num_output = GIANT_OUTPUT_TOKENS
        self._start(self._send(*self._draw(draw, "giant", self._load.giant_tokens, (num_output, num_output))))

    def _send_burst(self, draw: random.Random) -> None:
        for _ in range(BURST_SIZE):
            num_prompt = draw.randint(*BURST_PROMPT_TOKENS)
            self._start(self._send(*self._draw(draw, "urgent", num_prompt, BURST_OUTPUT_TOKENS)))

    def _draw(
        self, draw: random.Random, kind: Kind, num_prompt: int, output_tokens: tuple[int, int]
    ) -> tuple[Call, list[int]]:
        """A request and its prompt. Draws the same amount whatever comes of it."""
        low, high = self._load.token_ids
        max_tokens, cut_after = draw.randint(*output_tokens), draw.randint(1, MAX_CUT)
        is_cut = draw.random() < self._load.abort_share
        prompt = draw.choices(range(low, high + 1), k=num_prompt)
        return Call(kind, max_tokens, cut_after if is_cut else None), prompt

    async def _send(self, call: Call, prompt: list[int]) -> None:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": call.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            # Without its text a special token would look like silence.
            "skip_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._load.priority:
            body["priority"] = BURST_PRIORITY if call.kind == "urgent" else 0
        call.start_s = self._now_s()
        self.calls.append(call)
        try:
            async with self._session.post(
                f"{self._load.url}/v1/completions",
                data=msgspec.json.encode(body),
                headers={"Content-Type": "application/json"},
            ) as response:
                call.status = response.status
                if response.status == 200:
                    await self._read_stream(response, call)
                else:
                    call.error = f"{response.status} {(await response.text())[:200]}"
                    call.outcome = "refused"
        except (OSError, TimeoutError, msgspec.DecodeError, import_aiohttp().ClientError) as error:
            call.error = repr(error)[:200]
            call.outcome = "broken" if call.status == 200 else "failed"
        call.end_s = self._now_s()

    async def _read_stream(self, response: aiohttp.ClientResponse, call: Call) -> None:
        has_finish_reason = False
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]" and has_finish_reason:
                call.outcome = "finished"
                return
            if data == b"[DONE]":
                break
            event = _EVENTS.decode(data)
            if event.error:
                call.outcome, call.error = "failed", str(event.error)[:200]
                return
            if event.usage:
                call.num_generated = event.usage.completion_tokens
            for choice in event.choices:
                has_finish_reason |= choice.finish_reason is not None
                if choice.text:
                    call.token_times_s.append(self._now_s())
            if call.cut_after is not None and len(call.token_times_s) >= call.cut_after and not has_finish_reason:
                call.outcome = "aborted"
                response.close()
                return
        call.outcome, call.error = "broken", "the stream ended without a finish reason and [DONE]"


async def _read_gauges(session: aiohttp.ClientSession, url: str) -> dict[str, float | None]:
    """What the server says is left, once it is nothing or `SETTLE_S` have passed; None where it does not say."""
    deadline_s = time.perf_counter() + SETTLE_S
    while True:
        try:
            async with session.get(
                f"{url}/metrics", timeout=import_aiohttp().ClientTimeout(total=SETTLE_S)
            ) as response:
                text = await response.text() if response.status == 200 else ""
        except (OSError, TimeoutError, import_aiohttp().ClientError):
            text = ""
        left = {key: _read_gauge(text, name) for key, name in GAUGES.items()}
        if not any(left.values()) or time.perf_counter() > deadline_s:
            return left
        await asyncio.sleep(0.2)


def _read_gauge(text: str, name: str) -> float | None:
    """The sum of a gauge over its labels, in the text format of Prometheus."""
    starts = tuple(f"{prefix}{name}{after}" for prefix in GAUGE_PREFIXES for after in "{ ")
    values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(starts)]
    return sum(values) if values else None
