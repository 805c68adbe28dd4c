"""AIPerf, a load tool: a short run of streamed chats, and one of completions, with a tokenizer from a local directory.

    python -m venv /tmp/aiperf && /tmp/aiperf/bin/pip install aiperf
    /tmp/aiperf/bin/python scripts/clients/aiperf_load.py http://127.0.0.1:8000 TOKENIZER_DIRECTORY

The directory has the tokenizer.json and tokenizer_config.json of the model. Prompts are made up; nothing is
fetched. (With HF_HUB_OFFLINE set, AIPerf 0.13 takes the name of a directory for one on the hub.)
"""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from common import first_model

NUM_REQUESTS, NUM_OUTPUT_TOKENS = 16, 24


def run(url: str, model: str, tokenizer: Path, endpoint: str, folder: Path) -> None:
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", model, "--url", url,
               "--endpoint-type", endpoint, "--streaming", "--tokenizer", str(tokenizer), "--concurrency", "4",
               "--request-count", str(NUM_REQUESTS), "--random-seed", "1", "--ui", "none", "--use-server-token-count",
               "--synthetic-input-tokens-mean", "100", "--output-tokens-mean", str(NUM_OUTPUT_TOKENS),
               "--extra-inputs", "ignore_eos:true", "--output-artifact-dir", str(folder)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    [path] = folder.glob("**/profile_export_aiperf.json")
    told = json.loads(path.read_text())
    assert told["request_count"]["avg"] == NUM_REQUESTS, told
    assert not told.get("error_summary"), told["error_summary"]
    lengths = told["output_sequence_length"]
    assert lengths["min"] == lengths["max"] == NUM_OUTPUT_TOKENS, lengths
    assert told["time_to_first_token"]["avg"] > 0
    figures = {"ttft ms": "time_to_first_token", "gap ms": "inter_token_latency", "tok/s": "output_token_throughput"}
    said = ", ".join(f"{name} {told[metric]['avg']:.1f}" for name, metric in figures.items())
    print(f"  ok: {endpoint}: {NUM_REQUESTS} streams of {NUM_OUTPUT_TOKENS} tokens; {said}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    url, tokenizer = sys.argv[1].rstrip("/"), Path(sys.argv[2]).resolve()
    print(f"aiperf {version('aiperf')}")
    for endpoint in ("chat", "completions"):
        with tempfile.TemporaryDirectory() as folder:
            run(url, first_model(url), tokenizer, endpoint, Path(folder))
