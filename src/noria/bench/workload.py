"""A workload: which requests arrive when. Read from JSON lines of {"arrival_s", "prompt", "max_tokens"}."""

from __future__ import annotations

from pathlib import Path

import msgspec

from noria.errors import OptionError


class WorkloadRequest(msgspec.Struct, frozen=True):
    """One line. `prompt` is text or token ids; `arrival_s` counts from the start of the run."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    arrival_s: float = 0.0


def read_workload(path: Path) -> list[WorkloadRequest]:
    """All requests of a file, in its order. Raises OptionError naming the line that is wrong."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise OptionError(f"--workload {path}: {error.strerror}") from error
    decoder = msgspec.json.Decoder(WorkloadRequest)
    requests = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            requests.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OptionError(f"{path}, line {number}: {error}") from error
    if not requests:
        raise OptionError(f"{path} holds no requests")
    return requests
