"""Tokenizers of the test models, built once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from noria.files.model import TokenizerFiles
from noria.files.sources import open_model
from noria.text.tokenizer import Tokenizer, load_tokenizer

# How long an example takes depends on what else the machine does.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


@pytest.fixture(scope="session")
def smollm2_files(default_model_path: Path) -> TokenizerFiles:
    return open_model(default_model_path).tokenizer


@pytest.fixture(scope="session")
def smollm2(smollm2_files: TokenizerFiles) -> Tokenizer:
    return load_tokenizer(smollm2_files)


@pytest.fixture(scope="session")
def qwen_files(qwen_path: Path) -> TokenizerFiles:
    return open_model(qwen_path).tokenizer
