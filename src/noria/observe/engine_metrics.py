"""Names of the engine's metrics, what they are read from, and what they mean, once: whichever page has them.

vLLM's names (`noria.observe.vllm_names`) are some of ours, since ours were chosen to be the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import Metric

from noria.observe.families import Families
from noria.observe.stats import EngineStats


class Known(NamedTuple):
    """`attribute` is one of `EngineStats`."""

    attribute: str
    text: str


GAUGES = {
    "num_requests_running": Known("num_running", "Requests that hold KV blocks."),
    "num_requests_waiting": Known("num_waiting", "Requests that wait for admission."),
    "num_queued_tokens": Known("num_queued_tokens", "Prompt tokens that wait for their first step."),
    "kv_cache_usage_perc": Known("kv_usage", "Share of KV blocks held by requests, 0 to 1."),
    "unfinished_prompt_tokens": Known("num_unfinished_prompt_tokens", "Of requests that run or wait."),
    "unfinished_generation_tokens": Known("num_unfinished_generation_tokens", "Likewise, so far."),
}

COUNTERS = {
    "num_requests_submitted": Known("num_submitted", "Requests that came to the engine."),
    "num_requests_arrived": Known("num_arrived", "Of these, those it accepted."),
    "num_steps": Known("num_steps", "Engine steps."),
    "num_preemptions": Known("num_preemptions", "Times a request gave its blocks back."),
    "preempted_tokens": Known("num_tokens_lost", "Computed tokens that they gave up with them."),
    "arrived_prompt_tokens": Known("num_arrived_prompt_tokens", "Prompt tokens of accepted requests."),
    "prompt_tokens": Known("num_prompt_tokens", "Prompt tokens of admitted requests."),
    "prompt_tokens_cached": Known("num_cached_tokens", "Of these, found in the prefix cache."),
    "prefix_cache_queries": Known("num_prompt_tokens", "Prompt tokens looked up in the cache."),
    "prefix_cache_hits": Known("num_cached_tokens", "Prompt tokens found in the cache."),
    "generation_tokens": Known("num_generation_tokens", "Generated tokens."),
    "computed_tokens": Known("num_computed_tokens", "Tokens run, recomputation included."),
}

HISTOGRAMS = {
    "iteration_tokens_total": Known("step_tokens", "Tokens of one engine step."),
    "time_to_first_token_seconds": Known("ttft_s", "From arrival to the first token."),
    "inter_token_latency_seconds": Known("gap_s", "Between tokens of one request."),
    "request_time_per_output_token_seconds": Known("token_s", "Mean of each ended request, after its first."),
    "request_queue_time_seconds": Known("queue_s", "From arrival to admission."),
    "request_prefill_time_seconds": Known("prefill_s", "From admission to the first token."),
    "request_decode_time_seconds": Known("decode_s", "From the first token to the last."),
    "request_inference_time_seconds": Known("inference_s", "From admission to the last token."),
    "e2e_request_latency_seconds": Known("e2e_s", "From arrival to the end."),
    "request_prompt_tokens": Known("prompt_tokens", "Prompt length of ended requests."),
    "request_generation_tokens": Known("generation_tokens", "Output length of ended requests."),
    "request_num_preemptions": Known("preemptions", "Preemptions of requests that had any."),
}

REQUEST_SUCCESS = "Ended requests by reason."


def plain_families(families: Families, stats: EngineStats, names: Iterable[str]) -> Iterator[Metric]:
    """The gauges and counters of those names."""
    for name in names:
        if name in GAUGES:
            yield families.gauge(name, GAUGES[name].text, getattr(stats, GAUGES[name].attribute))
        else:
            yield families.counter(name, COUNTERS[name].text, getattr(stats, COUNTERS[name].attribute))


def histogram_families(
    families: Families, stats: EngineStats, names: Iterable[str], most: Mapping[str, int] | None = None
) -> Iterator[Metric]:
    """The histograms of those names, of some with buckets up to a bound only."""
    for name in names:
        histogram = getattr(stats, HISTOGRAMS[name].attribute)
        if most is not None and name in most:
            histogram = histogram.up_to(most[name])
        yield families.histogram(name, HISTOGRAMS[name].text, histogram)
