"""Values on the command line: which may have a unit, and what is said of those that cannot be read."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.cli.app import run
from noria.cli.values import parse_int, parse_size, with_flags
from noria.config import EngineOptions, ServerOptions, value_name


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("8k", 8000), ("2M", 2_000_000), ("1.5KiB", 1536), ("4GiB", 2**32), ("1gb", 10**9), ("-3", -3)],
)
def test_sizes_may_have_units(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "k", "4x", "1.5", "1.2345k", "4 5", "0x10", "1e3", "nan", "--5"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="whole number"):
        parse_size(text)


@given(st.integers())
def test_plain_integers_are_themselves(value: int) -> None:
    assert parse_size(str(value)) == parse_int(str(value)) == value


SPECS = [spec for options in (EngineOptions, ServerOptions) for spec in dataclasses.fields(options)]


def test_units_belong_to_tokens_blocks_and_bytes_alone() -> None:
    sizes = {spec.name for spec in SPECS if value_name(spec) == "SIZE"}
    assert {"max_model_len", "kv_cache_memory_bytes", "num_kv_blocks", "max_body_bytes"} < sizes
    assert all(
        any(unit in f"{name} " for unit in ("len", "tok", "bytes", "block", "backlog", "cost")) for name in sizes
    )


def test_every_value_has_a_name_that_says_what_it_is() -> None:
    assert [spec.name for spec in SPECS if value_name(spec) in ("STR", "TEXT", "FLOAT")] == []
    assert {spec.name for spec in SPECS if not value_name(spec)} == {spec.name for spec in SPECS if spec.type == "bool"}


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What wrong usage is told, on one line."""
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--port", "8k", 'Invalid value for --port: "8k" is not a whole number without a unit; write 8000'),
        ("--threads", "1k", "write 1000"),
        ("--max-num-seqs", "many", 'Invalid value for --max-num-seqs: "many" is not a whole number'),
        ("--max-model-len", "long", 'Invalid value for --max-model-len: "long" is not a size: a whole number such as'),
        ("--drain-s", "30s", '"30s" is not a number of seconds such as 30'),
        ("--watermark", "10%", '"10%" is not a number such as'),
        ("--port", "70000", "--port must be between 0 and 65535"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_flag(
    flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in said(capsys, "serve", flag, value)


def test_a_variable_that_cannot_be_read_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NORIA_PORT", "8k")
    assert "NORIA_PORT" in said(capsys, "serve")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("max_num_seqs must be at least 1, not 0", "--max-num-seqs must be at least 1, not 0"),
        ("port must be between 0 and 65535", "--port must be between 0 and 65535"),
        ("cannot listen; choose another --host or --port", "cannot listen; choose another --host or --port"),
        ("raise num_kv_blocks or lower max_model_len", "raise --num-kv-blocks or lower --max-model-len"),
        ("a seed and a port", "a seed and a port"),
        ("missing required field `max_tokens`", "missing required field `max_tokens`"),  # of a workload
        ("my_max_num_seqs, NORIA_max_num_seqs, x.max_num_seqs", "my_max_num_seqs, NORIA_max_num_seqs, x.max_num_seqs"),
    ],
)
def test_errors_name_flags_where_programs_name_fields(message: str, shown: str) -> None:
    assert with_flags(message) == shown


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        (
            "serve",
            ["--port INT", "--max-body-bytes SIZE", "--drain-s SECONDS", "--ssl-keyfile PATH", "--api-key KEY..."],
        ),
        ("generate", ["--prompt-file PATH", "--max-tokens SIZE", "--stop TEXT...", "--temperature FLOAT"]),
        ("chat", ["--system TEXT", "--seed INT", "--dtype bfloat16|float32"]),
    ],
)
def test_help_shows_what_values_are(command: str, wanted: list[str], capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert run([command, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert [text for text in wanted if text not in shown] == []
    assert re.findall(r"--[\w-]+ STR\b", shown) == []
