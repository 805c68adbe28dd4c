"""From what a user typed to a path on this machine: `locate_model`. It fetches what must be fetched.

Called by `noria.files.sources` and, before anything heavy is imported, by `noria.server.start`. `check_model` finds the
usual slips in a name at once, for whoever would otherwise begin something before.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from noria.errors import ModelError, ModelFileError, UnsupportedError

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
    local = _local_path(model)
    if local is not None:
        _refuse_revision(revision, str(local))
        return Location(local, local.resolve().name if local.is_dir() else _SHARD_SUFFIX.sub("", local.stem))
    from noria.files.hub import snapshot_path

    name = os.fspath(model)
    report(f"Getting {name} from the Hugging Face hub or its cache")
    return Location(snapshot_path(name, revision), name)


def check_model(model: str | None, *, needs_text: bool = True) -> None:
    """Raises `ModelError` for a model that does not exist, cannot be read or is of no kind that is supported.

    `needs_text`: it must have a tokenizer. It takes no time: nothing is fetched, and only the first bytes are read.
    """
    path = None if model is None else _local_path(model)
    if path is not None and kind_of(path) == "huggingface" and needs_text:
        tokenizer_path(path)


def _local_path(model: str | os.PathLike[str]) -> Path | None:
    """What `model` names on this machine; None for a hub id. Raises `ModelError` if it is neither."""
    named = os.fspath(model)
    if not named:
        raise ModelError(f"the model's name is empty; give {KINDS}")
    path = Path(named).expanduser()
    try:
        if path.exists():
            return path
    except OSError as error:  # a directory on the way that cannot be entered
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    if isinstance(model, str) and _is_hub_id(model):
        return None
    raise ModelError(_no_such_path(named, path))


def kind_of(path: Path) -> Literal["gguf", "huggingface"]:
    """What a path holds, at first sight. Raises `ModelError`, which says what to name instead."""
    if path.is_dir():
        require_config(path)
        return "huggingface"
    if not path.is_file():
        raise UnsupportedError(f"{path} is neither a file nor a directory; a model is {KINDS}")
    try:
        with path.open("rb") as file:
            beginning = file.read(64)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    if beginning.startswith(b"GGUF"):  # by its content: blobs of download caches have no suffix
        return "gguf"
    if beginning.startswith(b"version https://git-lfs"):
        raise ModelFileError(f"{path} is a Git LFS pointer, not the file itself: fetch that with `git lfs pull`")
    if path.suffix.lower() == ".gguf":
        what = f"it begins with {beginning[:4]!r} instead of b'GGUF'" if beginning else "it is empty"
        raise ModelFileError(f"{path} is not a GGUF file: {what}; was it downloaded whole?")
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise UnsupportedError(f"{path} is one file of a model; name its directory: {path.parent}")
    raise UnsupportedError(f"{path} is not a GGUF file; supported are {KINDS}")


def require_config(directory: Path) -> Path:
    """The `config.json` of a model's directory. Raises `ModelFileError`."""
    path = directory / "config.json"
    if not path.is_file():
        raise ModelFileError(f"{directory} is not a model directory: config.json is missing{gguf_hint(directory)}")
    return path


def tokenizer_path(directory: Path) -> Path:
    """The `tokenizer.json` of a model's directory. Raises `ModelFileError`."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelFileError(
            f"{directory} has no tokenizer.json; if it has other tokenizer files, transformers can write it: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    return path


def gguf_hint(directory: Path) -> str:
    """The end of an error about a directory that may hold GGUF files, which are named one by one."""
    found = sorted(path.name for path in directory.glob("*.gguf"))
    return f"; to run the GGUF file in it, name the file: {directory / found[0]}" if found else ""


def _is_hub_id(name: str) -> bool:
    return bool(_HUB_ID.fullmatch(name)) and not name.lower().endswith(_FILE_SUFFIXES)


def _no_such_path(named: str, path: Path) -> str:
    message = f"there is no file or directory {named!r}"
    missing = next((parent for parent in reversed(path.absolute().parents) if not parent.exists()), None)
    if missing is not None:
        message += f" ({missing} does not exist)"
    else:
        message += _similar(path)
    return f"{message}; a model is {KINDS}"


def _similar(path: Path) -> str:
    """What beside a path that does not exist is called nearly so."""
    try:
        close = difflib.get_close_matches(path.name, [other.name for other in path.absolute().parent.iterdir()], n=1)
    except OSError:
        close = []
    return f" (did you mean {str(path.with_name(close[0]))!r}?)" if close else ""


def _refuse_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise ModelError(f"revision {revision!r} applies to models from the hub only, not to {what}")
