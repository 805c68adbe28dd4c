"""The part of `noria bench` that measures scheduler and KV memory alone, without any model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from noria.cli.bench import bench
from noria.cli.common import Label, print_result

__all__ = ["bench"]


@bench.command
def scheduler(
    *,
    policy: Annotated[str, Parameter(help="The scheduling policy.", metavar="POLICY")] = "fcfs",
    rounds: Annotated[int, Parameter(help="Medians are taken over so many.")] = 9,
    label: Label = "noria",
) -> None:
    """Measure what planning a step costs per running request, and adding a request. Prints one JSON line."""
    from noria.bench.machine import MachineWatch
    from noria.bench.scheduler import measure_scheduler

    machine = MachineWatch()
    print_result({"label": label} | measure_scheduler(policy=policy, num_rounds=rounds), machine)


@bench.command
def kv(
    *,
    trace: Annotated[Path, Parameter(help="An Azure LLM trace (CSV) or a Mooncake trace (JSON lines).")],
    requests: Annotated[int, Parameter(name=["--requests", "-n"], help="How many of its first requests.")] = 1000,
    scale: Annotated[float, Parameter(help="Divides all lengths.")] = 1.0,
    max_num_seqs: Annotated[int, Parameter(help="Sequences that may be resident at once.")] = 64,
    pool_share: Annotated[float, Parameter(help="The pool, as a share of what so many sequences grow to.")] = 0.5,
    block_size: Annotated[
        tuple[int, ...], Parameter(help="Tokens in one KV block; repeatable.", consume_multiple=True, negative=())
    ] = (8, 16, 32, 64, 128),
    label: Label = "noria",
) -> None:
    """Serve a trace without a model and measure how much of the held KV memory is empty. Prints one JSON line."""
    from noria.bench.kv import measure_kv
    from noria.bench.machine import MachineWatch
    from noria.bench.traces import read_trace

    found = read_trace(trace, requests, scale)
    machine = MachineWatch()
    result = measure_kv(found, block_sizes=block_size, max_num_seqs=max_num_seqs, pool_share=pool_share)
    print_result({"label": label, "trace": trace.name} | result, machine)
