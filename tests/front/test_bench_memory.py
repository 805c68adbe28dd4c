"""The memory of a process and its children, as the start-up benchmark counts it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from noria.bench.memory import PeakMemory, process_tree, pss_bytes

if not Path("/proc/self/smaps_rollup").exists():
    pytest.skip("this system does not tell the PSS of a process", allow_module_level=True)

MIB = 2**20
CHILD = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, flags=getattr(mmap, sys.argv[3]), prot=mmap.PROT_READ)
pages = sum(mapped[i] for i in range(0, len(mapped), 4096))
block = b"x" * (int(sys.argv[2]) << 20)
print("there", flush=True)
sys.stdin.readline()
del block
print("gone", flush=True)
sys.stdin.readline()
"""
PARENT = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', *sys.argv[1:]]))"


@pytest.mark.parametrize("how", ["MAP_SHARED", "MAP_PRIVATE"])
def test_the_peak_of_a_child_is_seen_and_its_model_file_apart(tmp_path: Path, how: str) -> None:
    """The model is a link into a cache whose files have no suffix; what is mapped as a library is, is none."""
    blob, path = tmp_path / "blobs 1" / "8e4f", tmp_path / "model.safetensors"
    blob.parent.mkdir()
    blob.write_bytes(bytes(20 * MIB))
    path.symlink_to(blob)
    command = [sys.executable, "-c", PARENT, CHILD, str(path), "50", how]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with PeakMemory(process.pid) as memory:
            assert process.stdout.readline() == "there\n"
            assert len(list(process_tree(process.pid))) == 2
            at_most = sum(pss_bytes(pid)[0] for pid in process_tree(process.pid))
            time.sleep(0.2)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "gone\n"
        process.stdin.write("\n")
        process.stdin.flush()
    model_mib = 20 if how == "MAP_SHARED" else 0
    assert memory.peak_model_file_bytes == pytest.approx(model_mib * MIB, abs=MIB)
    assert memory.peak_bytes == pytest.approx(at_most, rel=0.05)
    assert 50 + 20 - model_mib <= memory.peak_bytes / MIB <= 50 + 20 - model_mib + 40


def test_a_process_that_has_ended_takes_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert pss_bytes(process.pid) == (0, 0)
    assert list(process_tree(process.pid)) == [process.pid]
