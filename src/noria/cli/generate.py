"""`noria generate`: complete prompts from the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from noria.cli.common import LogLevel, ModelArgument
from noria.cli.options import GivenSampling, UsageError
from noria.config import EngineOptions
from noria.core.plan import TokenLogprobs
from noria.errors import NoriaError
from noria.logs import log_to_stderr

if TYPE_CHECKING:
    from noria.outputs import CompletionOutput, RequestOutput
    from noria.text.tokenizer import Tokenizer


def generate(
    model: ModelArgument = None,
    *,
    prompt: Annotated[
        tuple[str, ...],
        Parameter(
            help="Text to complete; repeatable.",
            negative=(),
            metavar="TEXT...",
            show_default=False,
            allow_leading_hyphen=True,
        ),
    ] = (),
    prompt_file: Annotated[Path | None, Parameter(help="A file whose whole text is one more prompt.")] = None,
    json: Annotated[bool, Parameter(help="Print one JSON object per prompt.", negative=(), show_default=False)] = False,
    log_level: LogLevel = "info",
    sampling: GivenSampling,
    engine: EngineOptions,
) -> None:
    """Complete one or more prompts and print the completions.

    Without --prompt and --prompt-file the prompt is read from standard input.
    """
    prompts = _read_prompts(prompt, prompt_file)
    log_to_stderr(log_level)
    from noria.assembly import build_engine
    from noria.llm import LLM

    with LLM.from_assembled(build_engine(model, engine)) as llm:
        chosen = sampling.over(llm.assembled.sampling_defaults)
        results = llm.generate(prompts, chosen, progress=None if len(prompts) > 1 else False)
        for result in results:
            if json:
                print(msgspec.json.encode(_as_json(result, llm.tokenizer)).decode())
            else:
                _print_text(result)
    num_failed = sum(result.error is not None for result in results)
    if num_failed:
        raise NoriaError(f"{num_failed} of {len(results)} prompts failed")


def _read_prompts(prompts: Iterable[str], prompt_file: Path | None) -> list[str]:
    found = list(prompts)
    if prompt_file is not None:
        try:
            found.append(prompt_file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--prompt-file {prompt_file}: {getattr(error, 'strerror', None) or error}") from error
    if not found:
        text = "" if sys.stdin.isatty() else sys.stdin.read()
        if not text:
            raise UsageError("no prompt: give --prompt TEXT, --prompt-file FILE, or text on standard input")
        found.append(text)
    return found


def _print_text(result: RequestOutput) -> None:
    if result.error is not None:
        print(f"noria: {result.error}", file=sys.stderr)
    for output in result.outputs:
        print(output.text)


def _as_json(result: RequestOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    described: dict[str, Any] = {
        "prompt": result.prompt,
        "outputs": [_output_as_json(output, tokenizer) for output in result.outputs],
        "usage": {
            "prompt_tokens": result.num_prompt_tokens,
            "completion_tokens": result.num_completion_tokens,
            "cached_tokens": result.num_cached_tokens,
        },
        "error": None if result.error is None else str(result.error),
    }
    if result.prompt_logprobs is not None:
        described["prompt_logprobs"] = [
            position and _position_as_json(position, tokenizer) for position in result.prompt_logprobs
        ]
    return described


def _output_as_json(output: CompletionOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    described: dict[str, Any] = {
        "index": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if output.logprobs is not None:
        described["logprobs"] = [_position_as_json(position, tokenizer) for position in output.logprobs]
    return described


def _position_as_json(position: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    def name(token_id: int) -> str:
        return tokenizer.decode([token_id], skip_special_tokens=False)

    return {
        "token": name(position.token_id),
        "token_id": position.token_id,
        "logprob": position.logprob,
        "rank": position.rank,
        "top": [{"token": name(i), "token_id": i, "logprob": value} for i, value in position.top],
    }
