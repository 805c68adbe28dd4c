"""What is said while a model loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from noria import assembly


def test_a_long_load_is_told_now_and_then_and_a_short_one_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(assembly.time, "monotonic", lambda: now_s)
    lines: list[str] = []
    note = assembly._now_and_then(lines.append)
    for done in range(1, 41):
        now_s += 0.02
        note(done, 40)
    assert lines == []
    note = assembly._now_and_then(lines.append)
    for done in range(1, 6):
        now_s += 0.6
        note(done, 5)
    assert lines == ["loading weights: 40 %", "loading weights: 80 %"]


LOADS = """
import logging, sys, time
import noria.logs, noria.llm
noria.logs.PATIENCE_S = 0.05
{setting}
sys.path.append({tests!r})
from support.fakes import alphabet

def build(model, options):
    logging.getLogger("noria.loading").info("loading %s", model)
    time.sleep(0.3 if noria.logs.PATIENCE_S < 1 else 0)
    logging.getLogger("noria.assembly").info("details")
    return alphabet()

noria.llm.build_engine = build
llm = noria.llm.LLM("some/model")
print(logging.getLogger("noria.loading").handlers, logging.getLogger("noria.loading").level)
"""


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("", "noria: loading some/model\n"),
        ("logging.basicConfig()", ""),
        ("logging.basicConfig(level='INFO', format='%(message)s')", "loading some/model\ndetails\n"),
        ("logging.getLogger('noria').setLevel('WARNING')", ""),
        ("logging.getLogger('noria').addHandler(logging.NullHandler())", ""),
        ("logging.disable()", ""),
        ("import os; os.environ['NORIA_LOG_LEVEL'] = 'warning'", ""),
        ("noria.logs.PATIENCE_S = 60.0", ""),
    ],
)
def test_a_script_is_told_that_a_model_is_being_loaded_unless_it_is_soon_or_it_has_decided_otherwise(
    setting: str, told: str
) -> None:
    program = LOADS.format(setting=setting, tests=str(Path(__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == told
    assert done.stdout == "[] 0\n", "nothing is left behind"
