"""`EngineStats` as Prometheus text: the only module that knows the metrics library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from noria.observe.stats import EngineStats, Histogram

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "noria:"
LABELS = ("model_name", "engine")


class StatsCollector(Collector):
    """Reads the stats when it is asked; nothing is counted here."""

    def __init__(self, stats: EngineStats, model_name: str, cpu_s: Mapping[str, float]) -> None:
        self._stats = stats
        self._labels = (model_name, "0")
        self._cpu_s = cpu_s

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        yield self._gauge("num_requests_running", "Requests that hold KV blocks.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for admission.", stats.num_waiting)
        yield self._gauges(
            "num_requests_waiting_by_reason", "Those that wait, by what for.", "reason", stats.waiting_by_reason
        )
        yield self._gauge("num_queued_tokens", "Prompt tokens that wait for their first step.", stats.num_queued_tokens)
        yield self._gauges(
            "kv_cache_blocks",
            "KV blocks: held by requests; free, but findable in the prefix cache; free and without content.",
            "state",
            {"held": stats.kv.num_held, "cached_idle": stats.kv.num_cached_idle, "free": stats.kv.num_blank},
        )
        yield self._gauge(
            "kv_cache_unused_slots", "Token slots in held blocks that are not filled yet.", stats.kv.num_unused_slots
        )
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks held by requests, 0 to 1.", stats.kv_usage)
        yield self._counter("num_requests_arrived", "Requests accepted by the engine.", stats.num_arrived)
        yield self._counter("num_steps", "Engine steps.", stats.num_steps)
        yield self._counters(
            "engine_seconds",
            "Time of engine steps that ran something: planning them, executing them, and between two of them.",
            "phase",
            stats.phase_s,
        )
        yield self._counters(
            "process_cpu_seconds", "Processor time of front and engine process.", "process", self._cpu_s
        )
        yield self._counter("num_preemptions", "Times a request gave its blocks back.", stats.num_preemptions)
        yield self._counter("preempted_tokens", "Computed tokens that they gave up with them.", stats.num_tokens_lost)
        yield self._counters(
            "num_requests_refused",
            "Requests that were turned away for now, by error code.",
            "reason",
            stats.num_refused,
        )
        yield self._counter("prompt_tokens", "Prompt tokens of admitted requests.", stats.num_prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Of these, found in the prefix cache.", stats.num_cached_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.num_prompt_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.num_cached_tokens)
        yield self._counter("generation_tokens", "Generated tokens.", stats.num_generation_tokens)
        yield self._counter("computed_tokens", "Tokens run, recomputation included.", stats.num_computed_tokens)
        yield self._counters("request_success", "Ended requests by reason.", "finished_reason", stats.num_finished)
        for name, text, histogram in (
            ("iteration_tokens_total", "Tokens of one engine step.", stats.step_tokens),
            ("time_to_first_token_seconds", "From arrival to the first token.", stats.ttft_s),
            ("inter_token_latency_seconds", "Between tokens of one request.", stats.gap_s),
            ("request_queue_time_seconds", "From arrival to admission.", stats.queue_s),
            ("e2e_request_latency_seconds", "From arrival to the end.", stats.e2e_s),
            ("request_prompt_tokens", "Prompt length of ended requests.", stats.prompt_tokens),
            ("request_generation_tokens", "Output length of ended requests.", stats.generation_tokens),
            ("request_num_preemptions", "Preemptions of requests that had any.", stats.preemptions),
        ):
            yield self._histogram(name, text, histogram)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _gauges(self, name: str, text: str, label: str, values: Mapping[Any, int]) -> Metric:
        return self._labelled(GaugeMetricFamily(PREFIX + name, text, labels=(*LABELS, label)), values)

    def _counters(self, name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
        return self._labelled(CounterMetricFamily(PREFIX + name, text, labels=(*LABELS, label)), values)

    def _labelled(self, family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[Any, float]) -> Metric:
        for value, count in values.items():
            family.add_metric((*self._labels, value), count)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        family = HistogramMetricFamily(PREFIX + name, text, labels=LABELS)
        family.add_metric(self._labels, buckets=buckets, sum_value=histogram.sum)
        return family


def metrics_page(stats: EngineStats, model_name: str, cpu_s: Mapping[str, float]) -> bytes:
    """The exposition text of all metrics now. `cpu_s`: processor seconds by process, of those that are known."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatsCollector(stats, model_name, cpu_s))
    return generate_latest(registry)
