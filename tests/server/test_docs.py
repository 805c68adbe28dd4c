"""What docs/serving.md says of options is what they are."""

import subprocess
import sys
from pathlib import Path


def test_the_table_of_options_is_current():
    script = Path(__file__).parents[2] / "scripts" / "update_docs.py"
    assert subprocess.run([sys.executable, script, "--check"]).returncode == 0, f"run {script.name}"
