"""Builds an engine for a model and its options: the one place that joins files, text, runner and core.

Used by `noria.llm`, `noria.bench` and the engine process of `noria.server`. It decides nothing itself: what fits
where is computed by the parts it calls, and said in the log.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from noria.config import EngineOptions, SchedulerConfig
from noria.core.policies import find_policy
from noria.core.scheduler import Scheduler
from noria.engine.client import EngineClient, InProcessClient
from noria.engine.core import EngineCore
from noria.files.generation import describe_defaults, sampling_defaults
from noria.files.model import ModelFiles
from noria.files.sources import open_model
from noria.logs import LOADING
from noria.ops.executors import create_executor
from noria.runner.executor import Executor
from noria.runner.kv_memory import free_memory_bytes, longest_wanted, size_kv_pool
from noria.runner.runner import ModelRunner
from noria.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)
loading = logging.getLogger(LOADING)

PROGRESS_S = 1.0
"""Between two lines about a model that is being loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """An engine in this process, and the parts of it that a front needs."""

    files: ModelFiles
    tokenizer: Tokenizer
    options: EngineOptions
    core: EngineCore
    client: EngineClient
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """What requests get that do not say otherwise, by the names of `SamplingParams`."""

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return self.core.scheduler.config


def build_engine(
    model: str | os.PathLike[str] | None,
    options: EngineOptions,
    *,
    wrap: Callable[[Executor], Executor] = lambda executor: executor,
) -> Assembled:
    """Opens the model (None: the default one), loads it and sizes its memory. Raises OptionError and ModelError.

    `wrap` may put something around the executor that watches it.
    """
    started_s = time.monotonic()
    find_policy(options.scheduling_policy)  # a mistake should be told before a model is loaded
    files = open_model(model, report=loading.info)
    num_bytes = sum(file.stat().st_size for file in {tensor.file for tensor in files.tensors.values()})
    loading.info("loading %s (%s)", files.name, f"{num_bytes / 1e6:,.0f} MB")
    longest_wanted(options, files.config.max_position_embeddings)  # likewise
    tokenizer = load_tokenizer(files.tokenizer)
    defaults = sampling_defaults(files, options.generation_config)
    executor = wrap(create_executor(files, options, report=_now_and_then(loading.info)))
    assembled = replace(join(files, tokenizer, executor, options), sampling_defaults=defaults)
    logger.info("%s", describe_defaults(files, defaults))
    took_s = time.monotonic() - started_s
    loading.info("%s is ready after %.1f s (%s on %s)", files.name, took_s, options.dtype, options.device)
    return assembled


def build_core(model: str, options: EngineOptions, report: Callable[[str], None]) -> EngineCore:
    """The engine alone, for a process of its own, which has no use for text; `report` is told how it goes."""
    files = open_model(model, report=report)
    longest_wanted(options, files.config.max_position_embeddings)  # a mistake should be told before weights are loaded
    executor = create_executor(files, options, report=_now_and_then(report))
    return join_core(files, executor, options)


def _now_and_then(say: Callable[[str], None]) -> Callable[[int, int], None]:
    """Turns (done, total) of a load into lines, at least `PROGRESS_S` apart: what loads sooner needs none."""
    said_s = time.monotonic()

    def note(done: int, total: int) -> None:
        nonlocal said_s
        now_s = time.monotonic()
        if now_s - said_s >= PROGRESS_S:
            said_s = now_s
            say(f"loading weights: {done * 100 // max(1, total)} %")

    return note


def join(files: ModelFiles, tokenizer: Tokenizer, executor: Executor, options: EngineOptions) -> Assembled:
    """An engine around a loaded model, and what a front needs beside it. The executor serves one engine at a time."""
    core = join_core(files, executor, options)
    return Assembled(files=files, tokenizer=tokenizer, options=options, core=core, client=InProcessClient(core))


def join_core(files: ModelFiles, executor: Executor, options: EngineOptions) -> EngineCore:
    """Sizes the KV pool and joins runner and scheduler around a loaded model."""
    free_bytes = executor.free_device_bytes
    pool = size_kv_pool(
        options,
        model_max_len=files.config.max_position_embeddings,
        kv_bytes_per_token=executor.kv_bytes_per_token,
        kv_windows=executor.kv_windows,
        free_bytes=free_memory_bytes() if free_bytes is None else free_bytes,
    )
    logger.log(logging.WARNING if pool.is_beyond_memory else logging.INFO, "%s", pool.explanation)
    executor.set_max_model_len(pool.max_model_len)  # not what was asked for: the pool may have less room
    config = SchedulerConfig.of(
        options,
        max_model_len=pool.max_model_len,
        num_blocks=pool.num_blocks,
        kv_windows=executor.kv_windows,
        eos_token_ids=files.eos_token_ids,
        vocab_size=files.config.vocab_size,
    )
    runner = ModelRunner(
        executor,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        windows=config.kv_windows,
        vocab_size=config.vocab_size,
    )
    return EngineCore(Scheduler(config), runner, seed=options.seed)
