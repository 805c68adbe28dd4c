"""What is imported when: a quick command line, and layers that work where torch is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH_FREE_TESTS = [f"tests/{layer}" for layer in ("core", "kv", "text", "files")]


def run_python(code: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_importing_noria_and_asking_for_help_is_light() -> None:
    code = """
import sys
import noria
light = {"torch", "transformers", "numpy", "tokenizers", "cyclopts"} & set(sys.modules)
assert not light, light
from noria.cli.app import run
assert run(["--help"]) == 0
heavy = {"torch", "transformers", "scipy", "tokenizers", "gguf", "huggingface_hub"} & set(sys.modules)
assert not heavy, heavy
"""
    assert "generate" in run_python(code)


def test_every_layer_but_the_reference_executor_imports_without_torch() -> None:
    code = """
import importlib, pkgutil, sys
import noria
sys.modules["torch"] = sys.modules["transformers"] = None  # importing them raises
names = [module.name for module in pkgutil.walk_packages(noria.__path__, "noria.")]
free = [name for name in names if not name.startswith(("noria.ops.reference",)) and name != "noria.cli.__main__"]
for name in free:
    importlib.import_module(name)
print(len(free))
"""
    assert int(run_python(code)) > 40


@pytest.mark.timeout(900)  # it runs a third of all tests
def test_the_torch_free_layers_pass_their_tests_without_torch() -> None:
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--no-torch",
            "-m",
            "not full",
            "-p",
            "no:cacheprovider",
            *TORCH_FREE_TESTS,
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-4000:]
