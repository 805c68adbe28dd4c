"""What a Noria server itself says about a load: how long its engine computed, and the processor time of its processes.

Read from /metrics before and after. While requests are open and the engine does not compute, it waits for the front, or
for a core that the front has: this is the time that HTTP and text cost it.
"""

from __future__ import annotations

import http.client
import urllib.request
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "noria:"


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """Seconds since the server started; None is what it does not say."""

    engine_steps_s: float
    front_cpu_s: float | None
    engine_cpu_s: float | None


def read_server_times(url: str) -> ServerTimes | None:
    """None of any server that is not Noria, or does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
            return parse_server_times(response.read().decode())
    except (OSError, ValueError, http.client.HTTPException):
        return None


def parse_server_times(page: str) -> ServerTimes | None:
    """From the text of a metrics page."""
    phases: dict[str, float] = {}
    processes: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == f"{PREFIX}engine_seconds_total":
                phases[sample.labels["phase"]] = sample.value
            elif sample.name == f"{PREFIX}process_cpu_seconds_total":
                processes[sample.labels["process"]] = sample.value
    if not phases:
        return None
    return ServerTimes(phases["schedule"] + phases["execute"], processes.get("front"), processes.get("engine"))


def summarise_server_times(before: ServerTimes | None, after: ServerTimes | None, wall_s: float) -> dict[str, Any]:
    """Seconds, for a benchmark's JSON line; null where the server does not say."""
    if before is None or after is None:
        return dict.fromkeys(("engine_steps_s", "engine_waited_s", "front_cpu_s", "engine_cpu_s"))
    steps_s = after.engine_steps_s - before.engine_steps_s
    return {
        "engine_steps_s": round(steps_s, 3),
        "engine_waited_s": round(max(0.0, wall_s - steps_s), 3),
        "front_cpu_s": _difference(before.front_cpu_s, after.front_cpu_s),
        "engine_cpu_s": _difference(before.engine_cpu_s, after.engine_cpu_s),
    }


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else round(after - before, 3)
