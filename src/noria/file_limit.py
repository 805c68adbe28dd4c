"""How many connections a process may have: `raise_file_limit`."""

from __future__ import annotations

import contextlib

ENOUGH = 2**16
"""Many systems let a process have 1,024 files at first (for the sake of `select`, which nothing here uses)."""


def raise_file_limit() -> None:
    """Raises the limit on open files as far as this process may, up to `ENOUGH`. Each client of a server takes one."""
    try:
        import resource
    except ModuleNotFoundError:  # not on every system
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
