"""Bounds on one call, before anything is made of it: the shape of its JSON, and what it may come to cost.

Called by `noria.server.endpoint` for every endpoint that generates. What a call may be in itself is decided here;
whether there is a place for it now is decided by the engine (`noria.core.admission`), which looks at the cheap bounds
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from noria.config import SchedulerConfig
from noria.core.admission import judge_call
from noria.errors import RequestError
from noria.sampling import SamplingParams
from noria.server.errors import ApiError

MAX_JSON_DEPTH = 64

MIN_JSON_VALUES = 2**18
JSON_VALUES_PER_TOKEN = 4
"""A body may have so many values per token of the context, and `MIN_JSON_VALUES` in any case: decoding them holds up
everybody (some 0.1 s per million). No prompt that fits into the context comes near."""

MAX_PROMPT_TOKENS = 2**20
"""Of all sequences of a call that has more than one: they are sent to the engine one by one, but in one go."""


def check_json(raw: bytes, config: SchedulerConfig) -> None:
    """Raises `ApiError` for a body of too many values, judged by what separates and opens them (in texts too)."""
    most = max(MIN_JSON_VALUES, JSON_VALUES_PER_TOKEN * config.max_model_len)
    if len(raw) > most and raw.count(b",") + raw.count(b"[") + raw.count(b"{") > most:
        raise ApiError(400, f"the body has more than {most} values", code="body_too_complex")


def check_depth(values: Any, raw: bytes) -> None:
    """Raises `ApiError` for decoded JSON that is nested beyond `MAX_JSON_DEPTH`."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_JSON_DEPTH:
        return
    level, depth = [values], 0
    while level:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise too_deep()
        level = [
            child
            for value in level
            if isinstance(value, list | dict)
            for child in (value.values() if isinstance(value, dict) else value)
            if isinstance(child, list | dict)
        ]


def too_deep() -> ApiError:
    """The refusal of JSON that is nested beyond `MAX_JSON_DEPTH`, whoever finds out."""
    return ApiError(400, f"the body is nested more than {MAX_JSON_DEPTH} levels deep", code="body_too_complex")


def estimate_cost(prompt_lengths: Sequence[int], sampling: SamplingParams, max_model_len: int) -> int:
    """What a call may come to: for each sequence, its prompt and what it may generate, times 1 + logprobs.

    Prompts that are scored count once more, times prompt_logprobs: one of their sequences scores them for all, but
    the answer shows them with each.
    """
    width = 1 + (sampling.logprobs or 0)
    total = 0
    for length in prompt_lengths:
        most_generated = max(max_model_len - length, 0) if sampling.max_tokens is None else sampling.max_tokens
        total += length + most_generated
    return total * sampling.n * width + scored_entries(prompt_lengths, sampling)


def scored_entries(prompt_lengths: Sequence[int], sampling: SamplingParams) -> int:
    """Log-probabilities of prompt tokens that an answer shows."""
    return sum(prompt_lengths) * (sampling.prompt_logprobs or 0) * sampling.n


def check_call(prompt_lengths: Sequence[int], sampling: SamplingParams, config: SchedulerConfig, max_cost: int) -> None:
    """Raises `RequestError` for a call that costs too much, or that could never be queued as a whole.

    `prompt_lengths`: tokens of each prompt.
    """
    if max(prompt_lengths, default=0) >= config.max_model_len:
        return  # too long in itself, which is said elsewhere, with better numbers
    num_sequences, num_tokens = len(prompt_lengths) * sampling.n, sum(prompt_lengths) * sampling.n
    field = "n" if sampling.n > 1 else "prompt"
    if num_sequences > 1 and num_tokens > MAX_PROMPT_TOKENS:
        raise RequestError(
            f"the prompts of this call's {num_sequences} sequences have {num_tokens} tokens together, more than "
            f"{MAX_PROMPT_TOKENS}: send them in several calls",
            param=field,
            code="request_too_large",
        )
    cost = estimate_cost(prompt_lengths, sampling, config.max_model_len)
    # What the context allows is never too much.
    is_plain = num_sequences == 1 and not sampling.logprobs and not sampling.prompt_logprobs
    if not is_plain and cost > max_cost:
        raise RequestError(
            f"this call may come to {cost} (tokens of prompts and answers of its {num_sequences} sequences, times 1 + "
            f"logprobs, and prompts times prompt_logprobs for each), more than {max_cost} (--max-request-cost): "
            "lower max_tokens, n, logprobs or prompt_logprobs, or send fewer prompts at once",
            param=field if sampling.max_tokens is not None else "max_tokens",
            code="request_too_large",
        )
    judge_call(prompt_lengths, sampling.n, config)
