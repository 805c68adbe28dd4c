"""The engine's options: each defined once, with its type, default, help, aliases and environment variable.

`EngineOptions` is what a person sets (command line, environment, `noria.LLM(...)`); `SchedulerConfig` is
what the core works with after `noria.assembly` has looked at the model and the machine.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from noria.errors import OptionError

DTYPES = ("bfloat16", "float32")


def option(default: Any, help: str, *, aliases: tuple[str, ...] = ()) -> Any:
    """A dataclass field that also carries what a command line and a documentation row need.

    The flag is `--name-with-dashes`, the environment variable `NORIA_NAME_WITH_UNDERSCORES`.
    """
    return field(default=default, metadata={"help": help, "aliases": aliases})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a person may set about an engine. Raises `OptionError` when a value cannot be honoured."""

    dtype: str = option("bfloat16", "Precision of weights and activations: bfloat16 or float32.")
    device: str = option("cpu", "Where the model runs: cpu, cuda or cuda:N.")
    max_model_len: int | None = option(
        None, "Longest sequence, prompt and output together, in tokens. Default: what the model supports.",
        aliases=("--context-length", "--ctx-size"),
    )  # fmt: skip
    max_num_seqs: int = option(
        64, "Sequences that may be resident at once.", aliases=("--max-running-requests", "--parallel")
    )
    max_num_batched_tokens: int = option(
        512, "Token budget of one engine step, shared by prompt chunks and decodes.", aliases=("--max-prefill-tokens",)
    )
    block_size: int = option(16, "Tokens in one KV block.", aliases=("--page-size",))
    kv_cache_memory_bytes: int | None = option(
        None, "Memory for the KV pool. Default: the smaller of half of what is free and max-num-seqs full sequences."
    )
    num_kv_blocks: int | None = option(
        None, "Number of KV blocks, whatever memory they take.", aliases=("--num-gpu-blocks-override",)
    )
    enable_prefix_caching: bool = option(True, "Reuse the KV of prompts that begin alike.")
    seed: int = option(0, "Seed of the stream from which requests without a seed of their own get theirs.")
    threads: int | None = option(None, "Threads of the forward pass. Default: the cores this process may use.")

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise OptionError(f"dtype {self.dtype!r} is not supported; use one of {', '.join(DTYPES)}")
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name != "seed" and type(value) is int and value < 1:
                raise OptionError(f"{spec.name} must be at least 1, not {value}")

    @classmethod
    def from_names(cls, values: Mapping[str, Any]) -> Self:
        """Options by name, as `noria.LLM(..., name=value)` takes them; a name that does not exist is an OptionError."""
        known = [spec.name for spec in fields(cls)]
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"
                raise OptionError(f"there is no option {name!r}; {hint}")
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What a person may set about the HTTP server in front of an engine. Times in seconds."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for every one.")
    port: int = option(8000, "Port to listen on; 0 picks a free one.")
    served_model_name: tuple[str, ...] = option(
        (), "Name the model goes by in the API; repeatable, the first is the one it calls itself.", aliases=("--alias",)
    )
    max_num_queued_reqs: int = option(4096, "Sequences that may wait beyond those that run, before 503.")
    drain_s: float = option(30.0, "How long running requests may go on after SIGTERM.")
    health_stall_s: float = option(10.0, "Without a sign of life from the engine's loop for this long, /health is red.")
    max_stream_backlog: int = option(
        2048, "Tokens a client may fall behind in reading its stream before its request is aborted."
    )
    access_log: bool = option(False, "Log each HTTP request.")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise OptionError(f"port must be between 0 and 65535, not {self.port}")
        for name in ("drain_s", "health_stall_s"):
            if not getattr(self, name) >= 0:
                raise OptionError(f"{name} must not be negative, but is {getattr(self, name)}")
        if self.max_num_queued_reqs < 0:
            raise OptionError(f"max_num_queued_reqs must not be negative, but is {self.max_num_queued_reqs}")
        if self.max_stream_backlog < 1:
            raise OptionError(f"max_stream_backlog must be at least 1, not {self.max_stream_backlog}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits the scheduler works within. Lengths and budgets are in tokens.

    `max_model_len` never exceeds `num_blocks * block_size`: a request that is accepted fits into an empty pool.
    """

    max_model_len: int
    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int | None = None
    num_records_kept: int = 1024

    def __post_init__(self) -> None:
        if self.max_model_len > self.num_blocks * self.block_size:
            raise OptionError(
                f"max_model_len {self.max_model_len} does not fit into the KV pool of "
                f"{self.num_blocks} blocks x {self.block_size} tokens"
            )
