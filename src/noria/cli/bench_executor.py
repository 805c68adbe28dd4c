"""The part of `noria bench` that measures an executor in this process: its speed, and whether its bits are the same."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from noria.cli.bench import full_url
from noria.cli.common import Label, LogLevel, ModelArgument, print_result
from noria.config import EngineOptions
from noria.errors import NoriaError, OptionError
from noria.logs import log_to_stderr


def latency(
    model: ModelArgument = None,
    *,
    prompt_tokens: Annotated[int, Parameter(help="Tokens of each prompt.")] = 128,
    new_tokens: Annotated[int, Parameter(help="Tokens of each answer.")] = 200,
    runs: Annotated[int, Parameter(help="Streams, one after the other.")] = 3,
    label: Label = "noria",
    log_level: LogLevel = "info",
    engine: EngineOptions,
) -> None:
    """Measure a single stream in this process: time per token, and its floor. Prints one JSON line."""
    from noria.assembly import build_engine
    from noria.bench.latency import run_streams, summarise_latency
    from noria.bench.machine import MachineWatch
    from noria.bench.throughput import warm_up
    from noria.bench.watched import StepLog

    log_to_stderr(log_level)
    steps = StepLog()
    assembled = build_engine(model, engine, wrap=steps.wrap)
    warm_up(assembled)
    machine = MachineWatch(engine.threads)
    steps.steps.clear()
    timelines = run_streams(assembled, prompt_tokens=prompt_tokens, new_tokens=new_tokens, num_runs=runs)
    machine.finish()
    result = {"label": label, "model": assembled.files.name, "dtype": engine.dtype}
    print_result(result | summarise_latency(timelines, steps, machine), machine)


def kernels(
    model: ModelArgument = None,
    *,
    batch: Annotated[
        tuple[int, ...], Parameter(help="Rows of a decode step; repeatable.", consume_multiple=True, negative=())
    ] = (1, 8, 32, 64),
    context: Annotated[int, Parameter(help="Tokens of each decoding row.")] = 300,
    prefill_tokens: Annotated[int, Parameter(help="Tokens of the prefill step.")] = 512,
    repetitions: Annotated[int, Parameter(help="Medians are taken over so many.")] = 9,
    peak_tflops: Annotated[
        float | None, Parameter(help="TFLOP/s that floors are computed with. Default: the best that is measured.")
    ] = None,
    label: Label = "noria",
    log_level: LogLevel = "info",
    engine: EngineOptions,
) -> None:
    """Measure where the time of a step goes on the native executor, with floors. Prints one JSON line."""
    from noria.bench.floor import StepCosts
    from noria.bench.kernels import summarise_kernels, time_kernels
    from noria.bench.machine import MachineWatch
    from noria.files.sources import open_model
    from noria.ops.executors import create_executor
    from noria.ops.native import NativeExecutor

    log_to_stderr(log_level)
    files = open_model(model)
    executor = create_executor(files, engine)
    if not isinstance(executor, NativeExecutor):
        raise OptionError("only the native executor times its operations; --executor native says why it does not run")
    machine = MachineWatch(engine.threads)
    times = time_kernels(
        executor,
        batches=batch,
        context_len=context,
        prefill_tokens=prefill_tokens,
        num_repetitions=repetitions,
    )
    machine.finish()
    costs = StepCosts(executor.program, executor.itemsize)
    result = {"label": label, "model": files.name, "dtype": engine.dtype, "kernel": executor.kernel, "context": context}
    print_result(result | summarise_kernels(times, costs, machine, engine.dtype, peak_tflops), machine)


def determinism(
    model: ModelArgument = None,
    *,
    sequences: Annotated[int, Parameter(help="How many, of different lengths.")] = 24,
    new_tokens: Annotated[int, Parameter(help="Tokens of each answer.")] = 16,
    longest_prompt: Annotated[int, Parameter(help="Tokens of the longest prompt.")] = 200,
    threads: Annotated[
        tuple[int, ...], Parameter(help="Numbers of threads; repeatable.", consume_multiple=True, negative=())
    ] = (1, 2),
    dtype: Annotated[Literal["bfloat16", "float32"], Parameter(help="The model's precision.")] = "bfloat16",
    executor: Annotated[Literal["auto", "native", "torch"], Parameter(help="What computes the model.")] = "auto",
    url: Annotated[
        str | None,
        Parameter(help="Probe the answers of this server (any OpenAI-compatible one) instead.", metavar="URL"),
    ] = None,
    label: Label = "noria",
    log_level: LogLevel = "warning",
) -> None:
    """Is an answer the same, bit for bit, whatever happens around it? Prints one JSON line; exit code 1 if it is not.

    In process, logits are compared; of a server, texts and log-probabilities.
    """
    from noria.bench.machine import MachineWatch

    log_to_stderr(log_level)
    machine = MachineWatch()
    if url is not None:
        from noria.bench.probe import probe_server

        result = probe_server(full_url(url), model=model, num_prompts=sequences, max_tokens=new_tokens)
    else:
        from noria.bench.determinism import Matrix, measure_determinism

        matrix = Matrix(
            num_sequences=sequences, num_new_tokens=new_tokens, longest_prompt=longest_prompt, threads=threads
        )
        result = measure_determinism(model, matrix, dtype=dtype, executor=executor)
    print_result({"label": label} | result, machine)
    if result["different"]:
        raise NoriaError(f"{result['different']} of {result['compared']} comparisons differ")
