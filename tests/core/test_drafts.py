"""Drafts: tokens guessed by somebody, verified by the worker; the output is what it would have been without them."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import EOS, World, solo_output

from noria.core.events import FinishReason
from noria.core.request import Request

PROMPT = list(range(50, 57))
TRUE = solo_output(PROMPT, max_tokens=40)


def guess(pattern: Callable[[int], int]) -> Callable[[Request], tuple[int, ...]]:
    """A drafter that is right in as many leading tokens as `pattern(number of outputs)` says, then wrong twice."""

    def drafter(request: Request) -> tuple[int, ...]:
        num_outputs = request.num_output_tokens
        num_right = pattern(num_outputs)
        return (*TRUE[num_outputs : num_outputs + num_right], 1, 1)

    return drafter


PATTERNS = {
    "all right": lambda n: 4,
    "all wrong": lambda n: 0,
    "partly right": lambda n: n % 3,
    "now and then": lambda n: 5 if n % 4 == 0 else 0,
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 20])
def test_the_output_is_the_same_whatever_was_guessed(pattern, max_tokens):
    world = World(drafter=guess(PATTERNS[pattern]))
    world.add("r", PROMPT, max_tokens=max_tokens)
    world.run()
    assert world.outputs["r"] == TRUE[:max_tokens]
    assert world.reasons["r"] is FinishReason.LENGTH


def test_a_drafter_that_raises_costs_its_drafts_and_nothing_else():
    def broken(request) -> tuple[int, ...]:
        raise ZeroDivisionError

    world = World(drafter=broken)
    world.add("r", [1, 2, 3], max_tokens=6)
    world.run()
    assert world.outputs["r"] == solo_output([1, 2, 3], max_tokens=6)


def test_right_guesses_save_steps():
    world = World(drafter=lambda request: tuple(TRUE[request.num_output_tokens : request.num_output_tokens + 3]))
    world.add("r", PROMPT, max_tokens=21)
    assert len(world.run()) == 1 + 5, "four tokens in each step after the first"


def test_wrong_guesses_cost_no_steps():
    world = World(drafter=lambda request: (1, 1, 1))
    world.add("r", PROMPT, max_tokens=21)
    assert len(world.run()) == 21


def test_no_draft_reaches_the_last_token_allowed():
    world = World(drafter=lambda request: tuple(TRUE[request.num_output_tokens : request.num_output_tokens + 9]))
    world.add("r", PROMPT, max_tokens=4)
    plans = world.run()
    assert [len(plan.drafts.get("r", ())) for plan in plans] == [0, 2]
    assert world.outputs["r"] == TRUE[:4]


@pytest.mark.parametrize("place", range(6))
def test_nothing_behind_an_accepted_end_of_sequence_is_kept(place):
    script = [*range(200, 200 + place), EOS, 300, 301, 302]
    world = World(
        script={"r": script},
        drafter=lambda request: tuple(script[request.num_output_tokens : request.num_output_tokens + 4]),
    )
    world.add("r", PROMPT, max_tokens=10)
    world.run()
    assert world.outputs["r"] == script[: place + 1]
    assert world.reasons["r"] is FinishReason.STOP


@pytest.mark.parametrize("max_num_batched_tokens", [2, 3, 4, 5, 8])
def test_drafts_are_cut_to_the_budget_and_others_still_advance(max_num_batched_tokens):
    world = World(drafter=guess(lambda n: 4), max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=2)
    world.add("a", PROMPT, max_tokens=12)
    world.add("b", PROMPT, max_tokens=12)
    while world.scheduler.has_unfinished:
        running = {r.request_id for r in world.scheduler.running}
        plan = world.step()
        assert plan.num_tokens <= max_num_batched_tokens
        assert running <= plan.num_scheduled_tokens.keys()
    assert world.outputs["a"] == world.outputs["b"] == TRUE[:12]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_preemption_with_drafts_changes_no_output(pattern, enable_prefix_caching):
    world = World(
        num_blocks=8, block_size=4, drafter=guess(PATTERNS[pattern]), enable_prefix_caching=enable_prefix_caching
    )
    for request_id in "abc":
        world.add(request_id, [*PROMPT[:-1], PROMPT[-1]], max_tokens=16)
    world.run()
    assert any(request.num_preemptions for request in world.requests.values())
    assert all(output == TRUE[:16] for output in world.outputs.values())


def test_rejected_tokens_are_never_registered():
    """The second request's prompt is what the first one guessed wrongly. Nothing of it may be found, and the runner
    would refuse foreign KV."""
    wrong = (1, 1, 1, 1, 1, 1)
    world = World(block_size=4, drafter=lambda request: wrong)
    world.add("a", PROMPT, max_tokens=8)
    world.run()
    accepted = PROMPT + TRUE[:8]
    for num_known in range(7, 14):
        request_id = f"b{num_known}"
        request = world.add(request_id, [*accepted[:num_known], *wrong], max_tokens=1)
        world.run()
        assert request.num_cached_tokens is not None
        assert request.num_cached_tokens <= num_known


def test_the_events_have_all_tokens_of_a_step_and_their_logprobs():
    world = World(drafter=lambda request: tuple(TRUE[request.num_output_tokens : request.num_output_tokens + 3]))
    world.add("r", PROMPT, max_tokens=9, logprobs=0)
    world.step()
    [event] = world.update(world.schedule())
    assert event.token_ids == tuple(TRUE[1:5])
    assert [logprob.token_id for logprob in event.logprobs] == TRUE[1:5]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 14)), min_size=1, max_size=6),
    guesses=st.lists(st.integers(0, 5), min_size=1, max_size=20),
    num_blocks=st.integers(7, 16),
    max_num_batched_tokens=st.integers(2, 20),
    policy=st.sampled_from(["fcfs", "priority", "lpm", "fair"]),
)
def test_random_guesses_under_pressure_change_no_output(lengths, guesses, num_blocks, max_num_batched_tokens, policy):
    truth: dict[str, list[int]] = {}
    calls = iter(range(10**9))

    def drafter(request: Request) -> tuple[int, ...]:
        number = request.num_output_tokens
        right = truth[request.request_id][number : number + guesses[next(calls) % len(guesses)]]
        return (*right, 1)

    world = World(
        num_blocks=num_blocks, block_size=4, max_num_batched_tokens=max_num_batched_tokens, scheduling_policy=policy,
        drafter=drafter,
    )  # fmt: skip
    for number, (num_prompt, max_tokens) in enumerate(lengths):
        prompt = list(range(1000 * number, 1000 * number + num_prompt))
        truth[f"r{number}"] = solo_output(prompt, max_tokens=max_tokens)
        world.add(f"r{number}", prompt, max_tokens=max_tokens, tenant=str(number % 2), priority=number % 3)
    world.run()
    assert world.outputs == truth
