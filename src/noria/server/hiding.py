"""Takes secrets out of the command line that everybody on the machine can read in the list of processes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path


def hide_arguments(secrets: Sequence[str]) -> None:
    """Overwrites each secret where it stands in this process's arguments.

    Linux shows others the very memory that holds them; elsewhere nothing happens. Until then they could be read, so
    the environment or a file is better.
    """
    wanted = [secret.encode() for secret in secrets if secret]
    if not wanted:
        return
    import ctypes  # only where it is needed: the engine's process should start soon

    with contextlib.suppress(OSError, ValueError, IndexError):
        shown = Path("/proc/self/cmdline").read_bytes()
        # Behind the name, which may hold anything and ends with the last parenthesis: field 48, counted from 1.
        begin = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45])
        for secret in wanted:
            position = shown.find(secret)
            while position >= 0:
                ctypes.memset(begin + position, ord("*"), len(secret))
                position = shown.find(secret, position + 1)
