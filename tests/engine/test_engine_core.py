"""The loop that joins scheduler and runner, and its in-process client."""

import pytest

from noria.config import SchedulerConfig
from noria.core.events import FinishReason
from noria.core.plan import StepPlan, StepResult
from noria.core.scheduler import PauseMode, Scheduler
from noria.engine.client import InProcessClient
from noria.engine.core import MAX_FAILED_STEPS, EngineCore
from noria.engine.messages import EngineRequest
from noria.errors import EngineError, RequestError
from noria.fakes import ManualClock, ScriptedRunner
from noria.observe.stats import EngineStats
from noria.sampling import SamplingParams


class FailingRunner(ScriptedRunner):
    """Fails in one step, before or after it has run the plan."""

    def __init__(self, fail_at: int, error: BaseException, *, after: bool) -> None:
        super().__init__(64, 4)
        self._fail_at, self._error, self._after = fail_at, error, after

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step == self._fail_at and not self._after:
            raise self._error
        result = super().execute(plan)
        if plan.step == self._fail_at:
            raise self._error
        return result


def engine(runner: ScriptedRunner | None = None, **config: int) -> EngineCore:
    limits = SchedulerConfig(max_model_len=128, num_blocks=64, block_size=4, **config)
    return EngineCore(Scheduler(limits), runner or ScriptedRunner(64, 4), clock=ManualClock())


def request(request_id: str, num_prompt: int = 5, **sampling: int) -> EngineRequest:
    prompt = tuple(range(10, 10 + num_prompt))
    return EngineRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling=SamplingParams(**{"max_tokens": 3} | sampling)
    )


def test_a_request_that_fails_alone_is_logged_and_the_others_go_on(caplog):
    class Partly(ScriptedRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            result = super().execute(plan)
            if "bad" not in result.token_ids:
                return result
            return StepResult({"good": result.token_ids["good"]}, failed={"bad": "no sense in its logits"})

    core = engine(Partly(64, 4))
    for name in ("bad", "good"):
        core.add_request(request(name, num_prompt=3))
    events = [event for _ in range(4) for event in core.step()]
    ends = {event.request_id: event for event in events if event.finish_reason is not None}
    assert ends["bad"].finish_reason is FinishReason.ERROR
    assert ends["bad"].error == "no sense in its logits"
    assert ends["good"].finish_reason is FinishReason.LENGTH
    assert caplog.messages == ["step 1: request bad failed: no sense in its logits"]


def test_a_request_runs_to_its_end():
    client = InProcessClient(engine())
    client.submit(request("r"))
    events = []
    while client.has_work:
        events += client.poll()
    assert [len(event.token_ids) for event in events] == [1, 1, 1]
    assert [event.finish_reason for event in events] == [None, None, FinishReason.LENGTH]


def test_a_refused_request_leaves_no_trace():
    client = InProcessClient(engine())
    with pytest.raises(RequestError):
        client.submit(request("r", num_prompt=200))
    assert not client.has_work


def test_unseeded_requests_get_seeds_from_the_engines_own_stream():
    def seeds_given() -> list[int]:
        core = engine()
        for request_id in ("a", "b"):
            core.add_request(request(request_id, num_prompt=2))
        core.add_request(request("c", num_prompt=2, seed=-1))
        core.step()
        return [admitted.seed for admitted in core.records[-1].plan.admitted]

    first = seeds_given()
    assert first == seeds_given(), "the stream is replayable"
    assert first[0] != first[1]
    assert first[2] == 2**64 - 1


@pytest.mark.parametrize("after", [False, True])
def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(after, caplog):
    core = engine(FailingRunner(2, RuntimeError("out of smoke"), after=after), max_num_seqs=2)
    for request_id in ("a", "b", "c"):
        core.add_request(request(request_id))
    core.step()
    events = core.step()
    assert [(e.request_id, e.finish_reason, e.error) for e in events] == [
        ("a", FinishReason.ERROR, "RuntimeError: out of smoke"),
        ("b", FinishReason.ERROR, "RuntimeError: out of smoke"),
    ]
    assert "out of smoke" in caplog.text
    events = []
    while core.has_work:
        events += core.step()
    assert [e.finish_reason for e in events if e.finish_reason] == [FinishReason.LENGTH]
    core.scheduler.check()
    assert core.scheduler.kv.pool.num_free_blocks == 64
    endings = [ending.reason for record in core.records for ending in record.endings]
    assert sorted(endings) == ["error", "error", "length"], "every end is on record"
    assert [record.error for record in core.records][:3] == [None, "RuntimeError: out of smoke", None]


def test_a_step_that_never_reached_the_worker_does_not_swallow_endings():
    """Otherwise the rows of requests that ended before it would stay with the worker for good."""
    runner = FailingRunner(2, MemoryError(), after=False)
    core = engine(runner)
    core.add_request(request("ended", max_tokens=1))
    core.add_request(request("failed"))
    while core.has_work:
        core.step()
    told = [request_id for plan in runner.plans for request_id in plan.finished]
    assert told == ["ended", "failed"]


def test_an_interrupt_ends_the_requests_of_the_step_and_goes_on_up():
    core = engine(FailingRunner(1, KeyboardInterrupt(), after=True))
    core.add_request(request("a"))
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert core.num_unfinished == 0
    core.add_request(request("b"))
    while core.has_work:
        core.step()
    core.scheduler.check()


class DeafRunner(ScriptedRunner):
    """Runs the plan, but forgets to report the tokens of one request."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        return StepResult({r: tokens for r, tokens in result.token_ids.items() if r != "deaf"})


def test_a_token_that_is_owed_and_missing_ends_the_step_and_nobody_waits_for_ever():
    core = engine(DeafRunner(64, 4))
    core.add_request(request("deaf"))
    core.add_request(request("other", num_prompt=3))
    events = core.step()
    assert [e.finish_reason for e in events] == [FinishReason.ERROR] * 2
    assert "deaf" in (events[0].error or "")
    assert core.num_unfinished == 0
    core.scheduler.check()


def test_an_engine_that_only_fails_gives_up():
    class BrokenRunner(ScriptedRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            raise RuntimeError("broken for good")

    core = engine(BrokenRunner(64, 4))
    for i in range(MAX_FAILED_STEPS - 1):
        core.add_request(request(f"r{i}"))
        core.step()
    core.add_request(request("last"))
    with pytest.raises(EngineError, match=r"10 steps in a row failed.*broken for good"):
        core.step()


def test_records_do_not_hold_on_to_prompts():
    core = engine()
    core.add_request(request("r", num_prompt=50))
    core.step()
    [admitted] = core.records[-1].plan.admitted
    assert (admitted.request_id, admitted.num_prompt_tokens, admitted.token_ids) == ("r", 50, ())


class TickingClock(ManualClock):
    """A second passes whenever somebody looks."""

    def __call__(self) -> float:
        self.advance(1)
        return self.now_s


class SlowRunner(ScriptedRunner):
    """Takes ten seconds for a step."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(64, 4)
        self._clock = clock

    def execute(self, plan: StepPlan) -> StepResult:
        self._clock.advance(10)
        return super().execute(plan)


def test_where_the_time_goes_is_counted_while_there_is_something_to_run():
    clock = TickingClock()
    core = EngineCore(
        Scheduler(SchedulerConfig(max_model_len=128, num_blocks=64, block_size=4)), SlowRunner(clock), clock=clock
    )
    stats = EngineStats(64)

    def step(pause_s: float) -> None:
        clock.advance(pause_s)
        core.step()
        stats.add(core.records[-1])

    for request_id in ("first", "second"):
        core.add_request(request(request_id))  # three tokens
        for pause_s in (1000, 5, 5, 5):  # the last step only tells the worker; before the first there was nothing to do
            step(pause_s)
    assert stats.phase_s == {"schedule": 6 * 1, "execute": 6 * (10 + 1), "between": 4 * (5 + 1)}


@pytest.mark.parametrize(("mode", "resumes"), [(PauseMode.KEEP, True), (PauseMode.WAIT, False)])
def test_a_pause_is_no_time_between_steps(mode, resumes):
    """While a pause waits for those that have begun, the time between their steps counts from the second on."""
    clock = TickingClock()
    core = EngineCore(
        Scheduler(SchedulerConfig(max_model_len=128, num_blocks=64, block_size=4)), SlowRunner(clock), clock=clock
    )
    stats = EngineStats(64)

    def step(pause_s: float) -> None:
        clock.advance(pause_s)
        core.step()
        stats.add(core.records[-1])

    core.add_request(request("r"))  # three tokens
    step(0)
    core.pause(mode)
    clock.advance(60)
    if resumes:
        core.resume()
    step(5)
    step(5)
    assert stats.phase_s["between"] == 5 + 1


def test_a_failed_step_took_its_time_too():
    clock = TickingClock()
    runner = FailingRunner(1, RuntimeError("out of smoke"), after=True)
    core = EngineCore(Scheduler(SchedulerConfig(max_model_len=128, num_blocks=64, block_size=4)), runner, clock=clock)
    core.add_request(request("r"))
    core.step()
    [record] = core.records
    assert (record.started_s - record.planned_s, record.updated_s - record.started_s) == (1, 1)
