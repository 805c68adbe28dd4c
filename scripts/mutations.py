#!/usr/bin/env python3
"""Plants faults in the scheduler and KV memory, one at a time: the tests of tests/core and tests/kv must catch each.

    python scripts/mutations.py [NAME ...]    all faults, or those named; exit status 1 if one survives

Each fault (`planted_faults.py`) is applied to a copy of src; the checkout is not touched. The tests run until the
first failure, the quick files first. Golden plans take no part: they notice any change, right or wrong, and would
hide that no test knows the promise.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from planted_faults import FAULTS, Fault

ROOT = Path(__file__).parent.parent
LEFT_OUT = {"test_golden_plans.py", "test_planted_faults.py"}
LAST = [
    "test_allocation_failures.py", "test_manager_machine.py", "test_fairness.py", "test_state_machine.py",
    "test_soak.py", "test_exploration.py",
]  # fmt: skip
"""Test files that take longer, in the order in which they are run after the others."""
TIMEOUT_S = 600
RUN_WITH_COPY = """
import sys
# An editable installation finds the checkout before anything on PYTHONPATH.
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
import noria, pytest
source = sys.argv[1]
if not noria.__file__.startswith(source):
    raise SystemExit(f"the tests would not see the copy in {source}, but {noria.__file__}")
sys.exit(pytest.main(sys.argv[2:]))
"""


def main(names: list[str]) -> int:
    if unknown := set(names) - {fault.name for fault in FAULTS}:
        say(f"there is no fault {', '.join(sorted(unknown))}")
        return 2
    faults = [fault for fault in FAULTS if not names or fault.name in names]
    survivors = []
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        say("without a fault ...")
        failure, seconds = failing_test(source)
        if failure is not None:
            say(f"the tests fail without any fault: {failure}")
            return 2
        say(f"{'':36} all tests pass ({seconds:.0f} s)")
        for fault in faults:
            with planted(fault, source):
                failure, seconds = failing_test(source)
            say(f"{fault.name:36} {failure or f'SURVIVES: {fault.story}'} ({seconds:.0f} s)")
            if failure is None:
                survivors.append(fault.name)
    say(f"{len(faults) - len(survivors)} of {len(faults)} faults caught")
    return 1 if survivors else 0


class planted:
    """A context in which the copy at `source` has the fault."""

    def __init__(self, fault: Fault, source: Path) -> None:
        self._fault = fault
        self._path = source / "noria" / fault.file

    def __enter__(self) -> None:
        self._text = self._path.read_text(encoding="utf-8")
        self._path.write_text(with_fault(self._fault, self._text), encoding="utf-8")

    def __exit__(self, *error: object) -> None:
        self._path.write_text(self._text, encoding="utf-8")


def with_fault(fault: Fault, text: str) -> str:
    if (count := text.count(fault.old)) != 1:
        raise SystemExit(f"{fault.name}: its text is found {count} times in {fault.file}, not once:\n{fault.old}")
    return text.replace(fault.old, fault.new)


def test_files() -> list[Path]:
    files = [f for part in ("kv", "core") for f in sorted((ROOT / "tests" / part).glob("test_*.py"))]
    kept = [f for f in files if f.name not in LEFT_OUT]
    return sorted(kept, key=lambda f: LAST.index(f.name) if f.name in LAST else -1)


def failing_test(source: Path) -> tuple[str | None, float]:
    """The first test that fails with the package at `source`, if any, and the seconds that took."""
    environment = os.environ | {
        "PYTHONPATH": str(source),
        "PYTHONDONTWRITEBYTECODE": "1",  # a cached module could outlive a fault of the same size and second
        "HYPOTHESIS_STORAGE_DIRECTORY": str(source.parent / "hypothesis"),
    }
    command = [
        sys.executable, "-c", RUN_WITH_COPY, str(source), "-x", "-q", "-m", "not full", "-p", "no:cacheprovider",
        "--tb=no", "--timeout=120", "--hypothesis-seed=0", "--hypothesis-profile=no-shrinking", *map(str, test_files()),
    ]  # fmt: skip
    start = time.monotonic()
    try:
        run = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end after {TIMEOUT_S} s", time.monotonic() - start
    seconds = time.monotonic() - start
    if run.returncode == 0:
        return None, seconds
    found = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
    if run.returncode == 1 and found:
        return found[1], seconds
    if found:  # a test file cannot even be imported: the fault is none that a person would commit
        raise SystemExit(f"{found[1]} could not be run:\n{run.stdout}{run.stderr}")
    raise SystemExit(f"pytest gave up ({run.returncode}):\n{run.stdout}{run.stderr}")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
