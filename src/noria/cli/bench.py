"""`noria bench`: measurements. Progress goes to stderr, the result is one JSON line, last on stdout.

Each result has the machine's state beside it, measured before and after; see `noria.bench.machine`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from noria.cli.common import Label, LogLevel, ModelArgument, print_result
from noria.cli.options import takes_options
from noria.config import EngineOptions
from noria.logs import log_to_stderr
from noria.terminal import ProgressBar

bench = App(name="bench", help="Measure an engine.", help_flags=("--help", "-h"), version_flags=())


@bench.command
@takes_options
def throughput(
    model: ModelArgument = None,
    *,
    workload: Annotated[Path, Parameter(help='JSON lines of {"arrival_s", "prompt": text or ids, "max_tokens"}.')],
    honour_arrivals: Annotated[
        bool,
        Parameter(help="Submit each request at its arrival_s, not all at once.", negative=(), show_default=False),
    ] = False,
    warm_up: Annotated[bool, Parameter(help="Run a few random prompts first.", negative="--no-warm-up")] = True,
    breakdown: Annotated[
        bool, Parameter(help="Report seconds by kind of operation (native executor).", negative=(), show_default=False)
    ] = False,
    peak_tflops: Annotated[
        float | None, Parameter(help="TFLOP/s that the floor is computed with. Default: the best that is measured.")
    ] = None,
    label: Label = "noria",
    log_level: LogLevel = "info",
    engine: EngineOptions,
) -> None:
    """Run a workload in this process: greedy, end of sequence ignored. Prints one JSON line."""
    from noria.assembly import build_engine
    from noria.bench import throughput as measure
    from noria.bench.machine import MachineWatch
    from noria.bench.watched import StepLog
    from noria.bench.workload import read_workload

    log_to_stderr(log_level)
    requests = read_workload(workload)
    steps = StepLog(times_operations=breakdown)
    assembled = build_engine(model, engine, wrap=steps.wrap)
    if warm_up:
        measure.warm_up(assembled)
    machine = MachineWatch(engine.threads)
    steps.steps.clear()
    with ProgressBar(len(requests), show=None) as bar:
        run = measure.run_workload(
            assembled,
            requests,
            honour_arrivals=honour_arrivals,
            on_progress=lambda num_tokens, num_ended: bar.add(num_tokens=num_tokens, num_sequences=num_ended),
        )
    machine.finish()
    result = measure.summarise(run, label) | steps.summary(run.wall_s, machine, peak_tflops)
    result |= {
        "model": assembled.files.name,
        "dtype": engine.dtype,
        "device": engine.device,
        "threads": engine.threads,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "num_kv_blocks": assembled.scheduler_config.num_blocks,
    }
    print_result(result, machine)


@bench.command
def serve(
    url: Annotated[str, Parameter(help="Where the server is: http://127.0.0.1:8000.", metavar="URL")],
    *,
    workload: Annotated[Path, Parameter(help='JSON lines of {"arrival_s", "prompt": text or ids, "max_tokens"}.')],
    model: Annotated[
        str | None, Parameter(help="The model's name there. Default: the first it lists.", metavar="NAME")
    ] = None,
    rate_scale: Annotated[float, Parameter(help="Stretches arrivals: 2 halves the rate.")] = 1.0,
    label: Label = "noria",
) -> None:
    """Send a workload to a running server (any OpenAI-compatible one), streamed. Prints one JSON line."""
    from noria.bench.machine import MachineWatch
    from noria.bench.serve import Load, run_load
    from noria.bench.server_times import read_server_times, summarise_server_times
    from noria.bench.timeline import summarise_timelines
    from noria.bench.workload import read_workload

    requests = read_workload(workload)
    load = Load(url=full_url(url), model=model, rate_scale=rate_scale)
    machine = MachineWatch()
    before = read_server_times(load.url)
    with ProgressBar(len(requests), show=None) as bar:
        timelines, wall_s = run_load(
            load, requests, lambda num_chunks, num_ended: bar.add(num_tokens=num_chunks, num_sequences=num_ended)
        )
    server = summarise_server_times(before, read_server_times(load.url), wall_s)
    print_result(summarise_timelines(timelines, wall_s, label) | server, machine)


@bench.command
def disturb(
    url: Annotated[str, Parameter(help="Where the server is: http://127.0.0.1:8000.", metavar="URL")],
    *,
    workload: Annotated[Path, Parameter(help='JSON lines of {"arrival_s", "prompt": text or ids, "max_tokens"}.')],
    disturbance: Annotated[
        Literal["none", "body", "prompt", "truncated", "template"],
        Parameter(
            help="What comes beside it: nothing, a body of 64 MiB, a prompt of a million characters, one of which few "
            "tokens are to be kept, a chat template of nested loops."
        ),
    ],
    pairs: Annotated[int, Parameter(help="Runs of the workload: alone, disturbed, alone, disturbed, ...")] = 5,
    pause_s: Annotated[
        float, Parameter(help="Between a disturbing request's answer and the next one.", metavar="SECONDS")
    ] = 0.5,
    model: Annotated[
        str | None, Parameter(help="The model's name there. Default: the first it lists.", metavar="NAME")
    ] = None,
    label: Label = "noria",
    log_level: LogLevel = "info",
) -> None:
    """Send a workload alone and beside outrageous requests: does it notice? Prints one JSON line."""
    from noria.bench.disturb import Disturbance, measure_disturbance
    from noria.bench.machine import MachineWatch
    from noria.bench.serve import Load
    from noria.bench.workload import read_workload

    log_to_stderr(log_level)
    load, requests = Load(url=full_url(url), model=model), read_workload(workload)
    machine = MachineWatch()
    result = measure_disturbance(load, requests, Disturbance(disturbance), num_pairs=pairs, pause_s=pause_s)
    print_result({"label": label} | result, machine)


@bench.command
def overload(
    url: Annotated[str, Parameter(help="Where the server is: http://127.0.0.1:8000.", metavar="URL")],
    *,
    pool_tokens: Annotated[int, Parameter(help="How many tokens the server's KV memory holds.")],
    working_set: Annotated[float, Parameter(help="What open requests grow to, as a multiple of that.")] = 2.0,
    duration_s: Annotated[float, Parameter(help="How long to send.", metavar="SECONDS")] = 600.0,
    drain_s: Annotated[
        float, Parameter(help="How long to wait for the rest; what is open then is hung.", metavar="SECONDS")
    ] = 120.0,
    window_s: Annotated[
        float, Parameter(help="Tokens are counted in windows of this length.", metavar="SECONDS")
    ] = 30.0,
    prompt_tokens: Annotated[tuple[int, int], Parameter(help="Fewest and most tokens of a prompt.", negative=())] = (
        64,
        512,
    ),
    output_tokens: Annotated[tuple[int, int], Parameter(help="Fewest and most tokens of an answer.", negative=())] = (
        64,
        256,
    ),
    token_ids: Annotated[tuple[int, int], Parameter(help="Least and greatest token id.", negative=())] = (100, 40_000),
    giant_every_s: Annotated[
        float, Parameter(help="Send one giant prompt this often; 0: never.", metavar="SECONDS")
    ] = 60.0,
    giant_tokens: Annotated[int, Parameter(help="How long it is.")] = 2048,
    burst_every_s: Annotated[
        float, Parameter(help="Send 8 short urgent requests this often; 0: never.", metavar="SECONDS")
    ] = 45.0,
    abort_share: Annotated[float, Parameter(help="Share of streams that the client cuts after a few tokens.")] = 0.1,
    priority: Annotated[bool, Parameter(help="Say priorities: -10 for urgent requests, 0 for others.")] = False,
    seed: Annotated[int, Parameter(help="What is sent depends on it.")] = 0,
    model: Annotated[
        str | None, Parameter(help="The model's name there. Default: the first it lists.", metavar="NAME")
    ] = None,
    label: Label = "noria",
    log_level: LogLevel = "info",
) -> None:
    """Overload a running server (any OpenAI-compatible one) and see whether it lives. Prints one JSON line."""
    from noria.bench.machine import MachineWatch
    from noria.bench.overload import Overload, run_overload

    log_to_stderr(log_level)
    load = Overload(
        url=full_url(url),
        model=model,
        pool_tokens=pool_tokens,
        working_set=working_set,
        duration_s=duration_s,
        drain_s=drain_s,
        window_s=window_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        token_ids=token_ids,
        giant_every_s=giant_every_s,
        giant_tokens=giant_tokens,
        burst_every_s=burst_every_s,
        abort_share=abort_share,
        priority=priority,
        seed=seed,
    )
    machine = MachineWatch()
    print_result({"label": label} | run_overload(load), machine)


def full_url(url: str) -> str:
    """With a scheme and without a slash at the end."""
    return (url if "://" in url else f"http://{url}").rstrip("/")


@bench.command
def startup(
    model: ModelArgument = None,
    *,
    runs: Annotated[int, Parameter(help="How many times.")] = 10,
    label: Label = "noria",
) -> None:
    """Measure the time from `noria serve` to the first streamed token. Prints one JSON line."""
    from noria.bench.machine import MachineWatch
    from noria.bench.startup import measure_startup

    machine = MachineWatch()
    print_result({"label": label} | measure_startup([] if model is None else [model], num_runs=runs), machine)


@bench.command
def soak(
    *,
    streams: Annotated[int, Parameter(help="Streams at once.")] = 2000,
    tokens: Annotated[int, Parameter(help="Tokens of each stream.")] = 100,
    rounds: Annotated[int, Parameter(help="How many times.")] = 3,
    short: Annotated[int, Parameter(help="Requests for one token, after that.")] = 100_000,
    label: Label = "noria",
    log_level: LogLevel = "info",
) -> None:
    """Measure whether a server without a model keeps its memory under streams and requests. Prints one JSON line."""
    from noria.bench.machine import MachineWatch
    from noria.bench.soak import measure_soak

    log_to_stderr(log_level)
    machine = MachineWatch()
    result = measure_soak(num_streams=streams, num_tokens=tokens, num_rounds=rounds, num_short=short)
    print_result({"label": label} | result, machine)


@bench.command
def front(
    *,
    streams: Annotated[int, Parameter(help="Streams at once.")] = 64,
    tokens: Annotated[int, Parameter(help="Tokens of each stream.")] = 500,
    step_s: Annotated[float, Parameter(help="How long a step of the scripted engine takes.", metavar="SECONDS")] = 0.02,
    idle_s: Annotated[float, Parameter(help="How long to watch the idle server afterwards.", metavar="SECONDS")] = 10.0,
    label: Label = "noria",
) -> None:
    """Measure what HTTP and text cost without a model, and what an idle server costs. Prints one JSON line."""
    from noria.bench.front import measure_front
    from noria.bench.machine import MachineWatch

    machine = MachineWatch()
    result = {"label": label} | measure_front(num_streams=streams, num_tokens=tokens, step_s=step_s, idle_s=idle_s)
    print_result(result, machine)
