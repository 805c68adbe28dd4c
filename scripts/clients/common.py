"""What the scripts in this folder share. It needs nothing but Python.

Each script tries one client against a running server, checks what comes back, and ends with 1 at the first thing that
is not as it should be. None of them asks a model hub. Each wants an environment of its own; its docstring says which.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

MESSAGES = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]
PROMPT = "Once upon a time, there was a"


def arguments(doc: str) -> tuple[str, str]:
    """The server's address from the command line, and the name of the first model there."""
    if len(sys.argv) != 2 or not sys.argv[1].startswith("http"):
        sys.exit(doc)
    url = sys.argv[1].rstrip("/")
    return url, first_model(url)


def first_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


class Raised:
    """What `raises` caught."""

    error: Any = None


@contextmanager
def raises(kind: type[Exception]) -> Iterator[Raised]:
    """What is inside must end with that error."""
    raised = Raised()
    try:
        yield raised
    except kind as error:
        raised.error = error
    else:
        raise AssertionError(f"there was no {kind.__name__}")


def try_all(package: str, checks: list[Callable[..., None]], *given: Any) -> None:
    """Calls each check, and says what it was. An assertion that does not hold, or any other error, ends the script."""
    print(f"{package} {version(package)}")
    for check in checks:
        check(*given)
        print(f"  ok: {(check.__doc__ or check.__name__).strip().rstrip('.')}")
