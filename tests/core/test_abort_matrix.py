"""Aborting in every state, one sequence or four that share a prompt, all of them or one.

After each: every block is free again and the tables are empty, the neighbours say what they would have said alone, so
do the siblings that were left, and every request has exactly one last event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from histories import FakeGrammar, assert_nothing_is_held, assert_said_as_alone, end_of_all, guess_right
from worlds import World

from noria.core.events import FinishReason, RequestEvent
from noria.core.plan import Limit, StepPlan
from noria.core.request import RequestState
from noria.core.scheduler import PauseMode
from noria.kv.prefix import PrefixKey

PROMPT = list(range(50, 70))
NEIGHBOUR = "neighbour"


@dataclass
class Scene:
    """A world in which the sequences `ids` have come to some state; `plan` is being executed just then, if any."""

    n: int
    world: World
    plan: StepPlan | None = None
    grammars: list[FakeGrammar] = field(default_factory=list)

    @property
    def ids(self) -> list[str]:
        return [f"r{i}" for i in range(self.n)]

    def arrive(self, *, prompt: list[int] = PROMPT, max_tokens: int = 8, **request: object) -> None:
        for request_id in self.ids:
            self.world.add(request_id, prompt, max_tokens=max_tokens, **request)

    def limit_of(self, request_id: str) -> Limit | None:
        """What held the request in the last step."""
        plan = self.world.runner.plans[-1]
        own = [h.limit for h in plan.held if h.request_id == request_id]
        if own or plan.admission_end is None or request_id not in self.world.scheduler.waiting:
            return own[0] if own else None
        return plan.admission_end.limit

    def request(self, i: int = 0):
        return self.world.requests[f"r{i}"]

    def steps_until(self, holds: Callable[[], bool]) -> None:
        for _ in range(100):
            if holds():
                return
            self.world.step()
        raise AssertionError("the state was not reached")


def roomy(n: int, *, budget: int = 40, **config: object) -> Scene:
    """A neighbour that decodes all the while."""
    world = World(num_blocks=40, max_num_batched_tokens=budget, **config)
    world.add(NEIGHBOUR, 5, max_tokens=40)
    world.step()
    return Scene(n, world)


# --- one function per state ---


def queued(n: int) -> Scene:
    scene = roomy(n, max_num_seqs=1)
    scene.arrive()
    scene.world.step()
    assert scene.limit_of("r0") is Limit.MAX_NUM_SEQS
    return scene


def just_arrived(n: int) -> Scene:
    scene = roomy(n)
    scene.arrive()
    return scene


def held_for_its_prefix(n: int) -> Scene:
    scene = roomy(n, long_prefill_token_threshold=4)
    scene.world.add("first", [*PROMPT, 1], max_tokens=6)
    scene.arrive()
    scene.world.step()
    assert scene.limit_of("r0") is Limit.PREFIX_BEING_COMPUTED
    return scene


def held_for_memory(n: int) -> Scene:
    scene = Scene(n, World(num_blocks=10))
    scene.world.add(NEIGHBOUR, 27, max_tokens=13)
    scene.arrive()
    scene.world.step()
    assert scene.limit_of("r0") is Limit.KV_BLOCKS
    return scene


def mid_chunk(n: int) -> Scene:
    scene = roomy(n, budget=12, enable_prefix_caching=False)
    scene.arrive()
    scene.world.step()
    assert all(0 < scene.request(i).num_computed < 20 for i in range(min(2, n)))
    return scene


def mid_chunk_with_siblings_waiting_for_it(n: int) -> Scene:
    scene = roomy(n, budget=12)
    scene.arrive()
    scene.world.step()
    assert 0 < scene.request().num_computed < 20
    assert all(scene.limit_of(f"r{i}") is Limit.PREFIX_BEING_COMPUTED for i in range(1, n))
    return scene


def in_its_first_chunk(n: int) -> Scene:
    scene = roomy(n, budget=12)
    scene.arrive()
    scene.plan = scene.world.schedule()
    assert scene.plan.num_scheduled_tokens["r0"] == 11
    return scene


def in_its_last_chunk(n: int) -> Scene:
    scene = roomy(n, budget=12)
    scene.arrive()
    scene.world.step()
    scene.plan = scene.world.schedule()
    assert scene.request().num_computed + scene.plan.num_scheduled_tokens["r0"] == 20
    return scene


def at_its_first_token(n: int) -> Scene:
    scene = roomy(n)
    scene.arrive()
    scene.steps_until(lambda: scene.request(n - 1).num_output_tokens == 1)
    return scene


def decoding(n: int) -> Scene:
    scene = roomy(n)
    scene.arrive()
    scene.steps_until(lambda: all(scene.request(i).num_output_tokens >= 3 for i in range(n)))
    return scene


def in_a_decode_step(n: int) -> Scene:
    scene = decoding(n)
    scene.plan = scene.world.schedule()
    return scene


def tight(n: int) -> Scene:
    """An older neighbour outgrows the pool."""
    scene = Scene(n, World(num_blocks=12, adaptive_watermark=False))
    scene.world.add(NEIGHBOUR, 9, max_tokens=39)
    scene.world.step()
    scene.arrive(max_tokens=20)
    return scene


def preempted(n: int) -> Scene:
    scene = tight(n)
    scene.steps_until(lambda: any(scene.request(i).state is RequestState.PREEMPTED for i in range(n)))
    return scene


def preempted_in_this_step(n: int) -> Scene:
    scene = tight(n)
    for _ in range(100):
        scene.plan = scene.world.schedule()
        if scene.plan.preempted:
            return scene
        scene.world.update(scene.plan)
    raise AssertionError("nobody was preempted")


def resumed(n: int) -> Scene:
    scene = preempted(n)
    scene.world.finish(NEIGHBOUR)
    scene.steps_until(
        lambda: any(
            scene.request(i).num_preemptions and scene.request(i).state is RequestState.RUNNING for i in range(n)
        )
    )
    return scene


def waiting_for_a_grammar(n: int) -> Scene:
    scene = roomy(n)
    scene.grammars = [FakeGrammar()]
    scene.arrive(grammar=scene.grammars[0])
    scene.world.step()
    assert scene.limit_of("r0") is Limit.GRAMMAR
    return scene


def waiting_for_an_adapter(n: int) -> Scene:
    scene = roomy(n, max_adapters=1)
    scene.world.add("other", 9, max_tokens=9, prefix_key=PrefixKey(adapter="a"))
    scene.world.step()
    scene.arrive(prefix_key=PrefixKey(adapter="b"))
    scene.world.step()
    assert scene.limit_of("r0") is Limit.ADAPTERS
    return scene


def in_the_step_it_finishes_in(n: int) -> Scene:
    scene = roomy(n)
    scene.arrive(max_tokens=4)
    scene.steps_until(lambda: scene.request().num_output_tokens == 3)
    scene.plan = scene.world.schedule()
    return scene


def finishing_in_its_first_step(n: int) -> Scene:
    scene = roomy(n)
    scene.arrive(max_tokens=1)
    scene.plan = scene.world.schedule()
    assert scene.plan.num_scheduled_tokens["r0"] == 20
    return scene


def with_drafts_in_flight(n: int) -> Scene:
    scene = roomy(n, drafter=guess_right)
    scene.arrive(max_tokens=20)
    scene.steps_until(lambda: all(scene.request(i).num_output_tokens >= 1 for i in range(n)))
    scene.plan = scene.world.schedule()
    assert "r0" in scene.plan.drafts
    return scene


def paused_to_keep(n: int) -> Scene:
    scene = decoding(n)
    scene.world.scheduler.pause(PauseMode.KEEP, scene.world.clock())
    assert scene.world.step().is_empty
    return scene


def paused_to_wait_while_running(n: int) -> Scene:
    scene = decoding(n)
    scene.world.scheduler.pause(PauseMode.WAIT, scene.world.clock())
    assert "r0" in scene.world.step().num_scheduled_tokens
    return scene


def paused_to_wait_while_queued(n: int) -> Scene:
    scene = roomy(n)
    scene.world.scheduler.pause(PauseMode.WAIT, scene.world.clock())
    scene.arrive()
    scene.world.step()
    assert scene.limit_of("r0") is Limit.PAUSED
    return scene


def paused_in_a_step(n: int) -> Scene:
    scene = in_a_decode_step(n)
    scene.world.scheduler.pause(PauseMode.KEEP, scene.world.clock())
    return scene


def draining(n: int) -> Scene:
    scene = decoding(n)
    scene.world.scheduler.drain()
    scene.world.step()
    return scene


def after_a_reset(n: int) -> Scene:
    scene = mid_chunk_with_siblings_waiting_for_it(n)
    scene.world.scheduler.reset_prefix_cache()
    scene.world.step()
    return scene


STATES = [
    just_arrived, queued, held_for_its_prefix, held_for_memory, mid_chunk, mid_chunk_with_siblings_waiting_for_it,
    in_its_first_chunk, in_its_last_chunk, at_its_first_token, decoding, in_a_decode_step, preempted,
    preempted_in_this_step, resumed, waiting_for_a_grammar, waiting_for_an_adapter, in_the_step_it_finishes_in,
    finishing_in_its_first_step, with_drafts_in_flight, paused_to_keep, paused_to_wait_while_running,
    paused_to_wait_while_queued, paused_in_a_step, draining, after_a_reset,
]  # fmt: skip


@pytest.mark.parametrize(("n", "whom"), [(1, "all"), (4, "all"), (4, "the first"), (4, "the last")])
@pytest.mark.parametrize("reach", STATES)
def test_aborting_gives_all_back_and_disturbs_nobody(reach, n, whom):
    scene = reach(n)
    world = scene.world
    seen: list[RequestEvent] = []
    note = world.note
    world.note = lambda event: (seen.append(event), note(event))[1]
    ended_before = set(world.reasons)

    aborted = {"all": scene.ids, "the first": scene.ids[:1], "the last": scene.ids[-1:]}[whom]
    for request_id in aborted:
        event = world.finish(request_id)
        assert event is not None
        assert event.finish_reason is FinishReason.ABORT
        assert event.token_ids == ()
        assert world.finish(request_id) is None, "a second time is no error and no event"
    if scene.plan is not None:
        world.update(scene.plan)
    following = world.step()
    assert set(aborted) <= set(following.finished), "the worker is told"
    assert not following.num_scheduled_tokens.keys() & set(aborted)

    for grammar in scene.grammars:
        grammar.state = "ready"
    end_of_all(world)
    for request_id in world.requests.keys() - ended_before:
        last = [event for event in seen if event.request_id == request_id and event.finish_reason is not None]
        assert len(last) == 1
        assert [event for event in seen if event.request_id == request_id][-1] is last[0], "nothing after the last"
    assert_said_as_alone(world, outside={*aborted, *(r for r in ended_before if world.reasons[r] == "abort")})
    assert_nothing_is_held(world.scheduler)
