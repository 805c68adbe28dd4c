"""The documentation shows what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from noria import SamplingParams
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


def test_files_that_the_documentation_names_exist() -> None:
    text = (ROOT / "docs" / "life_of_a_request.md").read_text()
    named = set(re.findall(r"`((?:\w+/)*\w+\.py|\w+/)`", text))
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / "src" / "noria" / name).exists()] == []
