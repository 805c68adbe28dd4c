"""Free memory read from made-up /proc and /sys trees: bare machine, both kinds of control groups, odd mounts."""

from __future__ import annotations

from pathlib import Path

from noria.runner.free_memory import free_memory_bytes

MIB = 2**20
MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000 kB\nMemAvailable:    8192 kB\nHugePages_Total:       0\n"
V2_MOUNT = "31 23 0:27 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
OTHER_MOUNTS = "22 1 8:1 / / rw - ext4 /dev/root rw\n32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"


def machine(root: Path, *, cgroup: str = "", mounts: str = "", files: dict[str, str] | None = None) -> Path:
    content = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, "proc/self/mountinfo": OTHER_MOUNTS + mounts}
    for name, text in (content | (files or {})).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(group: str, limit: str, used: int, stat: str = "", high: str = "max") -> dict[str, str]:
    where = f"sys/fs/cgroup/{group}".rstrip("/")
    return {
        f"{where}/memory.max": f"{limit}\n",
        f"{where}/memory.high": f"{high}\n",
        f"{where}/memory.current": f"{used}\n",
        f"{where}/memory.stat": stat,
    }


def test_a_bare_machine_has_what_the_kernel_says(tmp_path: Path) -> None:
    assert free_memory_bytes(machine(tmp_path)) == 8 * MIB


def test_v2_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    files = v2("a/b", "max", MIB) | v2("a", str(6 * MIB), 3 * MIB) | v2("", "max", 9 * MIB)
    root = machine(tmp_path, cgroup="0::/a/b\n", mounts=V2_MOUNT.format(root="/"), files=files)
    assert free_memory_bytes(root) == 3 * MIB


def test_v2_page_cache_is_given_back_and_high_is_a_limit_too(tmp_path: Path) -> None:
    files = v2("a", str(6 * MIB), 3 * MIB, stat=f"anon 5\ninactive_file {MIB}\n", high=str(5 * MIB))
    root = machine(tmp_path, cgroup="0::/a\n", mounts=V2_MOUNT.format(root="/"), files=files)
    assert free_memory_bytes(root) == 3 * MIB


def test_v2_in_a_container_with_its_own_namespace(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/\n", mounts=V2_MOUNT.format(root="/"), files=v2("", str(4 * MIB), MIB))
    assert free_memory_bytes(root) == 3 * MIB


def test_v2_a_group_outside_the_namespace_is_read_at_the_mount(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/../other\n", mounts=V2_MOUNT.format(root="/"), files=v2("", str(4 * MIB), MIB))
    assert free_memory_bytes(root) == 3 * MIB


def test_v1_beside_an_empty_v2(tmp_path: Path) -> None:
    where = "sys/fs/cgroup/memory/jobs/7"
    files = {
        f"{where}/memory.limit_in_bytes": f"{5 * MIB}\n",
        f"{where}/memory.usage_in_bytes": f"{4 * MIB}\n",
        f"{where}/memory.stat": f"inactive_file 1\ntotal_inactive_file {MIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{4 * MIB}\n",
    }
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    cgroup = "4:memory:/jobs/7\n2:cpuacct:/\n0::/\n"
    root = machine(tmp_path, cgroup=cgroup, mounts=V1_MOUNT.format(root="/") + unified, files=files)
    assert free_memory_bytes(root) == 2 * MIB


def test_v1_in_a_container_that_sees_its_group_as_the_mounts_root(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{5 * MIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{4 * MIB}\n",
    }
    root = machine(tmp_path, cgroup="4:memory:/docker/abc\n", mounts=V1_MOUNT.format(root="/docker/abc"), files=files)
    assert free_memory_bytes(root) == MIB


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/\n", mounts=V2_MOUNT.format(root="/"), files=v2("", str(MIB), 2 * MIB))
    assert free_memory_bytes(root) == 0


def test_without_proc_physical_memory_stands_in(tmp_path: Path) -> None:
    assert free_memory_bytes(tmp_path) > 0


def test_this_machine_has_some() -> None:
    assert free_memory_bytes() > 16 * MIB
