"""`noria bench`: measurements. Progress goes to stderr, the result is one JSON line, last on stdout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from noria.cli.common import LogLevel, ModelArgument, log_to_stderr
from noria.cli.options import takes_options
from noria.config import EngineOptions
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
    label: Annotated[str, Parameter(help="A name for the result.")] = "noria",
    log_level: LogLevel = "info",
    engine: EngineOptions,
) -> None:
    """Run a workload in this process: greedy, end of sequence ignored. Prints one JSON line."""
    from noria.assembly import build_engine
    from noria.bench import throughput as measure
    from noria.bench.workload import read_workload

    log_to_stderr(log_level)
    requests = read_workload(workload)
    assembled = build_engine(model, engine)
    if warm_up:
        measure.warm_up(assembled)
    with ProgressBar(len(requests), show=None) as bar:
        run = measure.run_workload(
            assembled,
            requests,
            honour_arrivals=honour_arrivals,
            on_progress=lambda num_tokens, num_ended: bar.add(num_tokens=num_tokens, num_sequences=num_ended),
        )
    result = measure.summarise(run, label)
    result |= {
        "model": assembled.files.name,
        "dtype": engine.dtype,
        "device": engine.device,
        "threads": engine.threads,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "num_kv_blocks": assembled.scheduler_config.num_blocks,
    }
    print(msgspec.json.encode(result).decode(), flush=True)
