"""`noria bench compare`: runs two commands in turn and compares what they report.

A machine that changes makes one run after the other misleading. So the commands take turns, A B A B, the machine's
state is measured before each pair, and what is compared are the ratios within pairs.
"""

from __future__ import annotations

import json
import logging
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from noria.bench.machine import MachineState, cpu_name, measure_machine
from noria.bench.timeline import significant
from noria.errors import NoriaError, OptionError
from noria.ops.native import num_cores

logger = logging.getLogger(__name__)

Result = Mapping[str, Any]


def compare_commands(
    ours: str,
    peer: str,
    *,
    num_pairs: int,
    fields: Sequence[str] = (),
    run: Callable[[str], Result] | None = None,
    measure: Callable[[int], MachineState] = measure_machine,
) -> dict[str, Any]:
    """Medians and extremes of both, and of ours / peer within pairs, of each field.

    Without `fields`, those that are numbers in all results. `run(command)` gives what a command reports; the default
    runs it in a shell. Raises, after the pair that shows it, `OptionError` for a field that is no number in both, and
    `NoriaError` if there is nothing to compare or for a command that fails.
    """
    if num_pairs < 1:
        raise OptionError(f"--runs must be at least 1, not {num_pairs}")
    run_command = run or _run
    pairs: list[tuple[Result, Result]] = []
    states: list[MachineState] = []
    names: list[str] = []
    for number in range(1, num_pairs + 1):
        states.append(measure(num_cores()))
        pairs.append((run_command(ours), run_command(peer)))
        names = _names_to_compare(fields, pairs, ours, peer)
        logger.info("pair %d of %d is done", number, num_pairs)
    return {
        "runs": num_pairs,
        "ours": {name: spread([pair[0][name] for pair in pairs]) for name in names},
        "peer": {name: spread([pair[1][name] for pair in pairs]) for name in names},
        "ratio": {name: spread(_ratios(pairs, name)) for name in names},
        "machine": {"cpu": cpu_name(), "cores": num_cores(), "before_each_pair": states},
    }


def _run(command: str) -> Result:
    """Runs a command in a shell; its messages go where ours go. The JSON object on its last line of output."""
    finished = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True, check=False)
    if finished.returncode != 0:
        raise NoriaError(f'"{command}" failed with exit code {finished.returncode}')
    lines = [line for line in finished.stdout.splitlines() if line.strip()]
    try:
        result = json.loads(lines[-1])
    except (IndexError, ValueError) as error:
        raise NoriaError(f'the last line that "{command}" printed is no JSON') from error
    if not isinstance(result, dict):
        raise NoriaError(f'the last line that "{command}" printed is no JSON object')
    return result


def _names_to_compare(fields: Sequence[str], pairs: Sequence[tuple[Result, Result]], ours: str, peer: str) -> list[str]:
    """The fields that were asked for, or all that are numbers in every result so far."""
    for name in fields:
        for command, result in zip((ours, peer), pairs[-1], strict=True):
            if not _has_number(result, name):
                raise OptionError(f'--field {name}: "{command}" did not report a number of that name')
    if fields:
        return list(fields)
    names = [name for name in pairs[0][0] if all(_has_number(result, name) for pair in pairs for result in pair)]
    if not names:
        raise NoriaError(f'"{ours}" and "{peer}" reported no number under the same name each time')
    return names


def _has_number(result: Result, name: str) -> bool:
    value = result.get(name)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ratios(pairs: Sequence[tuple[Result, Result]], name: str) -> list[float]:
    """Of the pairs whose peer reported anything but 0."""
    return [ours[name] / peer[name] for ours, peer in pairs if peer[name]]


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median and extremes to six digits; None of nothing."""
    if not values:
        return None
    return {
        "median": significant(statistics.median(values)),
        "min": significant(min(values)),
        "max": significant(max(values)),
    }
