"""Pause, resume, drain, reset, deadlines and refusals: in this process, and in an engine of its own process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from noria.config import SchedulerConfig
from noria.core.events import FinishReason, RequestEvent
from noria.core.plan import Limit
from noria.core.record import StepRecord
from noria.core.scheduler import PauseMode, Scheduler
from noria.engine.client import InProcessClient
from noria.engine.core import EngineCore
from noria.engine.launch import EngineProcess
from noria.engine.messages import EngineRequest
from noria.engine.process_client import ProcessClient
from noria.engine.streams import AsyncEngine
from noria.errors import EngineError, RequestError, UnavailableError
from noria.fakes import ManualClock, ScriptedRunner
from noria.fakes.engine import build_scripted_engine
from noria.fakes.tokenizer import ByteTokenizer
from noria.kv.events import AllCleared, BlockRemoved, BlockStored, KVEvent
from noria.kv.prefix import PrefixKey
from noria.observe.stats import EngineStats
from noria.sampling import SamplingParams
from noria.server.errors import as_api_error
from noria.server.generation import Generation
from support.gates import HELD, REFUSED, build_gated_engine

SHARED = tuple(range(50, 62))
"""Three full blocks of 4."""


def engine(clock: Callable[[], float] | None = None, **config: Any) -> EngineCore:
    limits = SchedulerConfig(**{"max_model_len": 128, "num_blocks": 64, "block_size": 4} | config)
    runner = ScriptedRunner(limits.num_blocks, 4)
    return EngineCore(Scheduler(limits), runner, clock=clock or ManualClock())


def request(request_id: str, prompt: tuple[int, ...] = (11, 12, 13), **rest: Any) -> EngineRequest:
    sampling = SamplingParams(max_tokens=rest.pop("max_tokens", 3))
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, **rest)


def run(core: EngineCore) -> list[RequestEvent]:
    events = []
    while core.has_work:
        events += core.step()
        core.scheduler.check()
    return events


def num_cached(core: EngineCore, request_id: str, **rest: Any) -> int:
    """How much of the shared prompt a new request finds."""
    core.add_request(request(request_id, (*SHARED, 1), **rest))
    return max(event.num_cached_tokens for event in run(core) if event.request_id == request_id)


# --- weights ---


def test_kv_of_other_weights_is_never_found():
    core = engine()
    core.weights_version = "W1"
    assert num_cached(core, "first") == 0
    assert num_cached(core, "again") == 12
    core.weights_version = "W2"
    assert num_cached(core, "swapped") == 0
    assert num_cached(core, "swapped again") == 12
    core.weights_version = "W1"
    assert num_cached(core, "back") == 0, "weights may have the name of earlier ones and be others"


def test_what_a_request_computes_across_a_change_of_weights_is_never_found():
    """It has run half of its prompt, and ends under the new weights."""
    core = engine(max_num_batched_tokens=8)
    core.weights_version = "W1"
    core.add_request(request("running", (*SHARED, 1), max_tokens=20))
    core.step()
    core.weights_version = "W2"
    run(core)
    assert num_cached(core, "new") == 0
    core.weights_version = "W1"
    assert num_cached(core, "back") == 0


def test_a_request_that_waits_across_a_change_of_weights_goes_by_the_new_name():
    """All of its KV is computed with the new weights, so whoever comes later may have it, and only under that name."""
    core = engine(max_num_seqs=1, max_num_batched_tokens=8)
    core.weights_version = "W1"
    core.add_request(request("running", (*SHARED, 1), max_tokens=20))
    core.add_request(request("waiting", (*SHARED, 2), max_tokens=20))
    core.step()
    core.weights_version = "W2"
    run(core)
    assert num_cached(core, "new") == 12
    core.weights_version = "W1"
    assert num_cached(core, "back") == 0


def test_a_client_cannot_name_the_weights():
    core = engine()
    core.weights_version = "W2"
    assert num_cached(core, "a") == 0
    assert num_cached(core, "b", prefix_key=PrefixKey(weights_version="W1")) == 12


# --- cache and its events ---


def test_a_reset_is_complete_and_disturbs_nobody():
    core = engine()
    undisturbed = engine()
    for each in (core, undisturbed):
        each.add_request(request("r", (*SHARED, 1), max_tokens=9))
        each.step()
    core.reset_prefix_cache()
    assert run(core) == run(undisturbed)
    assert num_cached(core, "later") == 0


def test_a_subscriber_that_fails_is_told_nothing_more_and_nobody_else_notices(caplog: pytest.LogCaptureFixture):
    core = engine()
    calls = []

    def away(events: tuple[KVEvent, ...]) -> None:
        calls.append(events)
        raise ConnectionError("router is away")

    core.subscribe_kv_events(away)
    assert num_cached(core, "first") == 0
    core.reset_prefix_cache()
    assert num_cached(core, "second") == 0
    assert num_cached(core, "third") == 12
    assert len(calls) == 1
    assert "router is away" in caplog.text


def test_kv_events_reach_the_subscriber_and_a_reset_at_once():
    core = engine(num_blocks=8, max_model_len=32)
    told: list[KVEvent] = []
    core.subscribe_kv_events(told.extend)
    assert num_cached(core, "first") == 0
    stored = [event for event in told if isinstance(event, BlockStored)]
    assert [event.token_ids for event in stored[:3]] == [SHARED[i : i + 4] for i in (0, 4, 8)]
    core.add_request(request("other", tuple(range(100, 130)), max_tokens=2))
    run(core)
    assert {event.block_hash for event in told if isinstance(event, BlockRemoved)} >= {stored[2].block_hash}
    assert not any(isinstance(event, AllCleared) for event in told)
    core.reset_prefix_cache()
    assert told[-1] == AllCleared()


# --- pauses, in process ---


def test_a_pause_that_keeps_everything_has_no_work_until_it_is_resumed():
    core = engine()
    client = InProcessClient(core)
    client.submit(request("running", max_tokens=6))
    before = client.poll()
    client.pause(PauseMode.KEEP)
    assert not client.has_work
    client.submit(request("new"))
    stats = EngineStats(64)
    for record in core.records:
        stats.add(record)
    assert client.has_work, "its arrival is still to be recorded"
    assert client.poll() == []
    stats.add(core.records[-1])
    assert not client.has_work
    assert (stats.num_running, stats.num_waiting, stats.waiting_by_reason[Limit.PAUSED]) == (1, 1, 1)
    client.resume()
    events = before + run(core)
    assert [e.request_id for e in events if e.finish_reason is FinishReason.LENGTH] == ["new", "running"]


def test_a_pause_that_waits_ends_what_has_begun():
    core = engine(max_num_seqs=1)
    client = InProcessClient(core)
    for request_id in ("begun", "waiting"):
        client.submit(request(request_id))
    client.poll()
    client.pause(PauseMode.WAIT)
    assert {event.request_id for event in run(core)} == {"begun"}
    assert not client.has_work
    client.resume()
    assert {event.request_id for event in run(core)} == {"waiting"}


def test_those_that_a_pause_ends_have_their_last_event():
    client = InProcessClient(engine(max_num_seqs=1))
    for request_id in ("running", "waiting"):
        client.submit(request(request_id))
    client.poll()
    client.pause(PauseMode.ABORT)
    assert client.has_work
    events = client.poll()
    assert [(e.request_id, e.finish_reason) for e in events] == [("running", "abort"), ("waiting", "abort")]
    assert not client.has_work


def test_a_deadline_passes_during_a_pause():
    clock = ManualClock()
    core = engine(clock, request_deadline_s=5.0)
    core.add_request(request("r"))
    core.step()
    core.pause(PauseMode.KEEP)
    assert not core.has_work
    assert core.seconds_to_deadline() == 5.0
    clock.advance(6.0)
    assert core.has_work
    [event] = core.step()
    assert (event.finish_reason, event.error_code) == (FinishReason.TIMEOUT, "deadline_exceeded")
    assert not core.has_work
    assert core.seconds_to_deadline() is None


# --- refusals and explanations, in process ---


def test_what_has_no_place_now_is_raised_and_counted():
    core = engine(max_num_seqs=1, max_num_queued_reqs=1)
    client = InProcessClient(core)
    for request_id in ("a", "b"):
        client.submit(request(request_id))
    for _ in range(2):
        with pytest.raises(UnavailableError, match="the queue is full: 0 requests run and 2 wait"):
            client.submit(request("c"))
    run(core)
    client.drain()
    with pytest.raises(UnavailableError, match="draining"):
        client.submit(request("d"))
    assert client.has_work, "the refusal is still to be recorded"
    run(core)
    stats = EngineStats(64)
    for record in core.records:
        stats.add(record)
    assert stats.num_refused == {"queue_full": 2, "draining": 1}
    assert stats.num_arrived == stats.num_finished[FinishReason.LENGTH] == 2


def test_an_explanation_says_where_a_sequence_stands():
    core = engine(max_num_seqs=1)
    client = InProcessClient(core)
    for request_id in ("a", "b", "c"):
        client.submit(request(request_id))
    client.poll()
    explanation = client.explain("c")
    assert explanation is not None
    assert (explanation.state, explanation.position, explanation.limit) == ("waiting", 1, Limit.MAX_NUM_SEQS)
    client.finish("c", FinishReason.ABORT)
    assert client.explain("c") is None


# --- an engine in its own process ---


@pytest.fixture
def records() -> list[StepRecord]:
    return []


@pytest.fixture
def start(records: list[StepRecord]) -> Iterator[Callable[..., ProcessClient]]:
    clients: list[ProcessClient] = []

    def start_one(build: Any = build_scripted_engine, **arguments: Any) -> ProcessClient:
        client = ProcessClient(EngineProcess(partial(build, **arguments)), on_record=records.append)
        clients.append(client)
        client.wait_ready()
        return client

    yield start_one
    for client in clients:
        client.close()


def poll_for(client: ProcessClient, seconds: float) -> list[RequestEvent]:
    """What comes in a given time, or until nothing is unfinished."""
    events = []
    until_s = time.monotonic() + seconds
    while client.has_work and time.monotonic() < until_s:
        client.wait(0.05)
        events += client.poll()
    return events


def cpu_s(client: ProcessClient) -> float:
    """Processor time that the engine's process has had."""
    fields = Path(f"/proc/{client.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_a_paused_process_stands_still_and_goes_on(start, records):
    client = start(step_s=0.01, checked=True)
    client.submit(request("r", max_tokens=200))
    client.pause(PauseMode.KEEP)
    before = poll_for(client, 0.3)  # the pause may come a step later
    before_s, num_records = cpu_s(client), len(records)
    assert poll_for(client, 0.5) == []
    assert cpu_s(client) - before_s < 0.1
    assert len(records) == num_records
    client.resume()
    assert len(before + poll_for(client, 20)) == 200


def test_those_that_a_pause_ends_in_another_process_have_their_last_event(start):
    client = start(step_s=0.01)
    for request_id in ("r", "s"):
        client.submit(request(request_id, max_tokens=1000))
    begun = poll_for(client, 0.2)
    assert {event.request_id for event in begun} == {"r", "s"}
    client.pause(PauseMode.ABORT)
    client.submit(request("later"))
    events = poll_for(client, 0.5)
    assert {e.request_id: e.finish_reason for e in events if e.finish_reason} == {"r": "abort", "s": "abort"}
    client.resume()
    assert poll_for(client, 5)[-1].finish_reason is FinishReason.LENGTH


def test_a_reset_of_the_cache_travels(start):
    client = start(checked=True, block_size=4)

    def cached_tokens(request_id: str) -> int:
        client.submit(request(request_id, (*SHARED, 1)))
        return max(event.num_cached_tokens for event in poll_for(client, 5))

    assert [cached_tokens("a"), cached_tokens("b")] == [0, 12]
    client.reset_prefix_cache()
    assert cached_tokens("c") == 0


def test_a_drained_engine_refuses_what_is_submitted_after_and_ends_what_was_before(start):
    client = start()
    client.submit(request("before"))
    client.drain()
    client.submit(request("after"))
    ends = {e.request_id: e for e in poll_for(client, 5) if e.finish_reason}
    assert ends["before"].finish_reason is FinishReason.LENGTH
    assert (ends["after"].finish_reason, ends["after"].error_code) == (FinishReason.ERROR, "draining")
    assert isinstance(ends["after"].as_exception(), UnavailableError)


def test_a_deadline_passes_in_time_while_the_process_has_nothing_to_do(start):
    client = start(scheduling={"request_deadline_s": 0.3})
    client.pause(PauseMode.KEEP)
    start_s = time.monotonic()
    client.submit(request("r"))
    [event] = poll_for(client, 5)
    assert event.finish_reason is FinishReason.TIMEOUT
    assert 0.3 <= time.monotonic() - start_s < 0.8, "not only with the next heartbeat"


def test_requests_that_wait_for_something_outside_do_not_keep_the_process_busy(start, records):
    client = start(build_gated_engine)
    client.submit(request("held", (HELD, 1)))
    poll_for(client, 0.2)
    before_s = cpu_s(client)
    assert poll_for(client, 1.0) == []
    assert cpu_s(client) - before_s < 0.6
    client.submit(request("other"))
    assert len(poll_for(client, 0.5)) == 3, "others are served as ever"
    assert records[-1].plan.held[0].limit is Limit.GRAMMAR
    assert len(records) < 3000


def test_every_submission_is_answered_before_the_step_it_is_in(start):
    client = start(step_s=0.5)
    accepted: list[str] = []
    client.on_accepted = accepted.append
    client.submit(request("a"))
    client.submit(request("b"))
    start_s = time.monotonic()
    while not accepted:
        client.wait(1.0)
        assert client.poll() == []
    assert time.monotonic() - start_s < 0.4
    assert accepted == ["a", "b"]


# --- streams ---


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_a_stream_of_which_one_sequence_is_refused_fails_as_a_whole(start, records):
    client = start(step_s=0.01, scheduling={"max_num_queued_reqs": 0}, max_num_seqs=2)
    async_engine = AsyncEngine(client)
    stream = async_engine.open([request(f"r{i}", max_tokens=500) for i in range(3)])
    for _ in range(2):
        with pytest.raises(UnavailableError, match="the queue is full"):
            await asyncio.wait_for(stream.accepted(), 5)
    with pytest.raises(UnavailableError):
        await anext(stream)
    assert async_engine.num_unfinished == 0
    fits = async_engine.open([request("r3")])
    await asyncio.wait_for(fits.accepted(), 5)
    assert sum([len(events) async for events in fits]) == 3
    assert [e.reason for record in records for e in record.endings] == ["abort", "abort", "length"]
    async_engine.shut_down()


@pytest.mark.anyio
async def test_what_is_never_served_is_the_clients_mistake_also_when_it_is_found_late(start):
    async_engine = AsyncEngine(start(build_gated_engine))
    prompts, sampling = [[1, 2], [REFUSED, 2]], SamplingParams(max_tokens=500)
    names = {"call_id": "call", "prefix_key": PrefixKey()}
    with Generation(async_engine, ByteTokenizer(), (), prompts, sampling, **names) as generation:
        await asyncio.wait_for(generation.accepted(), 5)
        with pytest.raises(RequestError, match="nobody ever passes") as caught:
            await generation.wait()
    error = as_api_error(caught.value)
    assert (error.status, error.content.error.code) == (400, "refused")
    await asyncio.wait_for(async_engine.wait_idle(), 5)
    async_engine.shut_down()


@pytest.mark.anyio
async def test_a_death_before_the_answer_is_told_to_those_who_wait_for_it(start):
    client = start()
    async_engine = AsyncEngine(client)
    os.kill(client.process.pid, signal.SIGSTOP)  # it never answers
    stream = async_engine.open([request("r")])
    client.process.kill()
    with pytest.raises(EngineError, match="engine process ended"):
        await asyncio.wait_for(stream.accepted(), 5)


@pytest.mark.anyio
async def test_what_is_aborted_before_the_engine_has_heard_of_it_has_its_last_event(start):
    async_engine = AsyncEngine(start(step_s=0.01))
    stream = async_engine.open([request("c-0", max_tokens=500), request("c-1", max_tokens=500)])
    other = async_engine.open([request("d-0", max_tokens=2)])
    assert async_engine.unfinished("c") == ["c-0", "c-1"]
    assert async_engine.abort(["c-0", "c-1", "c-0", "nobody"]) == 2
    await asyncio.wait_for(stream.accepted(), 5)
    ended = [(event.request_id, event.finish_reason) async for events in stream for event in events]
    assert ended == [("c-0", FinishReason.ABORT), ("c-1", FinishReason.ABORT)]
    assert sum([len(events) async for events in other]) == 2
    async_engine.shut_down()


@pytest.mark.anyio
async def test_the_engine_answers_when_it_has_done_what_was_asked(start):
    async_engine = AsyncEngine(start(step_s=0.01, max_num_seqs=1))
    stream = async_engine.open([request("a", max_tokens=500), request("b", max_tokens=500)])
    await asyncio.wait_for(stream.accepted(), 5)
    await asyncio.wait_for(anext(stream), 5)
    await asyncio.wait_for(async_engine.pause(PauseMode.KEEP), 5)
    first = await asyncio.wait_for(async_engine.explain(["a", "nobody", "b"]), 5)
    assert [(e.request_id, e.state) for e in first] == [("a", "running"), ("b", "waiting")]
    await asyncio.sleep(0.1)
    assert await asyncio.wait_for(async_engine.explain(["a", "b"]), 5) == first, "it stands still"
    await asyncio.wait_for(async_engine.resume(), 5)
    await asyncio.wait_for(anext(stream), 5)
    await asyncio.wait_for(async_engine.pause(PauseMode.ABORT), 5)
    assert await asyncio.wait_for(async_engine.explain(["a", "b"]), 5) == ()
    async_engine.shut_down()


@pytest.mark.anyio
async def test_a_pause_lasts_from_its_question_until_the_engine_goes_on(start):
    """Steps of 0.3 s, and the engine answers between them: also those who do not wait for it any longer."""
    async_engine = AsyncEngine(start(step_s=0.3))
    stream = async_engine.open([request("a", max_tokens=100)])
    await asyncio.wait_for(anext(stream), 5)
    pausing = asyncio.ensure_future(async_engine.pause(PauseMode.WAIT))
    await asyncio.sleep(0)
    assert async_engine.paused is PauseMode.WAIT
    await asyncio.wait_for(pausing, 5)
    resuming = asyncio.ensure_future(async_engine.resume())
    await asyncio.sleep(0)
    again = asyncio.ensure_future(async_engine.pause(PauseMode.KEEP))
    await asyncio.wait_for(asyncio.gather(resuming, again), 5)
    assert async_engine.paused is PauseMode.KEEP, "the resume was before it"
    await asyncio.wait_for(async_engine.resume(), 5)
    assert async_engine.paused is None
    await asyncio.wait_for(async_engine.pause(PauseMode.WAIT), 5)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(async_engine.resume(), 0.01)
    assert async_engine.paused is PauseMode.WAIT, "it is within a step"
    await asyncio.wait_for(async_engine.explain([]), 5)
    assert async_engine.paused is None
    async_engine.shut_down()


@pytest.mark.anyio
async def test_a_question_that_a_dead_engine_cannot_answer_fails(start):
    client = start()
    async_engine = AsyncEngine(client)
    os.kill(client.process.pid, signal.SIGSTOP)
    asked = asyncio.ensure_future(async_engine.reset_prefix_cache())
    await asyncio.sleep(0.05)
    client.process.kill()
    for question in (asked, async_engine.resume()):
        with pytest.raises(EngineError, match="engine process ended"):
            await asyncio.wait_for(question, 5)
