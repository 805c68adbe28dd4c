"""What is said while a model loads."""

from __future__ import annotations

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
