"""The door: what can never be served is refused here, once, with the numbers.

"Never" is a pure function of a request and the configuration. After this, an accepted request either runs or
waits for something that will come. Called by `Scheduler.add`.
"""

from __future__ import annotations

from noria.config import SchedulerConfig
from noria.core.request import Request
from noria.errors import ContextLengthError, RequestError


def judge(request: Request, config: SchedulerConfig) -> None:
    """Accepts a request, resolving its `max_tokens`, or raises `RequestError` naming field and numbers."""
    num_prompt, limit = request.num_prompt_tokens, config.max_model_len
    if num_prompt == 0:
        raise RequestError("the prompt is empty: it needs at least one token", param="prompt")
    if config.vocab_size is not None:
        low, high = min(request.token_ids), max(request.token_ids)
        if low < 0 or high >= config.vocab_size:
            bad = low if low < 0 else high
            raise RequestError(
                f"token id {bad} is outside the vocabulary (0 .. {config.vocab_size - 1})", param="prompt"
            )
    if num_prompt >= limit:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens, but the context is {limit} tokens and one must be left "
            f"to generate: shorten it by {num_prompt - limit + 1}",
            param="prompt",
        )
    if request.max_tokens is None:
        request.max_tokens = limit - num_prompt
    elif num_prompt + request.max_tokens > limit:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens and max_tokens is {request.max_tokens}, together "
            f"{num_prompt + request.max_tokens}, but the context is {limit} tokens",
            param="max_tokens",
        )
