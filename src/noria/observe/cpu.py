"""How much processor time a process has taken, as Linux tells it."""

from __future__ import annotations

import os
from pathlib import Path


def process_cpu_s(pid: int) -> float | None:
    """Seconds in user and kernel mode so far; None where the system does not say, or there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
