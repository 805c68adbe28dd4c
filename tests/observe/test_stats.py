"""Metrics follow from records, and add up."""

import random

import pytest
from prometheus_client.parser import text_string_to_metric_families
from worlds import World

from noria.core.events import FinishReason
from noria.core.plan import Limit
from noria.errors import UnavailableError
from noria.observe.histogram import Histogram
from noria.observe.prometheus import Sources, metrics_page
from noria.observe.stats import EngineStats


def run_with_stats(world: World, max_steps: int = 5000) -> EngineStats:
    stats = EngineStats(world.config.num_blocks)
    for _ in range(max_steps):
        if not (world.scheduler.has_unfinished or world.scheduler.has_news):
            return stats
        world.step()
        stats.add(world.scheduler.records[-1])
    raise AssertionError("it does not end")


def test_a_plain_run_is_counted_exactly():
    world = World()
    world.add("a", 10, max_tokens=3)
    world.add("b", 6, max_tokens=5)
    stats = run_with_stats(world)
    assert (stats.num_arrived, stats.num_prompt_tokens, stats.num_generation_tokens) == (2, 16, 8)
    assert stats.num_computed_tokens == 16 + 2 + 4  # the last token of an answer is never computed
    assert stats.num_finished[FinishReason.LENGTH] == 2
    assert sum(stats.ttft_s.counts) == 2
    assert sum(stats.gap_s.counts) == 6
    assert stats.ttft_s.sum == 2.0  # a second per step
    assert stats.e2e_s.sum == 3.0 + 5.0
    assert (stats.prefill_s.sum, stats.decode_s.sum, stats.inference_s.sum) == (2.0, 2.0 + 4.0, 2.0 + 6.0)
    assert (sum(stats.token_s.counts), stats.token_s.sum) == (2, 2.0), "a second per token, in each of two requests"
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)


def test_cached_prompt_tokens_are_counted_once_whatever_the_preemptions():
    world = World(num_blocks=8, block_size=4)
    shared = list(range(50, 58))
    world.add("a", [*shared, 1], max_tokens=15)
    world.add("b", [*shared, 2], max_tokens=15)
    stats = run_with_stats(world)
    assert stats.num_preemptions > 0
    assert stats.num_prompt_tokens == 18
    assert stats.num_cached_tokens == sum(r.num_cached_tokens or 0 for r in world.requests.values()) == 8
    assert stats.num_generation_tokens == 30
    assert sum(stats.ttft_s.counts) == 2
    assert sum(stats.generation_tokens.counts) == 2


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm", "fair"])
def test_every_request_is_somewhere_at_any_time(policy):
    rng = random.Random(5)
    world = World(
        num_blocks=12, block_size=4, max_num_batched_tokens=9, max_num_seqs=3, max_num_queued_tokens=100,
        scheduling_policy=policy,
    )  # fmt: skip
    num_refused = 0
    stats = EngineStats(world.config.num_blocks)
    for i in range(300):
        if i < 200 and rng.random() < 0.4:
            try:
                world.add(f"r{i}", rng.randrange(1, 30), max_tokens=rng.randrange(1, 15), priority=rng.randrange(-2, 3))
            except UnavailableError:
                num_refused += 1
        alive = [r for r in world.requests if r not in world.reasons]
        if alive and rng.random() < 0.1:
            world.finish(rng.choice(alive))
        world.step()
        stats.add(world.scheduler.records[-1])
        assert stats.num_arrived == sum(stats.num_finished.values()) + stats.num_running + stats.num_waiting
        assert stats.num_arrived == len(world.requests)
        assert stats.num_waiting == sum(stats.waiting_by_reason.values())
        unfinished = [r for name, r in world.requests.items() if name not in world.reasons]
        assert stats.num_unfinished_prompt_tokens == sum(r.num_prompt_tokens for r in unfinished)
        assert stats.num_unfinished_generation_tokens == sum(r.num_output_tokens for r in unfinished)
        assert stats.num_queued_tokens == sum(
            r.num_prompt_tokens for r in world.scheduler.waiting if r.num_preemptions == 0
        )
        assert stats.kv.num_held + stats.kv.num_cached_idle + stats.kv.num_blank == 12
    assert stats.num_refused["queue_full"] == num_refused > 0
    assert stats.num_finished[FinishReason.ABORT] > 3
    assert stats.num_finished[FinishReason.LENGTH] > 30
    assert stats.num_generation_tokens == sum(len(output) for output in world.outputs.values())
    assert len(stats._requests) == stats.num_running + stats.num_waiting, "nothing is remembered for ever"


def test_an_observation_on_a_bound_belongs_to_its_bucket():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]


def test_fewer_buckets_hold_the_same_observations():
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.5, 1.5, 2.5, 2.5):
        histogram.observe(value)
    kept = histogram.up_to(2.0)
    assert (kept.bounds, kept.counts, kept.sum) == ((1.0, 2.0), [1, 1, 2], 7.0)


def test_the_page_is_what_a_scraper_reads():
    world = World()
    world.add("a", 10, max_tokens=3)
    stats = run_with_stats(world)
    families = {
        f.name: f for f in text_string_to_metric_families(metrics_page(stats, "m", Sources({"front": 1.5})).decode())
    }
    [generated] = families["noria:generation_tokens"].samples
    assert (generated.name, generated.value) == ("noria:generation_tokens_total", 3)
    assert generated.labels == {"model_name": "m", "engine": "0"}
    ttft = families["noria:time_to_first_token_seconds"].samples
    buckets = [s.value for s in ttft if s.name.endswith("_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 1
    assert {s.labels["finished_reason"]: s.value for s in families["noria:request_success"].samples}["length"] == 1
    phases = {s.labels["phase"]: s.value for s in families["noria:engine_seconds"].samples}
    computing = [record for record in world.scheduler.records if not record.plan.is_empty]
    assert phases["schedule"] + phases["execute"] == pytest.approx(sum(record.duration_s for record in computing))
    [cpu] = families["noria:process_cpu_seconds"].samples
    assert (cpu.labels["process"], cpu.value) == ("front", 1.5)


def test_a_step_that_failed_computed_nothing():
    world = World()
    world.add("a", 10)
    plan = world.schedule()
    world.scheduler.abandon(plan, 1.0, "out of smoke")
    stats = EngineStats(world.config.num_blocks)
    stats.add(world.scheduler.records[-1])
    assert (stats.num_computed_tokens, stats.num_arrived, stats.num_finished[FinishReason.ERROR]) == (0, 1, 1)


def test_what_preemptions_cost_is_counted_in_tokens():
    world = World(num_blocks=8, block_size=4, enable_prefix_caching=False)
    for request_id in ("a", "b"):
        world.add(request_id, 9, max_tokens=15)
    stats = run_with_stats(world)
    assert stats.num_preemptions > 0
    assert stats.num_tokens_lost == sum(r.num_tokens_lost for r in world.requests.values()) > 0
    # Each request's last token is never computed, and what was lost is computed again.
    assert stats.num_computed_tokens == 2 * (9 + 14) + stats.num_tokens_lost


def test_unfinished_prompts_that_run_are_not_among_those_that_wait():
    world = World(max_num_batched_tokens=8, max_num_seqs=2)
    for request_id in ("a", "b", "c"):
        world.add(request_id, 30)
    world.step()
    stats = EngineStats(64)
    stats.add(world.scheduler.records[-1])
    assert stats.num_waiting == 1
    assert {limit: n for limit, n in stats.waiting_by_reason.items() if n} == {Limit.MAX_NUM_SEQS: 1}


def test_the_pages_gauges_are_those_of_the_last_step():
    world = World(num_blocks=16, block_size=4, max_num_seqs=1)
    world.add("a", 10, max_tokens=3)
    world.add("b", 7, max_tokens=3)
    world.step()
    stats = EngineStats(16)
    stats.add(world.scheduler.records[-1])
    families = {
        f.name: f for f in text_string_to_metric_families(metrics_page(stats, "m", Sources({"front": 1.5})).decode())
    }

    def values(name, label):
        return {s.labels[label]: s.value for s in families[f"noria:{name}"].samples if s.value}

    assert values("kv_cache_blocks", "state") == {"held": 3, "free": 13}
    assert values("num_requests_waiting_by_reason", "reason") == {"max_num_seqs": 1}
    assert [s.value for s in families["noria:kv_cache_unused_slots"].samples] == [2]
    assert [s.value for s in families["noria:num_queued_tokens"].samples] == [7]
