"""Turns option definitions into command line parameters: names, aliases, help, environment variables, defaults.

`noria.config.EngineOptions` and `noria.sampling.SamplingParams` define the options; a command takes all of them by one
decorator. Nothing about an option is written twice, except help for sampling parameters, which the vocabulary lacks.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from cyclopts import Group, Parameter

from noria.cli.values import converter, with_flags
from noria.config import EngineOptions, ServerOptions, shown_default, value_name
from noria.errors import ModelError, NoriaError, OptionError, RequestError
from noria.files.locate import check_model
from noria.sampling import SamplingParams

ENVIRONMENT_PREFIX = "NORIA_"

WITHOUT_A_FLAG = ("logit_bias", "bad_words")
"""Sampling parameters that are no single values: for requests and programs."""

SAMPLING_HELP = {
    "n": "Sequences to generate for each prompt.",
    "max_tokens": "Most tokens to generate; 0 only reads the prompt. Default: what fits into the context.",
    "min_tokens": "Least tokens to generate: nothing that would end the answer comes before.",
    "temperature": "Randomness; 0 always takes the most probable token.",
    "top_p": "Sample from the most probable tokens whose probabilities add up to this.",
    "top_k": "Sample from this many most probable tokens; 0: from all.",
    "min_p": "Leave out tokens less probable than this share of the most probable one.",
    "repetition_penalty": "Above 1: tokens of prompt and output become less likely.",
    "presence_penalty": "Above 0: tokens already in the output become less likely.",
    "frequency_penalty": "Above 0: tokens become less likely each time they are used.",
    "seed": "The same seed gives the same answer.",
    "stop": "Stop where this text appears; repeatable.",
    "stop_token_ids": "Stop at this token; repeatable.",
    "include_stop_str_in_output": "Keep the stop text at the end of the answer.",
    "ignore_eos": "Go on where the model would end.",
    "logprobs": "Report this many most probable tokens at each position (with --json).",
    "prompt_logprobs": "Report as many for each token of the prompt (with --json).",
    "allowed_token_ids": "Generate this token; repeatable, and others are out then. Default: all are allowed.",
    "skip_special_tokens": "Leave special tokens out of the text.",
}

SAMPLING_VALUES = {"max_tokens": "SIZE", "min_tokens": "SIZE", "stop": "TEXT"}
"""What stands for their values in help; INT or FLOAT for the others."""

SIZE_HELP = "A SIZE may have a unit: 4096, 8k (8,000), 2M, 4GiB (KiB and MiB likewise)."
VARIABLE_HELP = "Each may be an environment variable instead: {flag} is {variable}."

ENGINE_GROUP = Group(
    "Engine options",
    sort_key=2,
    help=f"{VARIABLE_HELP.format(flag='--max-num-seqs', variable='NORIA_MAX_NUM_SEQS')} {SIZE_HELP}",
)
SAMPLING_GROUP = Group(
    "Sampling options",
    sort_key=1,
    help="The defaults hold where the model's files recommend nothing else (--generation-config).",
)
SERVER_GROUP = Group(
    "Server options", sort_key=1, help=VARIABLE_HELP.format(flag="--max-body-bytes", variable="NORIA_MAX_BODY_BYTES")
)


@dataclasses.dataclass(frozen=True, slots=True)
class GivenSampling:
    """The sampling parameters that a command line names, and no others. Raises `RequestError` for one out of bounds."""

    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.over({})

    def over(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """These, and `defaults` for what was not named."""
        return SamplingParams(**{**defaults, **self.values})


class UsageError(NoriaError):
    """The command line is wrong: exit code 2."""


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces a command's parameters of type EngineOptions and GivenSampling by one flag for each of their fields.

    Both have a `seed`: where a command takes both, `--seed` is that of its own requests, which leaves the engine's
    without a use. The `model` of a command that takes EngineOptions is looked at first, so far as that takes no time.
    """
    hints = get_type_hints(command, include_extras=True)
    own: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[inspect.Parameter]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if hint is EngineOptions:
            hidden = ("seed",) if GivenSampling in hints.values() else ()
            every = _option_parameters(EngineOptions, ENGINE_GROUP)
            groups[parameter.name] = EngineOptions, [p for p in every if p.name not in hidden]
        elif hint is ServerOptions:
            groups[parameter.name] = ServerOptions, _option_parameters(ServerOptions, SERVER_GROUP)
        elif hint is GivenSampling:
            groups[parameter.name] = GivenSampling, _sampling_parameters()
        else:
            own.append(parameter.replace(annotation=hint))

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        for name, (build, parameters) in groups.items():
            values = {p.name: kwargs.pop(p.name) for p in parameters if p.name in kwargs}
            try:
                kwargs[name] = build(values) if build is GivenSampling else build(**values)
                if build is EngineOptions:
                    _check_policy(kwargs[name])
            except (OptionError, RequestError) as error:
                raise UsageError(with_flags(str(error))) from error
        if EngineOptions in hints.values():  # whoever has an engine has a model; its name is looked at before all else
            try:
                check_model(args[0] if args else kwargs.get("model"), needs_text=command.__name__ != "kernels")
            except ModelError as error:
                raise UsageError(str(error)) from error
        command(*args, **kwargs)

    flags = own + [parameter for _, parameters in groups.values() for parameter in parameters]
    run.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flags}
    del run.__wrapped__  # annotations are read through it otherwise
    return run


def _check_policy(options: EngineOptions) -> None:
    """Raises `OptionError` now for a policy that could not be loaded, and not when the model has been."""
    from noria.core.policies import find_policy

    find_policy(options.scheduling_policy)


def _option_parameters(options: type[EngineOptions | ServerOptions], group: Group) -> list[inspect.Parameter]:
    hints = get_type_hints(options)
    return [
        _parameter(
            spec.name,
            hints[spec.name],
            spec.default,
            value_name(spec),
            group=group,
            help=spec.metadata["help"],
            alias=spec.metadata["aliases"],
            env_var=ENVIRONMENT_PREFIX + spec.name.upper(),
            show_env_var=False,  # the head of the group tells them all
        )
        for spec in dataclasses.fields(options)
    ]


def _sampling_parameters() -> list[inspect.Parameter]:
    hints = get_type_hints(SamplingParams)
    return [
        _parameter(
            spec.name,
            hints[spec.name],
            spec.default,
            SAMPLING_VALUES.get(spec.name, "FLOAT" if hints[spec.name] is float else "INT"),
            group=SAMPLING_GROUP,
            help=SAMPLING_HELP[spec.name],
        )
        for spec in msgspec.structs.fields(SamplingParams)
        if spec.name not in WITHOUT_A_FLAG
    ]


def _parameter(name: str, hint: Any, default: Any, value: str, **settings: Any) -> inspect.Parameter:
    """One flag. `value` is what stands for its value in the help, and decides how that is read."""
    shown = shown_default(name, default).replace("True", "on").replace("False", "")  # a switch is off, of course
    settings["show_default"] = (lambda _: shown) if shown else False
    is_many = any(get_origin(part) is tuple for part in (hint, *get_args(hint)))
    if hint is bool:
        settings["negative"] = f"--no-{name.replace('_', '-')}"
    else:
        settings |= {"negative": (), "metavar": f"{value}..." if is_many else value}
        if not is_many:
            settings["converter"] = converter(value)
    if default == ():
        settings["allow_leading_hyphen"] = True  # texts may begin with one
    annotation = Annotated[hint, Parameter(**settings)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
