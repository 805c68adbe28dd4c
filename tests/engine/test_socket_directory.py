"""Directories of sockets: removed when they are left, by whoever comes next, and never while they are in use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from noria.engine.socket_directory import PREFIX, SocketDirectory, remove_stale


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def test_only_this_user_can_enter_and_closing_removes_it() -> None:
    directory = SocketDirectory()
    assert directory.path.stat().st_mode & 0o777 == 0o700
    (directory.path / "engine-commands").touch()
    directory.close()
    assert not directory.path.exists()
    directory.close()


def test_what_a_killed_process_has_left_is_removed_by_the_next(temporary: Path) -> None:
    program = (
        "import time; from noria.engine.socket_directory import SocketDirectory\n"
        "print(SocketDirectory().path, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    theirs = Path(owner.stdout.readline().strip())
    (theirs / "engine-outputs").touch()
    SocketDirectory().close()
    assert theirs.is_dir(), "its owner lives"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    SocketDirectory().close()
    assert not theirs.exists()


def test_what_is_not_ours_or_not_old_enough_stays(temporary: Path) -> None:
    old, new = temporary / f"{PREFIX}old", temporary / f"{PREFIX}new"
    elsewhere, stranger, link = temporary / "elsewhere", temporary / "noria-else", temporary / f"{PREFIX}link"
    for directory in (old, new, elsewhere, stranger):
        directory.mkdir()
    link.symlink_to(elsewhere)
    (elsewhere / "lock").touch()
    (stranger / "lock").touch()
    os.utime(old, (time.time() - 3600,) * 2)
    remove_stale(temporary)
    assert not old.exists(), "a process that was killed before it had locked it"
    assert new.exists()
    assert (elsewhere / "lock").exists()
    assert (stranger / "lock").exists()
