"""`noria conformance` against our own server, over an engine without a model."""

from __future__ import annotations

from fnmatch import fnmatchcase

from serving import running_server

from noria.conformance.catalogue import CHECKS
from noria.conformance.client import Server
from noria.conformance.contract import Outcome
from noria.conformance.run import run_checks

NEEDS_A_MODEL = ("*-seeds-differ", "*-logit-bias*", "*-frequency-penalty", "*-allowed-token-ids", "*-bad-words",
                 "*-stop-token-ids", "chat-logprobs-top", "chat-logprobs-greedy")  # fmt: skip
"""The scripted engine takes no notice of sampling, and has no alternatives to its tokens."""


def test_our_server_meets_what_it_can_without_a_model():
    with running_server({"checked": True, "max_model_len": 512, "num_blocks": 1024}) as running:
        results = run_checks(Server(running.url, "scripted", timeout_s=30), CHECKS)
        assert running.process.poll() is None
    failed = [(result.name, result.reason) for result in results if result.outcome is Outcome.FAIL]
    assert [each for each in failed if not any(fnmatchcase(each[0], pattern) for pattern in NEEDS_A_MODEL)] == []
    assert sum(result.outcome is Outcome.PASS for result in results) > 300
