"""Public traces of real servers as requests: lengths, and which prompts begin alike.

Two formats are read. Azure's (CSV: TIMESTAMP, ContextTokens, GeneratedTokens) knows lengths alone, so every prompt is
unlike all others. Mooncake's (JSON lines: input_length, output_length, hash_ids) names each 512-token block of a
prompt, so equal names become equal tokens.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import msgspec

from noria.errors import OptionError

_MOONCAKE_BLOCK = 512


class TraceRequest(msgspec.Struct, frozen=True):
    """Token ids of the prompt, and how many tokens were generated."""

    prompt: list[int]
    num_output_tokens: int


class _MooncakeLine(msgspec.Struct):
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, limit: int, scale: float = 1.0) -> list[TraceRequest]:
    """The first `limit` requests that generated something, lengths divided by `scale`. Raises OptionError."""
    try:
        read = _mooncake if path.suffix == ".jsonl" else _azure
        requests: list[TraceRequest] = []
        for request in read(path, scale):
            if len(requests) == limit:
                break
            requests.append(request)
    except OSError as error:
        raise OptionError(f"--trace {path}: {error.strerror}") from error
    except (ValueError, KeyError, msgspec.DecodeError) as error:
        raise OptionError(f"--trace {path} is neither an Azure CSV nor a Mooncake JSONL trace: {error!r}") from error
    if not requests:
        raise OptionError(f"--trace {path} holds no requests")
    return requests


def _azure(path: Path, scale: float) -> Iterator[TraceRequest]:
    with path.open(newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines)):
            start = number << 24
            num_prompt = _scaled(int(row["ContextTokens"]), scale)
            yield TraceRequest(list(range(start, start + num_prompt)), _scaled(int(row["GeneratedTokens"]), scale))


def _mooncake(path: Path, scale: float) -> Iterator[TraceRequest]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    block = _scaled(_MOONCAKE_BLOCK, scale)
    with path.open("rb") as lines:
        for line in lines:
            entry = decoder.decode(line)
            num_prompt = _scaled(entry.input_length, scale)
            prompt = [(name << 16) + i for name in entry.hash_ids for i in range(block)][:num_prompt]
            yield TraceRequest(prompt, _scaled(entry.output_length, scale))


def _scaled(num_tokens: int, scale: float) -> int:
    return max(1, round(num_tokens / scale))
