"""The plans of seeded workloads are those on file; see `golden_plans`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from golden_plans import DIRECTORY, WORKLOADS, difference, kept, plans_of

from noria.core.plan import Limit


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_plans_are_those_on_file(name):
    expected = kept(name)
    assert expected, f"golden/{name}.txt is missing: `make golden` writes it"
    assert not (diff := difference(name, expected, plans_of(name))), f"\n{diff}"


def test_every_file_has_its_workload():
    assert {path.stem for path in DIRECTORY.iterdir()} == WORKLOADS.keys()


def test_the_files_show_what_their_names_say():
    text = {name: "\n".join(kept(name)) for name in WORKLOADS}
    for name in ("fcfs_under_pressure", "longest_prefix_first", "fair_shares", "drafts_right_and_wrong"):
        assert "preempted" in text[name], name
    assert str(Limit.PREFIX_BEING_COMPUTED) in text["prefix_sharing"]
    assert str(Limit.PREFILL_SHARE) in text["one_giant_prompt_takes_its_share"]
    assert str(Limit.LONG_PREFILL) in text["chunked_prefill_mix"]
    displacing = [
        line for line in kept("priority_with_displacement") if "preempted" in line and "admitted" in line
    ]  # only a displacement admits somebody in the step that preempts
    assert displacing
    large_held = [line for line in kept("look_ahead_past_a_large_request") if "large held" in line]
    assert any("admitted small" in line for line in large_held)
    assert any("admitted" not in line for line in large_held), "its age limit stops that"


def test_plans_do_not_depend_on_the_seed_of_string_hashes():
    program = "import golden_plans as g; print(all(g.kept(n) == g.plans_of(n) for n in g.WORKLOADS))"
    for seed in ("1", "2"):
        environment = os.environ | {
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])),
        }
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        assert run.stdout.strip() == "True"


def test_a_difference_shows_the_steps_around_the_first_one_and_how_to_accept_it():
    expected = [f"step {i}: a+1" for i in range(1, 31)]
    got = [*expected[:19], "step 20: a+2", *expected[20:28]]
    text = difference("w", expected, got)
    assert "w: 3 steps differ (30 on file, 28 now), the first on line 20:" in text
    assert "-step 20: a+1\n+step 20: a+2" in text
    assert " step 16: a+1" in text
    assert "step 15:" not in text
    assert "step 25:" not in text
    assert "make golden" in text
    assert difference("w", expected, expected) == ""


def test_plans_that_only_stop_earlier_differ_too():
    expected = [f"step {i}" for i in range(1, 10)]
    assert "-step 9" in difference("w", expected, expected[:-1])
    assert "+step 10" in difference("w", expected, [*expected, "step 10"])
