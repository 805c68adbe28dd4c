"""The `noria` command over an engine without a model: what goes to stdout, what to stderr, and the exit codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import noria
import noria.assembly
from noria.cli.app import run
from noria.errors import ModelError
from noria.sampling import SamplingParams
from support.fakes import alphabet


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Commands get the alphabet instead of a model; returns what they asked for."""
    asked: list[Any] = []

    def build(model: str | None, options: Any, **wrap: Any) -> Any:
        asked.append((model, options))
        return alphabet()

    monkeypatch.setattr(noria.assembly, "build_engine", build)
    return asked


def give_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_generate_prints_completions_and_nothing_else(capsys: pytest.CaptureFixture[str], engine: list[Any]) -> None:
    assert run(["generate", "some/model", "--prompt", "a", "--prompt", "-m", "--max-tokens", "3", "--threads=1"]) == 0
    assert capsys.readouterr().out == "bcd\nnop\n"
    [(model, options)] = engine
    assert (model, options.threads) == ("some/model", 1)


def test_generate_samples_as_the_model_recommends_but_for_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[SamplingParams] = []
    defaults = {"temperature": 0.6, "top_k": 20}
    monkeypatch.setattr(
        noria.assembly, "build_engine", lambda *_, **__: replace(alphabet(), sampling_defaults=defaults)
    )
    generate = noria.LLM.generate

    def noting(self: noria.LLM, prompts: Any, sampling: SamplingParams, **rest: Any) -> Any:
        used.append(sampling)
        return generate(self, prompts, sampling, **rest)

    monkeypatch.setattr(noria.LLM, "generate", noting)
    assert run(["generate", "--prompt", "a", "--max-tokens", "1"]) == 0
    assert run(["generate", "--prompt", "a", "--max-tokens", "1", "--temperature", "1.0"]) == 0
    assert used == [
        SamplingParams(max_tokens=1, temperature=0.6, top_k=20),
        SamplingParams(max_tokens=1, temperature=1.0, top_k=20),
    ]


def test_generate_reads_files_and_stdin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("xyzk")
    assert run(["generate", "--prompt-file", str(tmp_path / "prompt.txt"), "--max-tokens", "2"]) == 0
    give_stdin(monkeypatch, "f")
    assert run(["generate", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == "lm\ngh\n"
    assert run(["generate", "--prompt-file", str(tmp_path / "absent")]) == 2


def test_generate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--json", "--prompt", "a", "--prompt", "", "--max-tokens", "2", "--n", "2", "--logprobs", "1"]
    assert run(["generate", *arguments]) == 1  # one prompt failed
    good, bad = map(json.loads, capsys.readouterr().out.splitlines())
    assert [output["text"] for output in good["outputs"]] == ["bc", "bc"]
    assert good["usage"] == {"prompt_tokens": 1, "completion_tokens": 4, "cached_tokens": 0}
    assert [entry["token"] for entry in good["outputs"][0]["logprobs"]] == ["b", "c"]
    assert good["outputs"][0]["finish_reason"] == "length"
    assert good["error"] is None
    assert bad["outputs"] == []
    assert "empty" in bad["error"]


def test_a_bad_prompt_is_said_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--prompt", "", "--prompt", "a", "--max-tokens", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == "b\n"
    assert "1 of 2 prompts failed" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--temperature", "5"], "temperature must be between 0.0 and 2.0"),
        (["generate", "--max-num-seqs", "0"], "--max-num-seqs must be at least 1"),
        (["generate", "--dtype", "int3"], "use one of bfloat16, float32"),
        (["serve", "no/model", "--scheduling-policy", "lifo"], "use one of fcfs, priority, lpm, fair"),
        (["serve", "--max-num-queued-reqs", "-1"], "--max-num-queued-reqs must be at least 0"),
        (["generate", "--max-num-sequences", "3"], "--max-num-seqs"),
        (["generate", "--max-tokens", "many"], "is not a size: a whole number"),
        (["bench", "throughput"], "--workload"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_the_fix(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_deliberate_errors_are_exit_code_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any, options: Any) -> Any:
        raise ModelError("no such model: no/where")

    monkeypatch.setattr(noria.assembly, "build_engine", refuse)
    assert run(["generate", "no/where", "--prompt", "a"]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "noria: no such model: no/where\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--prot", "1"], "Unknown option: --prot. Did you mean --port? See noria serve --help"),
        (
            ["generate", "org/m", "hello"],
            "no place for 'hello'. A prompt is given with --prompt TEXT. See noria generate",
        ),
        (["bench", "throughput"], "See noria bench throughput --help"),
        (["generate", "org/m", "--prompt", "a", "--device", "gpu"], "--device 'gpu' is not supported; use cpu, cuda"),
        (
            ["serve", "org/m", "--num-kv-blocks", "4", "--kv-cache-memory-bytes", "1GiB"],
            "--num-kv-blocks and --kv-cache-memory-bytes both size the KV pool",
        ),
        (["serve", "-m", "nosuch"], "no file or directory 'nosuch'"),
        (["generate", "org/m"], "no prompt: give --prompt TEXT"),
    ],
)
def test_slips_are_told_in_one_line_before_a_model_is_looked_for(
    arguments: list[str],
    message: str,
    engine: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    give_stdin(monkeypatch, "")
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), engine) == ("", 1, [])
    assert err.startswith("noria: ")
    assert message in err


@pytest.mark.parametrize(
    "command", [["serve"], ["generate", "--prompt", "a"], ["bench", "throughput", "--workload", "w"]]
)
def test_a_model_that_does_not_exist_is_wrong_usage_and_nothing_is_begun(
    command: list[str], engine: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("noria.server.start.serve", lambda *_: pytest.fail("it serves"))
    for given in (["nosuch.gguf"], ["--model", "nosuch.gguf"]):
        assert run([*command, *given]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("noria: there is no file or directory 'nosuch.gguf'; a model is a GGUF file")
        assert err.count("\n") == 1
    assert engine == []


def test_chat_reads_turns_from_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, "hi\n\n/reset\nhi\n/exit\nnever read\n")
    assert run(["chat", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out == '!"#\n!"#\n'  # what follows the space that ends the template


def test_chat_refuses_what_is_too_long_and_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_stdin(monkeypatch, f"{'x' * 90}\nhi\n")
    assert run(["chat", "--max-tokens", "1"]) == 0
    out, err = capsys.readouterr()
    assert out == "!\n"
    assert "/reset" in err


def test_chat_says_once_that_a_model_takes_no_messages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assembled = alphabet()
    monkeypatch.setattr(assembled.tokenizer, "chat_template", None)
    monkeypatch.setattr(noria.assembly, "build_engine", lambda *_, **__: assembled)
    give_stdin(monkeypatch, "hi\nhi\n")
    assert run(["chat"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("no chat template") == 1
    assert "noria generate runs it" in err


def test_bench_prints_one_json_line_last(capsys: pytest.CaptureFixture[str], tmp_path: Path, engine: list[Any]) -> None:
    workload = tmp_path / "w.jsonl"
    workload.write_text('{"arrival_s": 0, "prompt": "ab", "max_tokens": 3}\n{"prompt": [99], "max_tokens": 2}\n')
    assert run(["bench", "throughput", "--workload", str(workload), "--label", "here", "--seed", "5"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["label"], result["ok"], result["failed"], result["short"]) == ("here", 2, 0, 0)
    assert (result["prompt_tokens"], result["gen_tokens"], result["model"]) == (3, 5, "alphabet")
    assert result["floor_s"] is None  # of a program that is not known
    assert {"cpu", "cores", "threads", "before", "after"} == set(result["machine"])
    assert engine[0][1].seed == 5


def test_bench_names_the_line_that_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    workload = tmp_path / "w.jsonl"
    workload.write_text('{"prompt": "ab", "max_tokens": 3}\n{"prompt": "ab"}\n')
    assert run(["bench", "throughput", "--workload", str(workload)]) == 2
    assert f"{workload}, line 2" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"{noria.__version__}\n"


@pytest.mark.parametrize("arguments", [["generate", "--help"], ["generate", "--prompt", "a", "--log-level=error"]])
def test_a_reader_that_leaves_is_no_traceback(arguments: list[str]) -> None:
    program = f"""
import sys, time
sys.path.append({str(Path(__file__).parents[1])!r})
import noria.assembly
from noria.cli import main
from support.fakes import alphabet
noria.assembly.build_engine = lambda model, options, **wrap: alphabet()
time.sleep(0.3)
main({arguments!r})
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_a_key_that_came_out_empty_opens_the_server_to_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NORIA_API_KEY", "")
    monkeypatch.setattr("noria.server.start.serve", lambda *_: pytest.fail("it serves"))
    assert run(["serve"]) == 2
    assert "NORIA_API_KEY is set, but empty" in capsys.readouterr().err


def test_a_conversation_refuses_what_it_could_not_show(engine: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--n", "3"], ["--logprobs", "2"], ["--prompt-logprobs", "2"]):
        assert run(["chat", *arguments]) == 2
        assert "leave out --n, --logprobs and --prompt-logprobs" in capsys.readouterr().err
    assert engine == [], "before anything is loaded"
