"""The `noria` command: its subcommands, its error messages and its exit codes.

Exit codes: 0 done, 1 failed for a reason that the message gives, 2 wrong usage, 130 interrupted. Results go to stdout,
everything else to stderr. Commands import the engine when they run, so that `noria --help` is quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, UnusedCliTokensError

from noria import __version__
from noria.cli.bench_compare import compare
from noria.cli.bench_core import bench
from noria.cli.bench_executor import determinism, kernels, latency
from noria.cli.chat import chat
from noria.cli.conformance import conformance
from noria.cli.generate import generate
from noria.cli.options import UsageError, takes_options
from noria.cli.serve import serve
from noria.cli.values import with_flags
from noria.errors import NoriaError, OptionError, RequestError

app = App(
    name="noria",
    help="Continuous batching for language models: an inference engine you can understand.",
    version=__version__,
    version_flags=("--version",),
    help_flags=("--help", "-h"),
)
app.command(takes_options(generate), name="generate")
app.command(takes_options(chat), name="chat")
app.command(takes_options(serve), name="serve")
for command in (latency, kernels, determinism, compare):
    bench.command(takes_options(command), name=command.__name__)
app.command(conformance, name="conformance")
app.command(bench, name="bench")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits; `arguments` None means those of the process."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Runs the command line and returns the exit code."""
    try:
        app(list(arguments), result_action="return_value", exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except CycloptsError as error:
        return _fail(_usage(error), 2)
    except UsageError as error:
        return _fail(str(error), 2)
    except (OptionError, RequestError) as error:
        return _fail(with_flags(str(error)), 2)
    except NoriaError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader of our output has gone: `noria generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit would complain again
        return 1
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0


def _usage(error: CycloptsError) -> str:
    """What the parser has against a command line, in one line, and where to look."""
    command = " ".join(("noria", *(error.command_chain or ())))
    message = str(error)
    if isinstance(error, UnusedCliTokensError):
        message = f"there is no place for {' '.join(error.unused_tokens or ())!r}."
        if command == "noria generate":
            message += " A prompt is given with --prompt TEXT."
    end = "" if message.endswith((".", "?")) else "."
    return f"{' '.join(message.split())}{end} See {command} --help"


def _fail(message: str, code: int) -> int:
    print(f"noria: {message}", file=sys.stderr)
    return code
