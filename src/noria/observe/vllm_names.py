"""The same data under the names that vLLM's dashboards, autoscalers and routers look for (`--metrics-compat vllm`).

Names, labels and buckets are vLLM's; so are meanings, but for requests that were aborted: here they are in the
histograms of ended requests too, so that these add up. Nothing is published of what Noria does not do.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from noria.config import SchedulerConfig
from noria.core.plan import Limit
from noria.observe.families import Families
from noria.observe.stats import EngineStats

_DEFERRED = (Limit.PREFIX_BEING_COMPUTED, Limit.GRAMMAR, Limit.ADAPTERS, Limit.PAUSED)
"""What vLLM calls so: requests that wait for something other than room."""


def vllm_families(families: Families, stats: EngineStats, config: SchedulerConfig) -> Iterator[Metric]:
    counter, gauge = families.counter, families.gauge
    num_deferred = sum(stats.waiting_by_reason[limit] for limit in _DEFERRED)
    yield gauge("num_requests_running", "Requests in model execution batches.", stats.num_running)
    yield gauge("num_requests_waiting", "Requests waiting to be processed.", stats.num_waiting)
    yield families.gauges(
        "num_requests_waiting_by_reason",
        "Waiting requests, for room or for something else.",
        "reason",
        {"capacity": stats.num_waiting - num_deferred, "deferred": num_deferred},
    )
    yield gauge("kv_cache_usage_perc", "KV cache usage, 1 being all of it.", stats.kv_usage)
    yield counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.num_prompt_tokens)
    yield counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.num_cached_tokens)
    yield counter("num_preemptions", "Preemptions.", stats.num_preemptions)
    yield counter("prompt_tokens", "Prefill tokens.", stats.num_prompt_tokens)
    yield counter("prompt_tokens_cached", "Of these, found in the cache.", stats.num_cached_tokens)
    yield counter("generation_tokens", "Generation tokens.", stats.num_generation_tokens)
    yield families.counters("request_success", "Ended requests.", "finished_reason", stats.num_finished)
    for name, text, histogram in (
        ("iteration_tokens_total", "Tokens of one engine step.", stats.step_tokens),
        ("time_to_first_token_seconds", "Time to first token.", stats.ttft_s),
        ("inter_token_latency_seconds", "Time between tokens.", stats.gap_s),
        ("request_time_per_output_token_seconds", "Mean time between tokens of a request.", stats.token_s),
        ("request_queue_time_seconds", "Time in the queue.", stats.queue_s),
        ("request_prefill_time_seconds", "Time until the first token.", stats.prefill_s),
        ("request_decode_time_seconds", "Time from the first token to the last.", stats.decode_s),
        ("request_inference_time_seconds", "Time from admission to the last token.", stats.inference_s),
        ("e2e_request_latency_seconds", "Time from arrival to the end.", stats.e2e_s),
        ("request_prompt_tokens", "Prompt lengths.", stats.prompt_tokens.up_to(config.max_model_len)),
        ("request_generation_tokens", "Output lengths.", stats.generation_tokens.up_to(config.max_model_len)),
    ):
        yield families.histogram(name, text, histogram)
    facts = {
        "block_size": config.block_size,
        "num_gpu_blocks": config.num_blocks,
        "enable_prefix_caching": config.enable_prefix_caching,
    }
    yield families.info("cache_config_info", "How the KV cache is set up.", facts)
