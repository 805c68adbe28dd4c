"""`EngineStats` and `CallStats` as Prometheus text. Nothing is counted here: they are read when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from noria.config import SchedulerConfig
from noria.observe.calls import CallStats, Outcome
from noria.observe.engine_metrics import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    REQUEST_SUCCESS,
    histogram_families,
    plain_families,
)
from noria.observe.families import Families
from noria.observe.stats import EngineStats
from noria.observe.vllm_names import vllm_families

CONTENT_TYPE = CONTENT_TYPE_LATEST


@dataclass(frozen=True, slots=True)
class Sources:
    """What a page is made of, besides the engine. `cpu_s`: processor seconds by process, of those that are known."""

    cpu_s: Mapping[str, float] = field(default_factory=dict)
    calls: CallStats | None = None
    vllm: SchedulerConfig | None = None
    """Also publish vLLM's names; the limits are part of what they say."""


class _Page(Collector):
    def __init__(self, stats: EngineStats, model_name: str, sources: Sources) -> None:
        self._stats, self._sources = stats, sources
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        families = Families("noria:", self._labels)
        yield from _engine_families(families, self._stats)
        yield families.counters(
            "process_cpu_seconds", "Processor time of front and engine process.", "process", self._sources.cpu_s
        )
        if self._sources.calls is not None:
            yield from _call_families(families, self._sources.calls)
        if self._sources.vllm is not None:
            yield from vllm_families(Families("vllm:", self._labels), self._stats, self._sources.vllm)


def _engine_families(families: Families, stats: EngineStats) -> Iterator[Metric]:
    gauges, counters = families.gauges, families.counters
    yield from plain_families(families, stats, (*GAUGES, *COUNTERS))
    yield from histogram_families(families, stats, HISTOGRAMS)
    yield gauges("num_requests_waiting_by_reason", "Those that wait, by what for.", "reason", stats.waiting_by_reason)
    yield gauges(
        "kv_cache_blocks",
        "KV blocks: held by requests; free, but findable in the prefix cache; free and without content.",
        "state",
        {"held": stats.kv.num_held, "cached_idle": stats.kv.num_cached_idle, "free": stats.kv.num_blank},
    )
    unused = stats.kv.num_unused_slots
    yield families.gauge("kv_cache_unused_slots", "Token slots in held blocks not filled yet.", unused)
    yield counters("num_requests_refused", "Requests that it turned away for now.", "reason", stats.num_refused)
    yield counters("request_success", REQUEST_SUCCESS, "finished_reason", stats.num_finished)
    yield counters(
        "engine_seconds",
        "Time of engine steps that ran something: planning them, executing them, and between two of them.",
        "phase",
        stats.phase_s,
    )


def _call_families(families: Families, calls: CallStats) -> Iterator[Metric]:
    yield families.counter("calls_submitted", "Calls to the generating endpoints.", calls.num_submitted)
    yield families.counters("calls_ended", "Of these, ended, by what became of them.", "outcome", calls.num_ended)
    yield families.gauges("calls_in_progress", "And those that are not.", "stage", calls.num_in_progress)
    for name, what, ended, unfinished in (
        ("call_prompt_tokens", "Prompt tokens of calls", calls.num_prompt_tokens, "num_prompt_tokens"),
        ("call_completion_tokens", "Tokens of answers", calls.num_completion_tokens, "num_completion_tokens"),
    ):
        counts = {outcome: ended[outcome] for outcome in Outcome}
        yield families.counters(name, f"{what} that have ended.", "outcome", counts)
        now = sum(getattr(call, unfinished) for call in calls.in_progress)
        yield families.gauge(f"{name}_in_progress", f"{what} that have not.", now)
    yield families.histogram("call_time_to_first_token_seconds", "From a call to its first token.", calls.ttft_s)
    yield families.histogram("call_duration_seconds", "From a call to the end of its answer.", calls.duration_s)


def metrics_page(stats: EngineStats, model_name: str, sources: Sources) -> bytes:
    """The exposition text of all metrics now."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(stats, model_name, sources))
    return generate_latest(registry)
