"""`noria bench soak`: does a server's memory stay where it is? Many streams at once, in rounds; then many short calls.

Starts the server over a scripted engine (no model), as `noria.bench.front` does. Memory is what its processes have to
themselves, in memory or swapped out: pages of files, which the system can drop, do not count. Linux only.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from noria.bench.front import scripted_server
from noria.bench.memory import process_tree
from noria.bench.serve import Load, import_aiohttp, run_load
from noria.bench.workload import WorkloadRequest
from noria.errors import NoriaError, OptionError
from noria.file_limit import raise_file_limit

logger = logging.getLogger(__name__)

SHORT_AT_ONCE = 32
SAMPLES = 10
"""How many times memory is looked at during the short requests."""
SETTLE_S = 1.0
"""How long the server is left alone before its memory is looked at."""
POOL_BLOCKS = 2**13
_PRIVATE = re.compile(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", re.MULTILINE)


def measure_soak(*, num_streams: int, num_tokens: int, num_rounds: int, num_short: int) -> dict[str, Any]:
    """`num_rounds` rounds of `num_streams` streams of `num_tokens` tokens; then `num_short` requests for one token,
    each with a prompt of its own, in tenths: what is left over is not sent. One more round, and one more tenth, come
    before, to warm up: only their failures count.

    MB of memory after each round, and after each tenth of the requests; `short` says how many were sent, warm-up apart.
    """
    for name, value in (("streams", num_streams), ("tokens", num_tokens), ("rounds", num_rounds)):
        if value < 1:
            raise OptionError(f"--{name} must be at least 1, not {value}")
    if num_short and num_short < SAMPLES:
        raise OptionError(f"--short must be 0, or at least {SAMPLES}, not {num_short}")
    raise_file_limit()
    engine: dict[str, Any] = {"max_num_seqs": num_streams, "max_model_len": num_tokens + 64, "num_blocks": POOL_BLOCKS}
    engine["scheduling"] = {"max_num_batched_tokens": max(2048, num_streams)}
    with scripted_server(engine) as (pid, url, _):

        def look() -> float:
            time.sleep(SETTLE_S)
            return private_mb(pid)

        streams = [WorkloadRequest(f"stream {number}", num_tokens) for number in range(num_streams)]
        result: dict[str, Any] = {"start_mb": look(), "streams": num_streams, "failed_streams": 0, "rounds_mb": []}
        began_s = time.perf_counter()
        for number in range(num_rounds + 1):
            timelines, _ = run_load(Load(url=url), streams)
            whole = [timeline for timeline in timelines if timeline.is_ok and timeline.num_generated == num_tokens]
            result["failed_streams"] += num_streams - len(whole)
            result["rounds_mb"].append(look())
            logger.info("round %d of %d: %.1f MB", number, num_rounds, result["rounds_mb"][-1])
        result["warm_mb"] = result["rounds_mb"].pop(0)
        result["streams_s"] = round(time.perf_counter() - began_s, 1)
        result |= _send_short(url, num_short, look)
    return result


def private_mb(pid: int) -> float:
    """Anonymous memory and swap of a process and its descendants, in MB."""
    kib = 0
    for each in process_tree(pid):
        try:
            kib += sum(map(int, _PRIVATE.findall(Path(f"/proc/{each}/status").read_text())))
        except OSError:
            continue  # it has ended
    if not kib:
        raise NoriaError("memory is read from /proc, which this system does not have")
    return round(kib * 1024 / 1e6, 1)


def _send_short(url: str, number: int, look: Callable[[], float]) -> dict[str, Any]:
    if not number:
        return {"short": 0}
    tenth = number // SAMPLES
    numbers = iter(range(tenth * (SAMPLES + 1)))
    failures = asyncio.run(_send_some(url, numbers, tenth))
    sizes_mb = [look()]
    began_s = time.perf_counter()
    for _ in range(SAMPLES):
        failures += asyncio.run(_send_some(url, numbers, tenth))
        sizes_mb.append(look())
        logger.info("short requests: %.1f MB", sizes_mb[-1])
    return {
        "short": tenth * SAMPLES,
        "failed_short": len(failures),
        "errors": failures[:3],
        "short_warm_mb": sizes_mb[0],
        "short_mb": sizes_mb[1:],
        "short_s": round(time.perf_counter() - began_s, 1),
    }


async def _send_some(url: str, numbers: Iterator[int], how_many: int) -> list[str]:
    """What went wrong with those that failed. On connections of its own: idle ones are closed by the server."""
    aiohttp = import_aiohttp()
    failures: list[str] = []
    left = iter(range(how_many))

    async def client(session: Any) -> None:
        for _ in left:
            body = {"prompt": f"request number {next(numbers):012}", "max_tokens": 1}
            try:
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    answer = await response.json()
                if response.status != 200 or answer["usage"]["completion_tokens"] != 1:
                    failures.append(str(answer)[:200])
            except (OSError, ValueError, LookupError, TimeoutError, aiohttp.ClientError) as error:
                failures.append(repr(error))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session) for _ in range(SHORT_AT_ONCE)))
    return failures
