"""How much memory a server takes: `PeakMemory` samples a process and its children while they run. Linux only.

PSS (proportional set size) counts a page that several processes share once, in parts. Pages of the model's file are
counted apart: the system can drop them at any time, and reads them again when they are needed. They are known by how
they are mapped, shared and read-only (code and libraries are mapped privately), and not by the file's name: a download
cache keeps its files under their hashes, and the system tells that name, not the link's.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

SAMPLE_S = 0.02
_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ")
_MODEL_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ r--s .* /", re.MULTILINE)


class PeakMemory:
    """Within the block, the greatest sum of all processes' PSS at one moment, in bytes."""

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        """Without the pages of mapped model files. 0 where the system does not tell."""
        self.peak_model_file_bytes = 0
        """Of those pages, at their own moment."""
        self._pid = pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            samples = [pss_bytes(pid) for pid in process_tree(self._pid)]
            self.peak_bytes = max(self.peak_bytes, sum(own for own, _ in samples))
            self.peak_model_file_bytes = max(self.peak_model_file_bytes, sum(mapped for _, mapped in samples))


def process_tree(pid: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text()
        except OSError:  # it has ended
            continue
        for child in children.split():
            yield from process_tree(int(child))


def pss_bytes(pid: int) -> tuple[int, int]:
    """A process's PSS in bytes: of everything but mapped model files, and of those. Zeros for one that has ended."""
    try:
        total = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
        # Only a process that maps a model needs the long list, which takes milliseconds.
        mapped = _model_pages_kb(pid) if _maps_model(pid) else 0
    except OSError:
        return 0, 0
    return (0 if total is None else int(total[1]) - mapped) * 1024, mapped * 1024


def _maps_model(pid: int) -> bool:
    return _MODEL_MAPPING.search(Path(f"/proc/{pid}/maps").read_text()) is not None


def _model_pages_kb(pid: int) -> int:
    is_model, total = False, 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if _MAPPING.match(line):
            is_model = _MODEL_MAPPING.match(line) is not None
        elif is_model and line.startswith("Pss:"):
            total += int(line.split()[1])
    return total
