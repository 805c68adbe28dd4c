"""How much memory this process may still use: the machine's, or less when it is in a container.

Called by `noria.assembly` before the KV pool is sized. Reads Linux's /proc and the control groups of both versions.
Not covered: resource limits (ulimit), and other systems, where physical memory stands in for what is free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def free_memory_bytes(root: Path = _ROOT) -> int:
    """Bytes that can be allocated without swapping or hitting a limit, at this moment.

    The smallest of the kernel's MemAvailable and what each memory control group from this process's own up to the
    root has left. `root` is where /proc and /sys hang, for tests.
    """
    available = _mem_available(root)
    return max(0, min([available, *_cgroup_rooms(root)]))


def _mem_available(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    return 1024 * kib.get("MemAvailable", kib.get("MemFree", 0))


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Bytes left under each limit that applies to this process."""
    for version, directory in _cgroup_directories(root):
        room = _room_v2(directory) if version == 2 else _room_v1(directory)
        if room is not None:
            yield room


def _cgroup_directories(root: Path) -> Iterator[tuple[int, Path]]:
    """(version, directory) of this process's memory control group and of each ancestor that is visible here."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = list(_cgroup_mounts((root / "proc/self/mountinfo").read_text().splitlines()))
    except OSError:
        return
    for line in memberships:  # "hierarchy:controllers:path"; version 2 is "0::path"
        hierarchy, controllers, path = line.split(":", 2)
        version = 2 if hierarchy == "0" and not controllers else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        for mount_version, mount_root, mount_point in mounts:
            if mount_version == version:
                yield from ((version, root / d.relative_to("/")) for d in _upwards(path, mount_root, mount_point))


def _cgroup_mounts(mountinfo: list[str]) -> Iterator[tuple[int, PurePosixPath, PurePosixPath]]:
    """(version, root within the hierarchy, mount point) of version 2 and of version 1's memory controller."""
    for line in mountinfo:
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), [*after.split(), "", "", ""][:3]
        if kind == "cgroup2":
            yield 2, PurePosixPath(fields[3]), PurePosixPath(fields[4])
        elif kind == "cgroup" and "memory" in options.split(","):
            yield 1, PurePosixPath(fields[3]), PurePosixPath(fields[4])


def _upwards(path: str, mount_root: PurePosixPath, mount_point: PurePosixPath) -> Iterator[PurePosixPath]:
    """The directories from the group `path` up to the mount point; only the latter if the path is not below it."""
    try:
        below = PurePosixPath(path).relative_to(mount_root)
    except ValueError:
        below = PurePosixPath(".")
    if ".." in below.parts:  # outside this process's cgroup namespace
        below = PurePosixPath(".")
    directory = mount_point / below
    while directory != mount_point:
        yield directory
        directory = directory.parent
    yield mount_point


def _room_v2(directory: Path) -> int | None:
    limits = [_number(directory / name) for name in ("memory.max", "memory.high")]
    used = _number(directory / "memory.current")
    known = [limit for limit in limits if limit is not None]
    if not known or used is None:
        return None
    return min(known) - used + _reclaimable(directory, "inactive_file")


def _room_v1(directory: Path) -> int | None:
    limit = _number(directory / "memory.limit_in_bytes")
    used = _number(directory / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    return limit - used + _reclaimable(directory, "total_inactive_file")


def _reclaimable(directory: Path, name: str) -> int:
    """Page cache counts as used but is given back under pressure, model files that were read among it."""
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)


def _number(path: Path) -> int | None:
    """The number in a control file; None when there is no such file or it says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
