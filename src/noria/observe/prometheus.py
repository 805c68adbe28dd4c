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
    gauge, gauges, counter, counters = families.gauge, families.gauges, families.counter, families.counters
    yield gauge("num_requests_running", "Requests that hold KV blocks.", stats.num_running)
    yield gauge("num_requests_waiting", "Requests that wait for admission.", stats.num_waiting)
    yield gauges("num_requests_waiting_by_reason", "Those that wait, by what for.", "reason", stats.waiting_by_reason)
    yield gauge("num_queued_tokens", "Prompt tokens that wait for their first step.", stats.num_queued_tokens)
    yield gauges(
        "kv_cache_blocks",
        "KV blocks: held by requests; free, but findable in the prefix cache; free and without content.",
        "state",
        {"held": stats.kv.num_held, "cached_idle": stats.kv.num_cached_idle, "free": stats.kv.num_blank},
    )
    yield gauge("kv_cache_unused_slots", "Token slots in held blocks not filled yet.", stats.kv.num_unused_slots)
    yield gauge("kv_cache_usage_perc", "Share of KV blocks held by requests, 0 to 1.", stats.kv_usage)
    yield counter("num_requests_submitted", "Requests that came to the engine.", stats.num_submitted)
    yield counter("num_requests_arrived", "Of these, those it accepted.", stats.num_arrived)
    yield counters("num_requests_refused", "And those it turned away for now.", "reason", stats.num_refused)
    yield counters("request_success", "Ended requests by reason.", "finished_reason", stats.num_finished)
    yield counter("num_steps", "Engine steps.", stats.num_steps)
    yield counters(
        "engine_seconds",
        "Time of engine steps that ran something: planning them, executing them, and between two of them.",
        "phase",
        stats.phase_s,
    )
    yield counter("num_preemptions", "Times a request gave its blocks back.", stats.num_preemptions)
    yield counter("preempted_tokens", "Computed tokens that they gave up with them.", stats.num_tokens_lost)
    yield counter("arrived_prompt_tokens", "Prompt tokens of accepted requests.", stats.num_arrived_prompt_tokens)
    yield counter("prompt_tokens", "Prompt tokens of admitted requests.", stats.num_prompt_tokens)
    yield counter("prompt_tokens_cached", "Of these, found in the prefix cache.", stats.num_cached_tokens)
    yield counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.num_prompt_tokens)
    yield counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.num_cached_tokens)
    yield counter("generation_tokens", "Generated tokens.", stats.num_generation_tokens)
    yield counter("computed_tokens", "Tokens run, recomputation included.", stats.num_computed_tokens)
    yield gauge("unfinished_prompt_tokens", "Of requests that run or wait.", stats.num_unfinished_prompt_tokens)
    yield gauge("unfinished_generation_tokens", "Likewise, so far.", stats.num_unfinished_generation_tokens)
    for name, text, histogram in (
        ("iteration_tokens_total", "Tokens of one engine step.", stats.step_tokens),
        ("time_to_first_token_seconds", "From arrival to the first token.", stats.ttft_s),
        ("inter_token_latency_seconds", "Between tokens of one request.", stats.gap_s),
        ("request_time_per_output_token_seconds", "Mean of each ended request, after its first.", stats.token_s),
        ("request_queue_time_seconds", "From arrival to admission.", stats.queue_s),
        ("request_prefill_time_seconds", "From admission to the first token.", stats.prefill_s),
        ("request_decode_time_seconds", "From the first token to the last.", stats.decode_s),
        ("request_inference_time_seconds", "From admission to the last token.", stats.inference_s),
        ("e2e_request_latency_seconds", "From arrival to the end.", stats.e2e_s),
        ("request_prompt_tokens", "Prompt length of ended requests.", stats.prompt_tokens),
        ("request_generation_tokens", "Output length of ended requests.", stats.generation_tokens),
        ("request_num_preemptions", "Preemptions of requests that had any.", stats.preemptions),
    ):
        yield families.histogram(name, text, histogram)


def _call_families(families: Families, calls: CallStats) -> Iterator[Metric]:
    yield families.counter("calls_submitted", "Calls to the generating endpoints.", calls.num_submitted)
    yield families.counters("calls_ended", "Of these, ended, by what became of them.", "outcome", calls.num_ended)
    yield families.gauges("calls_in_progress", "And those that are not.", "stage", calls.num_in_progress)
    for name, text, ended, unfinished in (
        ("call_prompt_tokens", "Prompt tokens of calls.", calls.num_prompt_tokens, "num_prompt_tokens"),
        ("call_completion_tokens", "Tokens of answers.", calls.num_completion_tokens, "num_completion_tokens"),
    ):
        counts = {outcome: ended[outcome] for outcome in Outcome}
        yield families.counters(name, f"{text[:-1]} that have ended.", "outcome", counts)
        now = sum(getattr(call, unfinished) for call in calls.in_progress)
        yield families.gauge(f"{name}_in_progress", f"{text[:-1]} that have not.", now)
    yield families.histogram("call_time_to_first_token_seconds", "From a call to its first token.", calls.ttft_s)
    yield families.histogram("call_duration_seconds", "From a call to the end of its answer.", calls.duration_s)


def metrics_page(stats: EngineStats, model_name: str, sources: Sources) -> bytes:
    """The exposition text of all metrics now."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(stats, model_name, sources))
    return generate_latest(registry)
