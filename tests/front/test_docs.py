"""The documentation shows what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from noria import SamplingParams
from noria.core.plan import Limit
from noria.core.policies import POLICIES
from noria.core.request import RequestState
from support.fakes import alphabet_llm, assert_idle

ROOT = Path(__file__).parents[2]


def test_the_plans_in_the_life_of_a_request() -> None:
    """A plan depends on lengths and limits, not on the model, so the fake prints what a real one does."""
    text = (ROOT / "docs" / "life_of_a_request.md").read_text()
    shown = re.findall(r"^step \d+: .*$", text, flags=re.MULTILINE)
    llm = alphabet_llm(max_num_batched_tokens=8)
    llm.generate([list(range(5)), list(range(100, 118))], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert [str(record.plan) for record in llm.assembled.core.records] == shown
    assert_idle(llm)


def test_the_example_in_the_guide_to_the_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "scheduler.md").read_text()
    _, code, _, shown, _ = text.split("```")
    code, shown = code.removeprefix("python\n"), shown.removeprefix("\n")
    exec(compile(code, "docs/scheduler.md", "exec"), {})
    assert capsys.readouterr().out == shown


def test_every_limit_state_and_policy_is_in_the_guide_to_the_scheduler() -> None:
    text = (ROOT / "docs" / "scheduler.md").read_text()
    names = [*Limit, *(state.value for state in RequestState), *POLICIES]
    assert [name for name in names if f"| `{name}` |" not in text] == []


def test_files_that_the_documentation_names_exist() -> None:
    text = (ROOT / "docs" / "life_of_a_request.md").read_text()
    named = set(re.findall(r"`((?:\w+/)*\w+\.py|\w+/)`", text))
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / "src" / "noria" / name).exists()] == []
