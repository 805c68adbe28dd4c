"""What all tests share: where models come from, and a way to prove that the torch-free layers are free of torch.

    pytest --no-torch tests/core tests/kv tests/text tests/files

makes torch and transformers unimportable for the whole run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest

hypothesis.settings.register_profile("no-shrinking", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
"""For `scripts/mutations.py`, which only wants to know whether a test fails."""

BLOCKED = ("torch", "transformers")


class ImportBlocker:
    """Makes the modules of `BLOCKED` look as if they were not installed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked by --no-torch)", name=name)
        return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-torch", action="store_true", help="make torch and transformers unimportable")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-torch"):
        loaded = [name for name in BLOCKED if name in sys.modules]
        assert not loaded, f"{loaded} imported before any test"
        sys.meta_path.insert(0, ImportBlocker())  # type: ignore[arg-type]  # find_spec is all that the import system asks for


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF file, SmolLM2-135M-Instruct; fetched once into the user's cache."""
    from noria.files.sources import open_model

    return open_model(None).path


@pytest.fixture(scope="session")
def default_model_hf_directory(default_model_path: Path) -> Path:
    """The same weights as a Hugging Face directory in float32, written by transformers' own GGUF loader."""
    from support.models import hf_directory

    return hf_directory(default_model_path)


@pytest.fixture(scope="session")
def qwen_path() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct as GGUF: `$NORIA_TEST_QWEN_GGUF`, else fetched once. For tests marked `full`."""
    from support.models import qwen_gguf

    return qwen_gguf()


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma 3 270M as GGUF: `$NORIA_TEST_GEMMA_GGUF`, else fetched once. For tests marked `full`."""
    from support.models import gemma_gguf

    return gemma_gguf()


@pytest.fixture(scope="session")
def qwen_hf_directory(qwen_path: Path) -> Path:
    """The same weights as a Hugging Face directory in float32. For tests marked `full`."""
    from support.models import hf_directory

    return hf_directory(qwen_path)
