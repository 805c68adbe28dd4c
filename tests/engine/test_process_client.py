"""An engine in another process: real sockets, real processes, no model."""

import asyncio
import gc
import os
import signal
import time
import weakref
from functools import partial
from pathlib import Path

import pytest

from noria.core.events import FinishReason, RequestEvent
from noria.core.record import StepRecord
from noria.engine.launch import EngineProcess
from noria.engine.messages import EngineRequest
from noria.engine.process_client import ProcessClient
from noria.engine.streams import AsyncEngine
from noria.errors import ContextLengthError, EngineError
from noria.fakes.engine import build_failing_engine, build_scripted_engine
from noria.sampling import SamplingParams


def request(request_id: str, num_prompt: int = 5, **sampling: int) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(range(10, 10 + num_prompt)),
        sampling=SamplingParams(**{"max_tokens": 3} | sampling),
    )


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def records() -> list[StepRecord]:
    return []


@pytest.fixture
def client(records):
    client = ProcessClient(
        EngineProcess(partial(build_scripted_engine, checked=True, num_blocks=32, max_model_len=512)),
        on_record=records.append,
    )
    client.wait_ready()
    yield client
    client.close()


@pytest.fixture
def slow_client():
    client = ProcessClient(EngineProcess(partial(build_scripted_engine, step_s=0.02)))
    client.wait_ready()
    yield client
    client.close()


def drain(client: ProcessClient) -> list[RequestEvent]:
    events = []
    while client.has_work:
        client.wait(1.0)
        events += client.poll()
    return events


def test_it_gives_the_same_events_as_the_engine_in_process(client):
    core = build_scripted_engine(lambda text: None, checked=True)
    requests = [request(f"r{i}", num_prompt=3 + i, max_tokens=2 + i) for i in range(4)]
    expected: dict[str, list[RequestEvent]] = {}
    for r in requests:
        core.add_request(r)
    while core.has_work:
        for event in core.step():
            expected.setdefault(event.request_id, []).append(event)
    for r in requests:
        client.submit(r)
    got: dict[str, list[RequestEvent]] = {}
    for event in drain(client):
        got.setdefault(event.request_id, []).append(event)
    assert got == expected


def test_what_can_never_be_served_is_refused_before_it_travels(client):
    with pytest.raises(ContextLengthError):
        client.submit(request("r", num_prompt=600))
    assert not client.has_work


def test_a_refusal_by_the_engine_itself_comes_back_as_an_error(client, monkeypatch):
    monkeypatch.setattr("noria.engine.process_client.judge", lambda *a: 1)
    client.submit(request("r", num_prompt=600))
    [event] = drain(client)
    assert event.finish_reason is FinishReason.ERROR
    assert "600 tokens" in (event.error or "")


def test_records_arrive_and_a_finished_request_holds_nothing(client, records):
    client.submit(request("r", max_tokens=400))
    client.wait(1.0)
    client.poll()
    client.finish("r", FinishReason.ABORT)
    assert not client.has_work
    deadline = time.monotonic() + 5
    while not any(record.endings for record in records) and time.monotonic() < deadline:
        client.wait(0.1)
        client.poll()
    assert [e.reason for record in records for e in record.endings] == [FinishReason.ABORT]
    assert records[-1].num_free_blocks == 32


def test_an_idle_engine_gives_signs_of_life(client):
    before = client.last_heard_s
    deadline = time.monotonic() + 5
    while client.last_heard_s == before and time.monotonic() < deadline:
        client.wait(2.0)
        client.poll()
    assert 0 < client.last_heard_s - before < 3


def test_the_sockets_are_for_this_user_only(client):
    assert _socket_directory(client).stat().st_mode & 0o077 == 0


def poll_for_ever(client: ProcessClient) -> None:
    while True:
        client.wait(5.0)
        client.poll()


def test_a_killed_engine_is_noticed(slow_client):
    slow_client.submit(request("r", max_tokens=400))
    slow_client.poll()
    os.kill(slow_client.process.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(EngineError, match="exit code -9"):
        poll_for_ever(slow_client)
    assert time.monotonic() - start < 1.0


def test_the_engine_ignores_the_signals_that_the_parent_handles(slow_client):
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(slow_client.process.pid, number)
    slow_client.submit(request("r"))
    assert len(drain(slow_client)) == 3


@pytest.mark.parametrize(
    ("failure", "message"),
    [({"message": "no such model; give a path"}, "no such model; give a path"), ({"exit_code": 7}, "exit code 7")],
)
def test_a_failure_to_start_is_told(failure, message):
    client = ProcessClient(EngineProcess(partial(build_failing_engine, **failure)))
    try:
        with pytest.raises(EngineError, match=message):
            client.wait_ready()
    finally:
        client.close()


def test_a_failure_to_start_is_told_to_a_client_that_comes_late():
    engine = EngineProcess(partial(build_failing_engine, message="no such thing"))
    time.sleep(4.0)  # longer than an engine that ends in order waits for its messages to be taken
    client = ProcessClient(engine)
    try:
        with pytest.raises(EngineError, match="no such thing"):
            client.wait_ready()
    finally:
        client.close()


def test_close_ends_the_process_and_cleans_up(slow_client):
    slow_client.submit(request("r", max_tokens=400))
    slow_client.poll()
    directory = _socket_directory(slow_client)
    slow_client.close()
    slow_client.close()
    assert slow_client.process.exitcode == 0
    assert not Path(directory).exists()


async def read(stream) -> list[RequestEvent]:
    return [event async for events in stream for event in events]


@pytest.mark.anyio
async def test_streams_run_side_by_side(slow_client):
    engine = AsyncEngine(slow_client)
    streams = [engine.open([request(f"r{i}", max_tokens=5 + i)]) for i in range(8)]
    results = await asyncio.gather(*[read(stream) for stream in streams])
    assert [sum(len(e.token_ids) for e in events) for events in results] == [5 + i for i in range(8)]
    assert engine.num_unfinished == 0
    engine.shut_down()


@pytest.mark.anyio
async def test_a_closed_stream_ends_its_sequence(slow_client):
    engine = AsyncEngine(slow_client)
    stream = engine.open([request("r", max_tokens=4000), request("s", max_tokens=4000)])
    await anext(stream)
    engine.close(stream)
    engine.close(stream)
    await asyncio.wait_for(engine.wait_idle(), 1.0)
    assert not slow_client.has_work
    engine.shut_down()


@pytest.mark.anyio
async def test_a_closed_stream_does_not_keep_its_reader_in_memory(slow_client):
    """A reader knows its stream, and would be a circle with it that only the garbage collector finds, hours later."""

    class Reader:
        def __init__(self, engine):
            self.stream = engine.open([request("r", max_tokens=3)], max_pending=5, on_overflow=self.give_up)

        def give_up(self):
            raise AssertionError("it keeps up")

    engine = AsyncEngine(slow_client)
    reader = Reader(engine)
    await read(reader.stream)
    engine.close(reader.stream)
    known = weakref.ref(reader)
    gc.disable()
    try:
        del reader
        assert known() is None
    finally:
        gc.enable()
    engine.shut_down()


@pytest.mark.anyio
async def test_one_stream_carries_several_sequences_and_one_of_them_may_be_ended(slow_client):
    engine = AsyncEngine(slow_client)
    stream = engine.open([request(f"r{i}", max_tokens=30) for i in range(3)])
    num_tokens = {f"r{i}": 0 for i in range(3)}
    async for events in stream:
        for event in events:
            num_tokens[event.request_id] += len(event.token_ids)
        if num_tokens["r1"] >= 2:
            engine.finish(stream, "r1", FinishReason.STOP)
    assert (num_tokens["r0"], num_tokens["r2"]) == (30, 30)
    assert num_tokens["r1"] < 30
    engine.shut_down()


@pytest.mark.anyio
async def test_a_stream_opens_whole_or_not_at_all(slow_client):
    engine = AsyncEngine(slow_client)
    with pytest.raises(ContextLengthError):
        engine.open([request("fits"), request("does not", num_prompt=5000)])
    assert engine.num_unfinished == 0
    assert not slow_client.has_work
    engine.shut_down()


@pytest.mark.anyio
async def test_a_reader_that_falls_behind_is_told_once(slow_client):
    engine = AsyncEngine(slow_client)
    told = []
    stream = engine.open([request("r", max_tokens=60)], max_pending=10, on_overflow=lambda: told.append(True))
    await engine.wait_idle()
    assert told == [True]
    assert stream.num_pending == 60, "it is the reader's owner who decides what follows"
    engine.shut_down()


@pytest.mark.anyio
async def test_every_reader_hears_of_the_engines_death(slow_client):
    deaths = []
    engine = AsyncEngine(slow_client, on_death=deaths.append)
    streams = [engine.open([request(f"r{i}", max_tokens=4000)]) for i in range(3)]
    await anext(streams[0])
    os.kill(slow_client.process.pid, signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*map(read, streams), return_exceptions=True), 1.0)
    assert all(isinstance(result, EngineError) for result in results)
    assert len(deaths) == 1
    with pytest.raises(EngineError):
        engine.open([request("late")])
    await engine.wait_idle()


def _socket_directory(client: ProcessClient) -> Path:
    return Path(client._engine.address.removeprefix("ipc://")).parent
