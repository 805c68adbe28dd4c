"""Simon Willison's `llm`, as one types it: models from its extra-openai-models.yaml, in a folder of this script's own.

python -m venv /tmp/llm && /tmp/llm/bin/pip install llm
/tmp/llm/bin/python scripts/clients/llm_cli.py http://127.0.0.1:8000
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import PROMPT, arguments, try_all

QUESTION = "What is the capital of France?"


def llm(home: str, *words: str, succeeds: bool = True, stdin: str = "") -> str:
    command = [str(Path(sys.executable).with_name("llm")), *words]
    environment = os.environ | {"LLM_USER_PATH": home}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, input=stdin)
    assert (done.returncode == 0) == succeeds, (words, done.stdout, done.stderr)
    return done.stdout if succeeds else done.stderr


def models(home: str) -> None:
    """Models: both entries of the file are listed."""
    listed = llm(home, "models")
    assert "noria-chat" in listed
    assert "noria-text" in listed


def chat(home: str) -> None:
    """A prompt: streamed (its default) and with --no-stream, one text; a system prompt; text on stdin."""
    options = ["-m", "noria-chat", "-o", "temperature", "0", "-o", "max_tokens", "24"]
    streamed = llm(home, *options, QUESTION)
    assert streamed.strip()
    assert llm(home, *options, "--no-stream", QUESTION) == streamed
    assert llm(home, *options, "-s", "Answer in one word.", QUESTION).strip()
    assert llm(home, *options, stdin=QUESTION) == streamed


def usage(home: str) -> None:
    """Token usage: told with -u in a stream too, and kept in its log."""
    llm(home, "-m", "noria-chat", "-o", "max_tokens", "8", "-o", "temperature", "0", "A usage, please")
    [entry] = json.loads(llm(home, "logs", "-n", "1", "--json"))
    assert (entry["output_tokens"], entry["input_tokens"] > 8) == (8, True), entry


def conversation(home: str) -> None:
    """-c goes on with the last conversation."""
    options = ["-o", "max_tokens", "8"]
    llm(home, "-m", "noria-chat", *options, QUESTION)
    [before] = json.loads(llm(home, "logs", "-n", "1", "--json"))
    llm(home, "-c", *options, "And of Italy?")
    [after] = json.loads(llm(home, "logs", "-n", "1", "--json"))
    assert after["conversation_id"] == before["conversation_id"]
    assert after["input_tokens"] > before["input_tokens"] + 8


def completions(home: str) -> None:
    """A completion model (completion: true): streamed and not; stop; a seed and a logit bias."""
    options = ["-m", "noria-text", "-o", "temperature", "0", "-o", "max_tokens", "12"]
    streamed = llm(home, *options, PROMPT)
    assert streamed.strip()
    assert llm(home, *options, "--no-stream", PROMPT) == streamed
    stop = streamed.strip()[6:10]
    stopped = llm(home, *options, "-o", "stop", stop, PROMPT)
    assert stopped.strip() == streamed.partition(stop)[0].strip()
    assert llm(home, *options, "-o", "seed", "1", "-o", "logit_bias", '{"5": -100}', PROMPT).strip()


def errors(home: str) -> None:
    """Errors: the server's words, and an exit code."""
    told = llm(home, "-m", "noria-chat", "-o", "max_tokens", "1000000", QUESTION, succeeds=False)
    assert "context" in told, told
    assert "no-such-model" in llm(home, "-m", "noria-other", QUESTION, succeeds=False)


if __name__ == "__main__":
    url, model = arguments(__doc__)
    with tempfile.TemporaryDirectory() as home:
        entries = [("noria-chat", model, ""), ("noria-text", model, "  completion: true\n"),
                   ("noria-other", "no-such-model", "")]  # fmt: skip
        Path(home, "extra-openai-models.yaml").write_text(
            "".join(f"- model_id: {i}\n  model_name: {n}\n  api_base: {url}/v1\n{rest}" for i, n, rest in entries)
        )
        try_all("llm", [models, chat, usage, conversation, completions, errors], home)
