"""Options are defined once and reach the command line whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from cyclopts import App

from noria.cli.options import SAMPLING_HELP, WITHOUT_A_FLAG, GivenSampling, UsageError, takes_options
from noria.config import EngineOptions, ServerOptions
from noria.errors import OptionError
from noria.sampling import SamplingParams


def parse(arguments: Sequence[str]) -> tuple[EngineOptions, SamplingParams]:
    """What a command that takes all options is called with."""
    seen: list[Any] = []

    def command(*, engine: EngineOptions, sampling: GivenSampling) -> None:
        seen.append((engine, sampling.over({})))

    app = App(result_action="return_value")
    app.default(takes_options(command))
    app(list(arguments), exit_on_error=False, print_error=False)
    return seen[0]


VALUES: dict[str, tuple[str, Any]] = {
    "dtype": ("float32", "float32"),
    "device": ("cuda", "cuda"),
    "executor": ("torch", "torch"),
    "generation_config": ("none", "none"),
    "scheduling_policy": ("lpm", "lpm"),
    "max_prefill_share": ("0.25", 0.25),
    "watermark": ("0.25", 0.25),
}
"""Options whose value cannot be 48."""


def test_without_arguments_the_defaults_hold() -> None:
    assert parse([]) == (EngineOptions(), SamplingParams())


def test_every_option_has_help() -> None:
    assert all(spec.metadata["help"] for spec in dataclasses.fields(EngineOptions))
    names = [spec.name for spec in msgspec.structs.fields(SamplingParams)]
    assert list(SAMPLING_HELP) == [name for name in names if name not in WITHOUT_A_FLAG]


@pytest.mark.parametrize(
    "spec",
    # Where a command takes both, --seed is the request's; the engine's is tested with `bench`.
    [spec for spec in dataclasses.fields(EngineOptions) if spec.name != "seed"],
    ids=lambda spec: spec.name,
)
def test_every_engine_option_has_a_flag_its_aliases_and_a_variable(
    spec: dataclasses.Field[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if spec.type == "bool":
        assert getattr(parse([f"--no-{spec.name.replace('_', '-')}"])[0], spec.name) is False
        monkeypatch.setenv(f"NORIA_{spec.name.upper()}", "false")
        assert getattr(parse([])[0], spec.name) is False
        return
    text, value = VALUES.get(spec.name, ("48", 48))
    flags = (f"--{spec.name.replace('_', '-')}", f"--{spec.name}", *spec.metadata["aliases"])
    for flag in flags:
        assert getattr(parse([flag, text])[0], spec.name) == value
        assert getattr(parse([f"{flag}={text}"])[0], spec.name) == value
    monkeypatch.setenv(f"NORIA_{spec.name.upper()}", text)
    assert getattr(parse([])[0], spec.name) == value


def test_named_sampling_parameters_win_over_defaults_even_where_they_equal_noria_s_own() -> None:
    given = GivenSampling({"temperature": 1.0, "n": 2})
    assert given.over({"temperature": 0.6, "top_k": 20}) == SamplingParams(temperature=1.0, n=2, top_k=20)
    assert given.over({}) == SamplingParams(n=2)


def test_sampling_flags() -> None:
    numbers = ["--temperature", "0.5", "--max-tokens", "2k", "--stop-token-ids", "3", "--seed=-4"]
    numbers += ["--allowed-token-ids", "7", "--allowed-token-ids", "8", "--min-tokens", "2", "--prompt-logprobs", "1"]
    _, sampling = parse([*numbers, "--stop", "a", "--stop=-b", "--ignore-eos", "--no-skip-special-tokens"])
    assert sampling == SamplingParams(
        temperature=0.5,
        stop=("a", "-b"),
        max_tokens=2000,
        stop_token_ids=(3,),
        allowed_token_ids=(7, 8),
        min_tokens=2,
        prompt_logprobs=1,
        seed=-4,
        ignore_eos=True,
        skip_special_tokens=False,
    )


def test_values_out_of_bounds_are_usage_errors() -> None:
    with pytest.raises(UsageError, match=r"^--temperature must be between"):
        parse(["--temperature", "5"])
    with pytest.raises(UsageError, match=r"^--max-num-seqs must be at least 1"):
        parse(["--max-num-seqs", "0"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheduling-policy", "lifo"], "no scheduling policy 'lifo'.*use one of fcfs, priority, lpm, fair"),
        (["--scheduling-policy", "no.such.module:Policy"], "no scheduling policy 'no.such.module:Policy'"),
        (["--scheduling-policy", "noria.errors:NoriaError"], "not a subclass of noria.core.policies.base.Policy"),
        (["--max-prefill-share", "0"], "^--max-prefill-share must be above 0"),
        (["--watermark", "1.5"], "^--watermark is a share"),
    ],
)
def test_what_the_scheduler_could_not_work_with_is_a_usage_error(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(arguments)


@pytest.mark.parametrize(
    ("options", "name", "value", "what"),
    [
        (EngineOptions, "max_num_seqs", "64", "a whole number"),
        (EngineOptions, "max_num_seqs", 64.0, "a whole number"),
        (EngineOptions, "max_num_seqs", True, "a whole number"),
        (EngineOptions, "max_num_seqs", None, "a whole number"),
        (EngineOptions, "num_kv_blocks", "9", "a whole number or None"),
        (EngineOptions, "watermark", "0.1", "a number"),
        (EngineOptions, "watermark", False, "a number"),
        (EngineOptions, "request_deadline_s", [1], "a number or None"),
        (EngineOptions, "enable_prefix_caching", 1, "True or False"),
        (EngineOptions, "enable_prefix_caching", "no", "True or False"),
        (EngineOptions, "dtype", None, "a text"),
        (EngineOptions, "scheduling_policy", 3, "a text"),
        (ServerOptions, "served_model_name", "one", "a list of texts"),
        (ServerOptions, "port", "8000", "a whole number"),
    ],
)
def test_an_option_of_another_type_is_refused_by_name(options: Any, name: str, value: Any, what: str) -> None:
    with pytest.raises(OptionError, match=f"^{name} must be {what}, not "):
        options(**{name: value})


@pytest.mark.parametrize(
    ("options", "given", "what"),
    [
        (EngineOptions, {"threads": 257}, "threads must be at most 256, not 257"),
        (ServerOptions, {"health_stall_s": 0.0}, "health_stall_s must be above 0"),
        (ServerOptions, {"served_model_name": ("a", "")}, "served_model_name is empty"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(options: Any, given: dict[str, Any], what: str) -> None:
    with pytest.raises(OptionError, match=f"^{what}"):
        options(**given)
