"""The engine's options: each defined once, with its type, default, help, aliases and environment variable.

`EngineOptions` is what a person sets (command line, environment, `noria.LLM(...)`); `SchedulerConfig` is
what the core works with after `noria.assembly` has looked at the model and the machine.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Self

from noria.errors import OptionError
from noria.kv_layout import KVLayout
from noria.typed_fields import mistyped

DTYPES = ("bfloat16", "float32")
EXECUTORS = ("auto", "native", "torch")
GENERATION_CONFIGS = ("auto", "none")
MOST_THREADS = 256


def option(default: Any, help: str, *, value: str = "", aliases: tuple[str, ...] = (), is_secret: bool = False) -> Any:
    """A dataclass field that also carries what a command line and a documentation row need.

    The flag is `--name-with-dashes`, the environment variable `NORIA_NAME_WITH_UNDERSCORES`. `value` is what stands
    for its value there (see `value_name`); a SIZE, of tokens, blocks or bytes, may have a unit on the command line. A
    secret is left out wherever options are shown.
    """
    metadata = {"help": help, "value": value, "aliases": aliases, "is_secret": is_secret}
    return field(default=default, repr=not is_secret, metadata=metadata)


def value_name(spec: Field[Any]) -> str:
    """What stands for an option's value where it is described: INT, SIZE, SECONDS, PATH, ...; nothing for a switch."""
    if spec.metadata["value"] or "bool" in str(spec.type):
        return str(spec.metadata["value"])
    if "float" in str(spec.type):
        return "SECONDS" if spec.name.endswith("_s") else "FLOAT"
    return "INT" if "int" in str(spec.type) else "TEXT"


def shown_default(name: str, default: Any) -> str:
    """An option's default as a person would write it; empty where there is none."""
    if default in ((), None, ""):
        return ""
    if name.endswith("_bytes"):
        return f"{default // 2**20}MiB"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _check_types(options: Any) -> None:
    """Raises `OptionError` for the first field of a dataclass whose value is not what it is declared to be."""
    specs = fields(options)
    values = ((spec.name, getattr(options, spec.name)) for spec in specs)
    for _, message in mistyped(values, {spec.name: str(spec.type) for spec in specs}):
        raise OptionError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions:
    """How requests share steps and memory: set by a person, obeyed by the scheduler. In tokens and seconds."""

    max_num_seqs: int = option(
        64, "Sequences that may be resident at once.", aliases=("--max-running-requests", "--parallel")
    )
    max_num_batched_tokens: int = option(
        512,
        "Token budget of one engine step, shared by prompt chunks and decodes.",
        value="SIZE",
        aliases=("--max-prefill-tokens",),
    )
    block_size: int = option(16, "Tokens in one KV block.", value="SIZE", aliases=("--page-size",))
    enable_prefix_caching: bool = option(True, "Reuse the KV of prompts that begin alike.")
    enable_chunked_prefill: bool = option(
        True, "Let a prompt run over several steps. Without, a step's budget must hold a whole sequence."
    )
    long_prefill_token_threshold: int = option(
        0, "Longest chunk of one prompt in a step while other requests are there; 0 for no such limit.", value="SIZE"
    )
    max_prefill_share: float = option(
        0.5,
        "Share of a step that long prompts may take together while others could use the rest (0 to 1).",
        value="SHARE",
    )
    scheduling_policy: str = option(
        "fcfs",
        "Who is served next: fcfs, priority, lpm (longest cached prefix), fair (token shares per tenant), or "
        "package.module:Class.",
        value="POLICY",
        aliases=("--schedule-policy",),
    )
    priority_aging_s: float = option(
        60.0,
        "Policy priority: waiting this long makes a request as urgent as the next class of new ones. A very large "
        "number for strict classes.",
    )
    lpm_max_overtakes: int = option(32, "Policy lpm: how many later arrivals may go before a request.")
    lpm_window: int = option(128, "Policy lpm: how many waiting requests are compared.")
    fair_prompt_weight: int = option(1, "Policy fair: what a computed prompt token counts.")
    fair_output_weight: int = option(2, "Policy fair: what a generated token counts.")
    reserve_full_sequence: bool = option(
        True, "Admit a request only when its whole sequence fits, not only its first chunk.",
        aliases=("--scheduler-reserve-full-isl",),
    )  # fmt: skip
    watermark: float = option(
        0.0, "Share of KV blocks that newcomers must leave free while others run (0 to 1).", value="SHARE"
    )
    adaptive_watermark: bool = option(
        True, "After preemptions leave more blocks free, and fewer again while there are none."
    )
    max_preemptions: int = option(3, "A request preempted this often is the last of its class to be chosen again.")
    admission_lookahead: int = option(
        8, "Requests that may be looked at, and admitted, past one that waits for KV blocks; 0 for none."
    )
    lookahead_age_limit_s: float = option(1.0, "Nobody goes past a request that has waited this long for KV blocks.")
    max_num_queued_reqs: int = option(
        4096, "Sequences that may wait beyond those that run, before 503.", aliases=("--max-queued-requests",)
    )
    max_num_queued_tokens: int | None = option(
        None, "Prompt tokens that may wait, before 503. Default: no limit.", value="SIZE"
    )
    first_token_deadline_s: float | None = option(
        None, "End a request that has no token after so long. Default: no limit."
    )
    request_deadline_s: float | None = option(
        None, "End a request that has not finished after so long.", aliases=("--request-timeout",)
    )

    def __post_init__(self) -> None:
        _check_types(self)
        for spec in fields(self):
            value, least = getattr(self, spec.name), _LEAST.get(spec.name, 1)
            if isinstance(value, bool) or not isinstance(value, int | float) or least is None:
                continue
            if spec.name in _POSITIVE:
                if not value > 0:
                    raise OptionError(f"{spec.name} must be above 0, not {value}; leave it out for its default")
            elif not value >= least:
                raise OptionError(f"{spec.name} must be at least {least}, not {value}")
            most = _MOST_BYTES if spec.name.endswith("_bytes") else _MOST
            if not value <= most:
                raise OptionError(f"{spec.name} must be a finite number, at most {most:,}, not {value:.6g}")
        for name in ("max_prefill_share", "watermark"):
            if not getattr(self, name) <= 1:
                raise OptionError(f"{name} is a share, at most 1, not {getattr(self, name)}")

    @property
    def num_slots(self) -> int:
        """How many requests may run at once: each of them advances in every step, by one token at least."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


_LEAST: dict[str, int | None] = {
    "seed": None,
    "long_prefill_token_threshold": 0,
    "max_prefill_share": 0,
    "priority_aging_s": 0,
    "lpm_max_overtakes": 0,
    "fair_prompt_weight": 0,
    "fair_output_weight": 0,
    "watermark": 0,
    "max_preemptions": 0,
    "admission_lookahead": 0,
    "lookahead_age_limit_s": 0,
    "max_num_queued_reqs": 0,
    "first_token_deadline_s": 0,
    "request_deadline_s": 0,
}
"""The smallest value of each number that may be below 1; None for any."""

_MOST = 2**31 - 1
_MOST_BYTES = 2**50

_POSITIVE = ("max_prefill_share", "priority_aging_s", "first_token_deadline_s", "request_deadline_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(SchedulingOptions):
    """What a person may set about an engine. Raises `OptionError` when a value cannot be honoured."""

    dtype: str = option("bfloat16", "Precision of weights and activations.", value="bfloat16|float32")
    device: str = option("cpu", "Where the model runs: cpu, cuda or cuda:N.", value="DEVICE")
    executor: str = option(
        "auto",
        "What runs it: native (x86-64 with AVX-512 BF16), torch, or auto: native where it can.",
        value="auto|native|torch",
    )
    max_model_len: int | None = option(
        None,
        "Longest sequence, prompt and output together, in tokens, such as 4096. Default: what the model supports.",
        value="SIZE",
        aliases=("--context-length", "--ctx-size"),
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Memory for the KV pool in bytes, such as 2GiB. Default: the smaller of half of what is free and max-num-seqs "
        "full sequences.",
        value="SIZE",
    )
    num_kv_blocks: int | None = option(
        None, "Number of KV blocks, whatever memory they take.", value="SIZE", aliases=("--num-gpu-blocks-override",)
    )
    prefault_kv_cache: bool = option(
        False,
        "Take all KV memory from the system at start, not as it is used (native executor): "
        "then no request pays for page faults.",
    )
    generation_config: str = option(
        "auto",
        "Sampling parameters that a request leaves out: auto, as the model's files recommend, or none of those.",
        value="auto|none",
    )
    seed: int = option(0, "Seed of the stream from which requests without a seed of their own get theirs.")
    threads: int | None = option(None, "Threads of the forward pass. Default: the cores this process may use.")

    def __post_init__(self) -> None:
        SchedulingOptions.__post_init__(self)
        if self.dtype not in DTYPES:
            raise OptionError(f"dtype {self.dtype!r} is not supported; use one of {', '.join(DTYPES)}")
        if self.generation_config not in GENERATION_CONFIGS:
            raise OptionError(
                f"generation_config {self.generation_config!r} is not supported; use one of "
                f"{', '.join(GENERATION_CONFIGS)}"
            )
        if self.threads is not None and self.threads > MOST_THREADS:
            raise OptionError(f"threads must be at most {MOST_THREADS}, not {self.threads}")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise OptionError(f"device {self.device!r} is not supported; use cpu, cuda or cuda:N")
        if self.num_kv_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise OptionError("num_kv_blocks and kv_cache_memory_bytes both size the KV pool; set one of them")
        if self.executor not in EXECUTORS:
            raise OptionError(f"there is no executor {self.executor!r}; use one of {', '.join(EXECUTORS)}")

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

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for every one.", value="ADDRESS")
    port: int = option(8000, "Port to listen on; 0 picks a free one.")
    served_model_name: tuple[str, ...] = option(
        (),
        "Name the model goes by in the API; repeatable, the first is the one it calls itself.",
        value="NAME",
        aliases=("--alias",),
    )
    drain_s: float = option(30.0, "How long running requests may go on after SIGTERM.")
    health_stall_s: float = option(10.0, "Without a sign of life from the engine's loop for this long, /health is red.")
    max_stream_backlog: int = option(
        2048, "Tokens a client may fall behind in reading its stream before its request is aborted.", value="SIZE"
    )
    access_log: bool = option(False, "Log each HTTP request, but nothing of what it said.")
    api_key: tuple[str, ...] = option(
        (), "Key that requests must bring; repeatable, each for a tenant of its own.", value="KEY", is_secret=True
    )
    api_key_file: str | None = option(
        None,
        "File of such keys, one a line, each followed by its tenant's name or alone. SIGHUP reads it again.",
        value="PATH",
    )
    admin_api_key: str | None = option(
        None, "The key for the admin routes. Needed where there are several tenants.", value="KEY", is_secret=True
    )
    enable_admin_api: bool = option(False, "Offer /pause, /resume, /reset_prefix_cache, /abort_requests and /explain.")
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origin whose pages may call from a browser, such as https://example.org, or *; repeatable. Default: no CORS.",
        value="ORIGIN",
    )
    ssl_keyfile: str | None = option(None, "Private key for HTTPS (PEM, not encrypted).", value="PATH")
    ssl_certfile: str | None = option(None, "Certificate for HTTPS, with its chain (PEM).", value="PATH")
    root_path: str = option(
        "",
        "Path under which a proxy offers this server, such as /llm, if it takes it off before it asks.",
        value="URL_PATH",
    )
    metrics_compat: str | None = option(None, "Publish metrics also under another server's names.", value="vllm")
    strict_fields: bool = option(
        False, "Refuse a request with a field that nobody knows (400); without, a header of the answer names it."
    )
    max_body_bytes: int = option(
        32 * 2**20, "Largest request body in bytes, such as 8MiB; more is refused unread.", value="SIZE"
    )
    request_read_timeout_s: float = option(
        30.0, "How long a client may take to send a request: its head, and then again its body."
    )
    max_request_cost: int = option(
        2**23,
        "Most that one call may come to: for each of its sequences, prompt tokens and tokens that may be generated, "
        "times 1 + logprobs and prompt_logprobs (of its prompt tokens).",
        value="SIZE",
    )
    chat_template_timeout_s: float = option(
        2.0, "Processor time that a chat template may take for one request.", value="SECONDS"
    )
    trust_request_chat_template: bool = option(
        False, "Render chat templates that come with requests, within that limit and at the lowest priority."
    )
    sse_keep_alive_interval: float = option(
        15.0,
        "Seconds without news after which a stream gets a comment, so that nobody between cuts it; 0 for never.",
        value="SECONDS",
    )

    def __post_init__(self) -> None:
        _check_types(self)
        if not self.host:
            raise OptionError("host is empty; use 127.0.0.1, or 0.0.0.0 for every address")
        if not 0 <= self.port <= 65535:
            raise OptionError(f"port must be between 0 and 65535, not {self.port}")
        if "" in self.served_model_name:
            raise OptionError("served_model_name is empty")
        for name in ("drain_s", "sse_keep_alive_interval"):
            if not getattr(self, name) >= 0:
                raise OptionError(f"{name} must not be negative, but is {getattr(self, name)}")
        for name in ("max_stream_backlog", "max_body_bytes", "max_request_cost"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("health_stall_s", "request_read_timeout_s", "chat_template_timeout_s"):
            if not 0 < getattr(self, name) <= _MOST:
                raise OptionError(f"{name} must be above 0, a finite number, not {getattr(self, name)}")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise OptionError("HTTPS needs both ssl_keyfile and ssl_certfile")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise OptionError(f"root_path must begin with a slash and not end with one, as in /llm: {self.root_path!r}")
        if self.metrics_compat not in (None, "vllm"):
            raise OptionError(f"metrics_compat can only be vllm, not {self.metrics_compat!r}")
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise OptionError(f"allowed_origins takes * or origins such as https://example.org, not {origin!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(SchedulingOptions):
    """Limits the scheduler works within: the options, and what the model and the machine make of them.

    A request of `max_model_len` tokens fits into an empty pool, by `kv_layout`: whatever is accepted fits alone.
    """

    max_model_len: int
    num_blocks: int
    kv_windows: tuple[int | None, ...] = (None,)
    """The sliding window of each group of layers, None for full attention; see `noria.kv_layout`."""
    max_adapters: int | None = None
    """How many different adapters one step may have; None for any number."""
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int | None = None
    max_num_looks: int = 4096
    """How many waiting requests one step may look at and hold: a bound on its work, out of reach of a queue of the
    usual length."""
    num_records_kept: int = 1024
    num_record_entries_kept: int = 65_536
    """Records are also bounded by the requests in them, all steps together: about 10 MB."""

    def __post_init__(self) -> None:
        SchedulingOptions.__post_init__(self)
        layout = self.kv_layout
        if layout.most_blocks(self.max_model_len) > self.num_blocks:
            raise OptionError(
                f"max_model_len {self.max_model_len} does not fit into the KV pool of {self.num_blocks} blocks x "
                f"{self.block_size} tokens: lower it to {layout.longest(self.num_blocks, self.max_model_len)}, or "
                "enlarge the pool (num_kv_blocks, kv_cache_memory_bytes)"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise OptionError(
                f"without chunked prefill a whole sequence must fit into one step, but max_num_batched_tokens is "
                f"{self.max_num_batched_tokens} and max_model_len is {self.max_model_len}: raise the one to the other, "
                "or lower max_model_len"
            )

    @property
    def kv_layout(self) -> KVLayout:
        return KVLayout(self.block_size, self.kv_windows, self.max_num_batched_tokens)

    @classmethod
    def of(cls, options: SchedulingOptions, **limits: Any) -> Self:
        """The scheduling part of `options`, and the limits they do not have."""
        return cls(**{spec.name: getattr(options, spec.name) for spec in fields(SchedulingOptions)}, **limits)
