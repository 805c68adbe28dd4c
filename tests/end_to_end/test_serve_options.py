"""`noria serve` over a real model: what its options say reaches the scheduler in the engine's process."""

from __future__ import annotations

import os
from pathlib import Path

from serving import running

POLICY = """
import os
from pathlib import Path
from noria.core.policies.fcfs import FcfsPolicy

class Noted(FcfsPolicy):
    def note_arrival(self, request):
        Path(os.environ["NOTES"]).write_text(f"{os.getpid()} {self.config.max_num_queued_reqs} {request.priority}")
"""


def test_flags_variables_and_a_policy_of_ones_own_reach_the_engine(default_model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "noted.py").write_text(POLICY)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "NOTES": str(tmp_path / "notes"),
        "NORIA_NUM_KV_BLOCKS": "32",
        "NORIA_MAX_NUM_SEQS": "1",
    }
    flags = [
        "--port",
        "0",
        "--scheduling-policy",
        "noted:Noted",
        "--max-num-queued-reqs",
        "1",
        "--max-model-len",
        "256",
    ]
    with running(
        ["noria.cli", "serve", str(default_model_path), *flags], environment=environment, timeout_s=120
    ) as server:
        assert server.complete(prompt="The", max_tokens=1, priority=-4).status == 200
        assert (tmp_path / "notes").read_text() == f"{server.engine_pid} 1 -4"
        assert (
            server.metric("kv_cache_blocks", state="free") + server.metric("kv_cache_blocks", state="cached_idle") == 32
        )
        refused = server.complete(prompt="The", max_tokens=1, n=3)
        assert (refused.status, refused.error["code"]) == (400, "request_too_large")
