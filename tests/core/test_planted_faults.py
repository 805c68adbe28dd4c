"""The list of planted faults keeps up with the sources (`make mutations` runs the faults themselves)."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load_faults():
    spec = importlib.util.spec_from_file_location("planted_faults", ROOT / "scripts" / "planted_faults.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.FAULTS


FAULTS = load_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_text_that_a_fault_replaces_stands_once_in_its_file(fault):
    text = (ROOT / "src" / "noria" / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1
    assert fault.new != fault.old
    compile(text.replace(fault.old, fault.new), fault.file, "exec")


def test_every_fault_has_its_own_name_and_story():
    assert len({fault.name for fault in FAULTS}) == len({fault.story for fault in FAULTS}) == len(FAULTS)
