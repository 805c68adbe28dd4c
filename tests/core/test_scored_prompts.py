"""Log-probabilities of prompts, and requests that generate nothing: what the scheduler plans, tells and keeps."""

from __future__ import annotations

import pytest
from worlds import World

from noria.core.events import FinishReason
from noria.core.plan import Limit, StepResult
from noria.errors import EngineError, RequestError


def test_a_prompt_is_told_chunk_by_chunk_before_there_are_tokens():
    world = World(max_num_batched_tokens=4)
    world.add("r", 10, prompt_logprobs=0, max_tokens=2)
    events = []
    while world.scheduler.has_unfinished:
        events += world.update(world.schedule())
    assert [(len(event.prompt_logprobs), len(event.token_ids)) for event in events] == [(4, 0), (4, 0), (1, 1), (0, 1)]
    assert [event.finish_reason for event in events] == [None, None, None, FinishReason.LENGTH]


@pytest.mark.parametrize("budget", [3, 8, 64])
@pytest.mark.parametrize("num_steps", range(1, 9))
def test_each_token_is_told_once_however_often_the_request_is_preempted(budget, num_steps):
    world = World(max_num_batched_tokens=budget)
    world.add("r", 22, prompt_logprobs=0, max_tokens=6)
    for _ in range(num_steps):
        if "r" in world.scheduler.running:
            world.preempt("r")
        world.step()
    world.run()
    assert world.scores["r"] == list(range(1, 22))
    assert len(world.outputs["r"]) == 6


def test_what_has_been_told_may_come_from_the_cache_after_a_preemption():
    world = World(max_num_batched_tokens=12)
    world.add("r", 30, prompt_logprobs=0)
    world.step()
    world.preempt("r")
    assert world.schedule().admitted[0].num_computed_tokens == 12


def test_a_scored_prompt_waits_for_nobody_and_takes_no_hit():
    world = World(max_num_batched_tokens=64)
    world.add("cold", range(50, 70))
    world.step()
    world.add("scored", range(50, 70), prompt_logprobs=0)
    assert world.schedule().num_scheduled_tokens == {"cold": 1, "scored": 20}
    together = World(max_num_batched_tokens=64)
    together.add("a", range(50, 70))
    together.add("b", range(50, 70), prompt_logprobs=0)
    plan = together.schedule()
    assert plan.num_scheduled_tokens == {"a": 20, "b": 20}
    together.update(plan)
    together.run()
    assert together.outputs["a"] == together.outputs["b"]


def test_the_policy_lpm_counts_no_hit_for_a_scored_prompt():
    world = World(scheduling_policy="lpm", max_num_batched_tokens=64)
    world.add("warm", range(50, 70))
    world.run()
    world.add("scored", range(50, 70), prompt_logprobs=0)
    world.add("usual", range(50, 66))
    assert list(world.schedule().num_scheduled_tokens) == ["usual", "scored"]


def test_a_request_without_tokens_ends_with_its_prompt():
    world = World(max_num_batched_tokens=8)
    world.add("r", 20, max_tokens=0)
    world.add("other", 3)
    world.run()
    assert world.reasons == {"r": FinishReason.LENGTH, "other": FinishReason.LENGTH}
    assert world.outputs["r"] == []
    assert len(world.outputs["other"]) == 4
    assert [e.num_output_tokens for record in world.scheduler.records for e in record.endings] == [4, 0]


def test_a_worker_that_generates_for_such_a_request_is_not_believed():
    world = World()
    world.add("r", 3, max_tokens=0)
    plan = world.schedule()
    with pytest.raises(EngineError, match="r has a new token"):
        world.scheduler.update(plan, StepResult({"r": (7,)}), 1.0)


def test_a_request_without_tokens_that_is_preempted_starts_again_and_ends():
    world = World(max_num_batched_tokens=8)
    world.add("r", 20, max_tokens=0)
    world.step()
    world.preempt("r")
    world.run()
    assert world.reasons == {"r": FinishReason.LENGTH}


def test_a_drafter_has_nothing_to_guess_for_it():
    world = World(drafter=lambda request: (1, 2, 3))
    world.add("r", 5, max_tokens=0)
    world.run()
    assert world.reasons == {"r": FinishReason.LENGTH}


def test_records_keep_no_scores():
    world = World()
    world.add("r", 20, prompt_logprobs=3)
    world.run()
    assert not any(record.result.prompt_logprobs for record in world.scheduler.records)


def test_only_the_first_sequence_of_a_request_scores_and_least_lengths_travel_with_stop_ids():
    world = World()
    request = world.add("r", 3, min_tokens=2, stop_token_ids=(9, 4))
    assert request.num_scored is None
    [admitted] = world.schedule().admitted
    assert admitted.stop_ids == (2, 4, 9), "the model's end of sequence is among them"
    free = World()
    free.add("r", 3, stop_token_ids=(9, 4))
    assert free.schedule().admitted[0].stop_ids == ()
    deaf = World()
    deaf.add("r", 3, min_tokens=2, ignore_eos=True)
    assert deaf.schedule().admitted[0].stop_ids == ()


def test_a_least_length_that_cannot_come_is_refused():
    world = World(max_model_len=32)
    with pytest.raises(RequestError, match="min_tokens is 30, but 29 tokens fit"):
        world.add("r", 3, max_tokens=None, min_tokens=30)
    world.add("r", 3, max_tokens=None, min_tokens=29)


def test_a_scored_prompt_waits_for_memory_like_any_other():
    world = World(num_blocks=8, max_model_len=32, max_num_batched_tokens=64)
    world.add("first", range(50, 66), max_tokens=12)
    world.step()
    world.add("scored", range(50, 74), prompt_logprobs=0, max_tokens=0)
    held = world.step().held
    assert [(h.request_id, h.limit) for h in held] == [("scored", Limit.KV_BLOCKS)], "no block of the hit helps it"
    world.run()
    assert world.reasons["scored"] is FinishReason.LENGTH
