"""Shared by the end-to-end tests: weights that are loaded once, and the judge's answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.engines import Judged, LLMFactory, judge, llm_factory


@pytest.fixture(scope="session")
def judged(default_model_hf_directory: Path, new_llm: LLMFactory) -> Judged:
    return judge(default_model_hf_directory, new_llm())


@pytest.fixture(scope="session")
def new_llm(default_model_path: Path) -> LLMFactory:
    """Builds LLMs over the default model in float32; each takes the executor over from the one before."""
    return llm_factory(default_model_path, "float32")
