"""From what a user typed to a path on this machine: `locate_model`. It fetches what must be fetched, and opens nothing.

Called by `noria.files.sources` and, before anything heavy is imported, by `noria.server.start`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from noria.errors import ModelError

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_SHARD_SUFFIX: Final = re.compile(r"-\d{5}-of-\d{5}$")
_FILE_SUFFIXES: Final = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".json", ".onnx")
KINDS: Final = "a GGUF file, a directory with config.json and safetensors files, or a hub id such as org/name"


@dataclass(frozen=True, slots=True)
class Location:
    """Where a model is. `name` is what people call it: the file's stem, the directory's name or the hub id."""

    path: Path
    name: str


def report_to_stderr(message: str) -> None:
    """Prints one line of progress where it does not mix with results."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def locate_model(
    model: str | os.PathLike[str] | None, *, revision: str | None = None, report: Callable[[str], None]
) -> Location:
    """The file or directory of a model, fetched into a cache if it is not there; see `noria.files.sources.open_model`.

    Raises `ModelError`.
    """
    if model is None:
        from noria.files.default_model import default_model_path

        _refuse_revision(revision, "the default model")
        path = default_model_path(report)
        return Location(path, path.stem)
    named = os.fspath(model)
    if not named:
        raise ModelError(f"the model's name is empty; give {KINDS}")
    path = Path(named).expanduser()
    if path.exists():
        _refuse_revision(revision, str(path))
        return Location(path, path.resolve().name if path.is_dir() else _SHARD_SUFFIX.sub("", path.stem))
    if isinstance(model, str) and _is_hub_id(model):
        from noria.files.hub import snapshot_path

        report(f"Getting {model} from the Hugging Face hub or its cache")
        return Location(snapshot_path(model, revision), model)
    raise ModelError(_no_such_path(named, path))


def _is_hub_id(name: str) -> bool:
    return bool(_HUB_ID.fullmatch(name)) and not name.lower().endswith(_FILE_SUFFIXES)


def _no_such_path(named: str, path: Path) -> str:
    message = f"there is no file or directory {named!r}"
    missing = next((parent for parent in reversed(path.absolute().parents) if not parent.exists()), None)
    if missing is not None:
        message += f" ({missing} does not exist)"
    return f"{message}; a model is {KINDS}"


def _refuse_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise ModelError(f"revision {revision!r} applies to models from the hub only, not to {what}")
