#!/usr/bin/env python3
"""Schemathesis against a running server: requests made from its /openapi.json, good and bad, and every answer checked.

    python -m venv /tmp/schemathesis && /tmp/schemathesis/bin/pip install schemathesis
    python -m noria.server.scripted '{"server": {"port": 8000, "enable_admin_api": true, "api_key": ["secret"]}}' &
    /tmp/schemathesis/bin/python scripts/openapi_fuzz.py http://127.0.0.1:8000 --key secret

`--examples` (20) is how many requests each operation gets beyond the systematic ones, `--seed` (1) makes them the same
again. A model that computes gets few tokens to generate (see `cheap`); what is refused is sent as it comes.

Every check of Schemathesis runs, and one of ours, that after each request a normal one is answered, but these:

- positive_data_acceptance: the schemas say types. What a value may be depends on the model and on other fields
  (max_tokens on the context, top_logprobs on logprobs), so that much of what the schemas allow is refused with 400.
- use_after_free, ensure_resource_availability: they need operations that create and delete something; there are none.

/pause is left out, since every request after it waits. Ends with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

NOT_APPLICABLE = ("positive_data_acceptance", "use_after_free", "ensure_resource_availability")
TIMEOUT_S = 60
MAX_TOKENS = 4
MAX_SEQUENCES = 4
MESSAGES = [{"role": "user", "content": "hi"}]


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def likely(body: Any) -> Any:
    """A body that is not nearly always refused for the same reason. What the schema does not allow stays as it is."""
    if not isinstance(body, dict):
        return body
    body, messages = dict(body), body.get("messages")
    if messages and isinstance(messages, list) and all(isinstance(m, dict) for m in messages) and len(messages) % 2:
        body["messages"] = MESSAGES
    if isinstance(body.get("prompt"), str) and isinstance(body.get("content"), str) and len(body) % 2:
        del body["content"]  # /tokenize takes one of them
    return body


def cheap(body: dict[str, Any]) -> dict[str, Any]:
    """A body that costs little where it would be served: values that the schema allows become smaller such values."""
    bounded = dict(body)
    for name, limit in (("n", MAX_SEQUENCES), ("best_of", MAX_SEQUENCES), ("max_tokens", MAX_TOKENS)):
        value = body.get(name)
        if is_int(value) and limit < value < 2**20:
            bounded[name] = value % limit + 1
    if body.get("max_tokens") is None:
        bounded["max_tokens"] = MAX_TOKENS
    if is_int(body.get("max_completion_tokens")) and body["max_completion_tokens"] > MAX_TOKENS:
        bounded["max_completion_tokens"] = MAX_TOKENS
    return bounded


def install_hooks() -> None:
    """Called where Schemathesis reads this file as its module of hooks."""
    import schemathesis

    @schemathesis.hook
    def map_body(context: Any, body: Any) -> Any:
        return likely(body)

    @schemathesis.hook
    def before_call(context: Any, case: Any, kwargs: Any) -> None:
        if isinstance(case.body, dict) and ("prompt" in case.body or "messages" in case.body):
            case.body = cheap(case.body)

    @schemathesis.check
    def a_normal_request_is_answered(context: Any, response: Any, case: Any) -> None:
        import requests

        url, key = os.environ["NORIA_FUZZED_URL"], os.environ["NORIA_FUZZED_KEY"]
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = {"prompt": "normal", "max_tokens": 1}
        answer = requests.post(f"{url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S)
        assert answer.status_code == 200, (answer.status_code, answer.text)
        assert answer.json()["usage"]["completion_tokens"] == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--key", default="")
    parser.add_argument("--examples", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    url = arguments.url.rstrip("/")
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json", "--checks", "all",
               "--exclude-checks", ",".join(NOT_APPLICABLE), "--exclude-path", "/pause", "--continue-on-failure",
               "--max-examples", str(arguments.examples), "--seed", str(arguments.seed),
               "--request-timeout", str(TIMEOUT_S),
               "--generation-database", "none"]  # fmt: skip
    if arguments.key:
        command += ["--header", f"Authorization: Bearer {arguments.key}"]
    here = Path(__file__).resolve()
    environment = {"SCHEMATHESIS_HOOKS": here.stem, "PYTHONPATH": str(here.parent), "PYTHONDONTWRITEBYTECODE": "1",
                   "NORIA_FUZZED_URL": url, "NORIA_FUZZED_KEY": arguments.key}  # fmt: skip
    return subprocess.run(command, env=os.environ | environment).returncode


if __name__ == "__main__":
    sys.exit(main())
elif "NORIA_FUZZED_URL" in os.environ:
    install_hooks()
