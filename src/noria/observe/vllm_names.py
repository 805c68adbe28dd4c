"""The same data under the names that vLLM's dashboards, autoscalers and routers look for (`--metrics-compat vllm`).

Names, labels and buckets are vLLM's; so are meanings, but for requests that were aborted: here they are in the
histograms of ended requests too, so that these add up. Nothing is published of what Noria does not do.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from noria.config import SchedulerConfig
from noria.core.plan import Limit
from noria.observe.engine_metrics import REQUEST_SUCCESS, histogram_families, plain_families
from noria.observe.families import Families
from noria.observe.stats import EngineStats

_DEFERRED = (Limit.PREFIX_BEING_COMPUTED, Limit.GRAMMAR, Limit.ADAPTERS, Limit.PAUSED)
"""What vLLM calls so: requests that wait for something other than room."""


_PLAIN = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
)

_HISTOGRAMS = (
    "iteration_tokens_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "e2e_request_latency_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
)


def vllm_families(families: Families, stats: EngineStats, config: SchedulerConfig) -> Iterator[Metric]:
    yield from plain_families(families, stats, _PLAIN)
    num_deferred = sum(stats.waiting_by_reason[limit] for limit in _DEFERRED)
    yield families.gauges(
        "num_requests_waiting_by_reason",
        "Waiting requests, for room or for something else.",
        "reason",
        {"capacity": stats.num_waiting - num_deferred, "deferred": num_deferred},
    )
    yield families.counters("request_success", REQUEST_SUCCESS, "finished_reason", stats.num_finished)
    lengths = dict.fromkeys(("request_prompt_tokens", "request_generation_tokens"), config.max_model_len)
    yield from histogram_families(families, stats, _HISTOGRAMS, lengths)
    facts = {
        "block_size": config.block_size,
        "num_gpu_blocks": config.num_blocks,
        "enable_prefix_caching": config.enable_prefix_caching,
    }
    yield families.info("cache_config_info", "How the KV cache is set up.", facts)
