"""Where models come from: `open_model` turns what a person typed into an opened model.

Called by `noria.assembly` and by tests. The kinds of source: nothing (the default model), a GGUF file, a Hugging Face
directory, a hub id. It opens and checks files; it does not load weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from noria.files.gguf import GgufModel
from noria.files.huggingface import HuggingFaceModel
from noria.files.locate import kind_of, locate_model, report_to_stderr
from noria.files.model import ModelFiles


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
    location = locate_model(model, revision=revision, report=report)
    return _open_path(location.path, location.name)


def _open_path(path: Path, name: str) -> ModelFiles:
    return HuggingFaceModel(path, name=name) if kind_of(path) == "huggingface" else GgufModel(path, name=name)
