"""Clients that hang up, or read slowly: nothing is leaked, and nobody else is held up."""

import asyncio
import json
import socket
import statistics
import time

import pytest
from serving import Server, running_server


async def open_call(server: Server, body: dict, receive_buffer: int | None = None):
    """Sends a completion request on a raw connection and returns its streams."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (server.host, server.port))
    limit = 2**16 if receive_buffer is None else receive_buffer
    reader, writer = await asyncio.open_connection(sock=connection, limit=limit)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


async def open_and_cut(server: Server, body: dict, num_chunks: int, after_s: float = 0.0) -> None:
    reader, writer = await open_call(server, body)
    for _ in range(num_chunks):
        assert await reader.readuntil(b"data: ")
    await asyncio.sleep(after_s)
    writer.transport.abort()


async def many(calls, at_once: int) -> None:
    gate = asyncio.Semaphore(at_once)

    async def one(call) -> None:
        async with gate:
            await call

    await asyncio.gather(*map(one, calls))


def latency_s(server: Server) -> float:
    """Of a normal request: the median of five."""
    times = []
    for i in range(5):
        start = time.monotonic()
        assert server.complete(prompt=f"normal {i}", max_tokens=20).status == 200
        times.append(time.monotonic() - start)
    return statistics.median(times)


@pytest.mark.anyio
async def test_cut_streams_and_dropped_calls_leave_nothing_behind():
    """The engine checks its invariants after every step and every ending, and would end the server."""
    with running_server({"checked": True, "num_blocks": 512, "max_model_len": 2048}) as server:
        before_s = await asyncio.to_thread(latency_s, server)
        body = {"prompt": "to be cut", "max_tokens": 2000}
        await many([open_and_cut(server, body | {"stream": True}, 2) for _ in range(500)], at_once=32)
        await many([open_and_cut(server, body, 0, after_s=0.05) for _ in range(200)], at_once=32)
        await asyncio.to_thread(server.wait_quiet)
        assert server.metric("request_success_total", finished_reason="abort") == 700
        assert server.metric("request_success_total", finished_reason="error") == 0
        after_s = await asyncio.to_thread(latency_s, server)
        print(f"latency before {before_s * 1e3:.1f} ms, after {after_s * 1e3:.1f} ms")
        assert server.process.poll() is None


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [True, False])
async def test_blocks_are_free_within_two_steps_of_a_hang_up(stream):
    """Steps of 0.2 s: after the hang-up at most two more are run for the request."""
    with running_server({"step_s": 0.2}) as server:
        body = {"prompt": "x", "max_tokens": 1000, "stream": stream}
        _, writer = await open_call(server, body)
        await asyncio.to_thread(server.wait_until, lambda: server.metric("generation_tokens_total") >= 2)
        at_hang_up = server.metric("generation_tokens_total")
        writer.transport.abort()
        await asyncio.to_thread(server.wait_quiet)
        assert server.metric("generation_tokens_total") - at_hang_up <= 2


@pytest.mark.anyio
async def test_a_hang_up_while_queued_leaves_the_queue():
    with running_server({"step_s": 0.05, "max_num_seqs": 1}) as server:
        _, first = await open_call(server, {"prompt": "x", "max_tokens": 1000})
        await asyncio.to_thread(server.wait_until, lambda: server.metric("num_requests_running") == 1)
        _, second = await open_call(server, {"prompt": "y", "max_tokens": 1000, "n": 4})
        await asyncio.to_thread(server.wait_until, lambda: server.metric("num_requests_waiting") == 4)
        second.transport.abort()
        await asyncio.to_thread(server.wait_until, lambda: server.metric("num_requests_waiting") == 0)
        assert server.metric("num_requests_running") == 1
        first.transport.abort()
        await asyncio.to_thread(server.wait_quiet)


async def gaps_of_normal_streams(server: Server, num_streams: int, num_tokens: int) -> list[float]:
    gaps: list[float] = []

    async def one(i: int) -> None:
        reader, writer = await open_call(server, {"prompt": f"n{i}", "max_tokens": num_tokens, "stream": True})
        last_s = None
        while (line := await reader.readline()) != b"data: [DONE]\n":
            if line.startswith(b"data: "):
                now_s = time.monotonic()
                if last_s is not None:
                    gaps.append(now_s - last_s)
                last_s = now_s
            assert line, "the stream ended early"
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*map(one, range(num_streams)))
    return gaps


@pytest.mark.anyio
async def test_a_slow_reader_is_aborted_at_its_limit_and_holds_nobody_up():
    engine = {"step_s": 0.005, "max_model_len": 60_000, "num_blocks": 8000}
    with running_server(engine, {"max_stream_backlog": 500}) as server:
        alone = await gaps_of_normal_streams(server, 20, 200)
        body = {"prompt": "slow", "max_tokens": 50_000, "stream": True}
        reader, writer = await open_call(server, body, receive_buffer=4096)

        async def read_a_byte_a_second() -> None:
            while await reader.read(1):
                await asyncio.sleep(1.0)

        slow = asyncio.create_task(read_a_byte_a_second())
        beside = await gaps_of_normal_streams(server, 20, 200)
        await asyncio.to_thread(
            server.wait_until, lambda: server.metric("request_success_total", finished_reason="abort") == 1, 60.0
        )
        await asyncio.to_thread(server.wait_quiet)
        assert any("reads too slowly" in line for line in server.log)
        slow.cancel()
        with pytest.raises(ConnectionResetError):  # it is cut, not waited for
            await asyncio.wait_for(reader.read(), 5.0)
        assert not any("ASGI callable returned" in line for line in server.log)
        writer.transport.abort()
        p99 = [sorted(gaps)[int(len(gaps) * 0.99)] for gaps in (alone, beside)]
        print(f"p99 gap alone {p99[0] * 1e3:.1f} ms, beside a slow reader {p99[1] * 1e3:.1f} ms")
        assert len(alone) == len(beside) == 20 * 199, "each stream has a chunk for every token"
