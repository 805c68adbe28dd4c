"""Models by hub id, through huggingface-hub: `snapshot_path`.

Called by `noria.files.sources.open_model`. Cache, authentication, mirrors and offline mode are that library's, with its
own environment variables (`HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`). It is imported only here and only
when needed: that takes a quarter of a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from noria.errors import ModelError

_WANTED: Final = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model*.safetensors",
    "model.safetensors.index.json",
]
_SUBFOLDERS: Final = ["*/*"]
"""Other copies of the weights (`original/`, `onnx/`) lie in folders; a pattern's `*` would match the slash too."""


def snapshot_path(repo_id: str, revision: str | None) -> Path:
    """The local directory with the files of a repository, downloaded first if they are not in the hub's cache.

    Raises ModelError with the fix for what went wrong.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=_WANTED, ignore_patterns=_SUBFOLDERS))
    except Exception as error:  # the library's own errors, and those of whatever HTTP client it uses this year
        raise ModelError(f"cannot get model {repo_id!r} from the Hugging Face hub: {_explain(error)}") from error


def _explain(error: Exception) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "access to it is restricted; accept its terms on its page, then run `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "no such repository, or it is private (then run `hf auth login` or set HF_TOKEN). "
            "If a local directory was meant, it does not exist; begin its name with ./ to make that clear"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return "it has no such revision; name a branch, a tag or a commit"
    if isinstance(error, errors.LocalEntryNotFoundError):
        if constants.HF_HUB_OFFLINE:
            return (
                "HF_HUB_OFFLINE is set and the cache does not hold all of it; unset it, or download the model first "
                "(`hf download`), or name a local path"
            )
        return f"the hub cannot be reached, and the cache does not hold it; check the network ({_first_line(error)})"
    if isinstance(error, OSError) and not isinstance(error, errors.HfHubHTTPError) and error.strerror:
        return f"{error.strerror} ({error.filename or 'writing to the cache'}); HF_HOME says where the cache is"
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
