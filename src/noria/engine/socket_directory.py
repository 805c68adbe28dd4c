"""Where an engine's sockets are: a directory that only this user can enter, removed by whoever comes after a kill.

A directory is in use while somebody holds the lock on a file in it, and the system gives up the lock of a process that
was killed: so what an owner has left behind can be told from what is in use, whatever the process ids say.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "noria-engine-"
_LOCK = "lock"
_UNLOCKED_S = 60.0
"""A directory without a lock file may be one that is just being made; after this long it is not."""


class SocketDirectory:
    """A new directory of mode 0700. Making one also removes those of this user that nobody holds any more."""

    def __init__(self) -> None:
        remove_stale(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Locked before it has its name: nobody can find it while it is not held.
        unnamed = self.path / f"{_LOCK}.new"
        self._lock: int | None = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK)

    def close(self) -> None:
        """Removes it. Safe to call twice."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def remove_stale(parent: Path) -> None:
    """Removes the directories in `parent` that killed processes of this user have left. What cannot be, stays."""
    for directory in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            state = directory.lstat()
            if directory.is_symlink() or not directory.is_dir() or state.st_uid != os.getuid():
                continue
            if not (directory / _LOCK).exists():
                if time.time() - state.st_mtime > _UNLOCKED_S:
                    shutil.rmtree(directory)
                continue
            _remove_unless_held(directory)


def _remove_unless_held(directory: Path) -> None:
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises BlockingIOError while its owner lives
        shutil.rmtree(directory)
    finally:
        os.close(lock)
