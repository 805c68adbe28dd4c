"""Where Noria keeps what it fetched: `cache_dir`. It never deletes anything there."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$NORIA_CACHE` if set and not empty, else `~/.cache/noria`. The directory may not exist yet."""
    chosen = os.environ.get("NORIA_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "noria"
