"""Makes the executor that a model runs on: `create_executor`. Called by `noria.assembly`.

Imports an executor's own needs only when it is chosen, so that this module loads without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from noria.errors import OptionError
from noria.files.model import ModelFiles

if TYPE_CHECKING:
    from noria.ops.reference import TorchExecutor


def create_executor(
    model: ModelFiles,
    *,
    dtype: str,
    device: str = "cpu",
    threads: int | None = None,
    report: Callable[[int, int], None] | None = None,
) -> TorchExecutor:
    """A `TorchExecutor` (see there). Raises `OptionError` saying what to install when torch is missing."""
    try:
        from noria.ops.reference import TorchExecutor
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        raise OptionError(
            'running a model needs PyTorch, which is not installed: pip install "noria[torch]", '
            'or in a checkout pip install ".[torch]"'
        ) from error
    return TorchExecutor(model, dtype=dtype, device=device, threads=threads, report=report)
