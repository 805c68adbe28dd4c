"""Makes the executor that a model runs on: `create_executor`. Called by `noria.assembly`.

Imports an executor's own needs only when it is chosen, so that this module loads without torch and without native code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from noria.config import EngineOptions
from noria.errors import OptionError
from noria.files.model import ModelFiles
from noria.runner.executor import Executor

if TYPE_CHECKING:
    from noria.ops.native import NativeExecutor
    from noria.ops.reference import TorchExecutor

logger = logging.getLogger(__name__)

Report = Callable[[int, int], None]


def create_executor(model: ModelFiles, options: EngineOptions, *, report: Report | None = None) -> Executor:
    """The executor that `options.executor` names; for "auto" the native one wherever it can run, else torch.

    `report(done, total)` is called while weights load. Raises `OptionError` saying what to change or to install, and
    `ModelError` for the model's faults.
    """
    match options.executor:
        case "native":
            return _native(model, options, report)
        case "torch":
            return _torch(model, options, report)
    why_not = _why_not_native(model, options)
    if why_not is None:
        return _native(model, options, report)
    logger.info("not on the native executor: %s", why_not)
    try:
        return _torch(model, options, report)
    except OptionError as error:
        if "PyTorch" not in str(error):
            raise
        raise OptionError(f"{why_not}; and {error}") from error


def _why_not_native(model: ModelFiles, options: EngineOptions) -> str | None:
    """What keeps the native executor from being used, or None."""
    from noria.ops.native import why_unavailable

    if options.device != "cpu":
        return f"the native executor runs on cpu, not on {options.device}"
    return why_unavailable(options.block_size, model.config.head_dim)


def _native(model: ModelFiles, options: EngineOptions, report: Report | None) -> NativeExecutor:
    from noria.ops.native import NativeExecutor, num_cores

    if (why_not := _why_not_native(model, options)) is not None:
        raise OptionError(f"{why_not}; executor=torch runs without it")
    executor = NativeExecutor(
        model,
        dtype=options.dtype,
        threads=options.threads,
        prefault_kv=options.prefault_kv_cache,
        report=report,
    )
    logger.info("native executor: %s, %s, %d threads", options.dtype, executor.kernel, executor.num_threads)
    if executor.num_threads > num_cores():
        logger.warning(
            "there are %d threads for %d cores: they will wait for each other", executor.num_threads, num_cores()
        )
    return executor


def _torch(model: ModelFiles, options: EngineOptions, report: Report | None) -> TorchExecutor:
    try:
        from noria.ops.reference import TorchExecutor
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        raise OptionError(
            'the torch executor needs PyTorch, which is not installed: pip install "noria[torch]", '
            'or in a checkout pip install ".[torch]"'
        ) from error
    executor = TorchExecutor(
        model,
        dtype=options.dtype,
        device=options.device,
        threads=options.threads,
        report=report,
    )
    logger.info("torch executor: %s on %s", options.dtype, options.device)
    return executor
