"""Record the token ids that llama.cpp gives the strings of `tests/text/strings.py`.

    python scripts/record_llama_tokens.py URL OUTPUT.json --model NAME [--build NAME]

URL is a running `llama-server` (`tests/text/golden/README.md` has the command). The ids are written with and without
parsing of special tokens; tests compare our tokenizers with them, so that they need no llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"


def post(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", required=True, help="Name of the model file, for the record.")
    parser.add_argument("--build", help="Build of llama.cpp, for the record. Default: what the server says.")
    arguments = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from text.strings import STRINGS

    url = arguments.url.rstrip("/")
    with urllib.request.urlopen(f"{url}/props", timeout=60) as response:
        build = json.load(response)["build_info"]
    recorded: dict[str, Any] = {"model": arguments.model, "llama_cpp": arguments.build or build}
    for parse_special in (True, False):
        recorded[f"parse_special_{str(parse_special).lower()}"] = [
            post(f"{url}/tokenize", {"content": string, "add_special": True, "parse_special": parse_special})["tokens"]
            for string in STRINGS
        ]
    recorded["strings"] = STRINGS
    parts = [f"{json.dumps(key)}: {lines(value)}" for key, value in recorded.items()]
    arguments.output.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def lines(value: Any) -> str:
    """JSON with a line per entry of a list, so that a change can be read."""
    if isinstance(value, list):
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
    return json.dumps(value)


if __name__ == "__main__":
    main()
