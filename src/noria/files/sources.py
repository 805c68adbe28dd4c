"""Where models come from: `open_model` turns what a person typed into an opened model.

Called by `noria.assembly` and by tests. The kinds of source: nothing (the default model), a GGUF file, a Hugging Face
directory, a hub id. It opens and checks files; it does not load weights.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from noria.errors import ModelError, UnsupportedError
from noria.files.default_model import default_model_path
from noria.files.gguf import GgufModel
from noria.files.hub import snapshot_path
from noria.files.huggingface import HuggingFaceModel
from noria.files.model import ModelFiles

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_FILE_SUFFIXES: Final = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".json", ".onnx")
_KINDS: Final = "a GGUF file, a directory with config.json and safetensors files, or a hub id such as org/name"


def report_to_stderr(message: str) -> None:
    """Prints one line of progress where it does not mix with results."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def open_model(
    model: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    report: Callable[[str], None] = report_to_stderr,
) -> ModelFiles:
    """Opens a model and checks that its files are present, whole and supported.

    `model` is a path to a GGUF file or to a Hugging Face directory, a hub id ("org/name", with `revision` if wanted),
    or None for the default model, which is fetched once. A path that exists wins over a hub id. `report` gets lines of
    progress for people. Raises ModelError (with its kinds ModelFileError and UnsupportedError).
    """
    if model is None:
        _refuse_revision(revision, "the default model")
        return GgufModel(default_model_path(report))
    named = os.fspath(model)
    if not named:
        raise ModelError(f"the model's name is empty; give {_KINDS}")
    path = Path(named).expanduser()
    if path.exists():
        _refuse_revision(revision, str(path))
        return _open_path(path)
    if isinstance(model, str) and _is_hub_id(model):
        report(f"Getting {model} from the Hugging Face hub or its cache")
        return HuggingFaceModel(snapshot_path(model, revision), name=model)
    raise ModelError(_no_such_path(named, path))


def _open_path(path: Path) -> ModelFiles:
    if path.is_dir():
        return HuggingFaceModel(path)
    if path.suffix.lower() == ".gguf" or _begins_like_gguf(path):
        return GgufModel(path)
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise UnsupportedError(f"{path} is one file of a model; name its directory: {path.parent}")
    raise UnsupportedError(f"{path} is not a GGUF file; supported are {_KINDS}")


def _begins_like_gguf(path: Path) -> bool:
    """Blobs of download caches have no suffix."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error


def _is_hub_id(name: str) -> bool:
    return bool(_HUB_ID.fullmatch(name)) and not name.lower().endswith(_FILE_SUFFIXES)


def _no_such_path(named: str, path: Path) -> str:
    message = f"there is no file or directory {named!r}"
    missing = next((parent for parent in reversed(path.absolute().parents) if not parent.exists()), None)
    if missing is not None:
        message += f" ({missing} does not exist)"
    return f"{message}; a model is {_KINDS}"


def _refuse_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise ModelError(f"revision {revision!r} applies to models from the hub only, not to {what}")
