"""The door: what can never be served is refused here, once, with the numbers; and so is what has no place in the queue.

"Never" is a pure function of a request and the configuration (`judge`). After this, an accepted request either runs
or waits for something that will come. Called by `Scheduler.add`; `judge` also by clients that would rather refuse at
once, and `check_priority` only by them: the scheduler itself takes any number.
"""

from __future__ import annotations

from collections.abc import Sequence

from noria.config import SchedulerConfig
from noria.core.policies import POLICIES
from noria.errors import ContextLengthError, RequestError, UnavailableError
from noria.sampling import SamplingParams


def judge(prompt_token_ids: Sequence[int], max_tokens: int | None, config: SchedulerConfig) -> int:
    """Accepts a request and returns its `max_tokens` (what fits, when it did not say), or raises `RequestError`."""
    num_prompt, limit = len(prompt_token_ids), config.max_model_len
    if num_prompt == 0:
        raise RequestError("the prompt is empty: it needs at least one token", param="prompt")
    if max_tokens is None and num_prompt >= limit:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens, but this model's maximum context length is {limit} tokens and one "
            f"must be left to generate: shorten it by {num_prompt - limit + 1}",
            param="prompt",
        )
    if max_tokens is not None and num_prompt + max_tokens > limit:
        is_prompt_alone_too_long = num_prompt + min(max_tokens, 1) > limit
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, together "
            f"{num_prompt + max_tokens}, but this model's maximum context length is {limit} tokens",
            param="prompt" if is_prompt_alone_too_long else "max_tokens",
        )
    if config.vocab_size is not None:
        low, high = min(prompt_token_ids), max(prompt_token_ids)
        if low < 0 or high >= config.vocab_size:
            bad = low if low < 0 else high
            raise RequestError(
                f"token id {bad} is outside the vocabulary (0 .. {config.vocab_size - 1})", param="prompt"
            )
    return limit - num_prompt if max_tokens is None else max_tokens


def check_sampling(sampling: SamplingParams, max_tokens: int, config: SchedulerConfig) -> None:
    """Raises `RequestError` for token ids that the model does not have, and for more `min_tokens` than can come.

    `max_tokens` is what `judge` returned.
    """
    if sampling.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}, but {max_tokens} tokens fit into the context behind the prompt",
            param="min_tokens",
        )
    if config.vocab_size is None:
        return
    for name, token_ids in sampling.all_token_ids():
        if (greatest := max(token_ids)) >= config.vocab_size:
            raise RequestError(
                f"{name} has token id {greatest}, which is outside the vocabulary (0 .. {config.vocab_size - 1})",
                param=name,
            )


def judge_call(prompt_lengths: Sequence[int], n: int, config: SchedulerConfig) -> None:
    """Raises `RequestError` for a call whose sequences, taken all or none, an empty queue has no place for.

    `prompt_lengths`: tokens of each prompt, which has `n` sequences. The same rule as `check_queue`: the first
    prompt is never too long, and the further sequences of a prompt do not wait for tokens of their own.
    """
    num_sequences, num_places = len(prompt_lengths) * n, config.num_slots + config.max_num_queued_reqs
    if num_sequences > num_places:
        raise RequestError(
            f"this call has {num_sequences} sequences, but at most {config.num_slots} may run and "
            f"{config.max_num_queued_reqs} more wait (max_num_queued_reqs): send them in several calls",
            param="n" if n > 1 else "prompt",
            code="request_too_large",
        )
    most, num_tokens = config.max_num_queued_tokens, sum(prompt_lengths)
    if most is not None and len(prompt_lengths) > 1 and num_tokens > most:
        raise RequestError(
            f"this call's prompts have {num_tokens} tokens together, but at most {most} may wait "
            "(max_num_queued_tokens): send them in several calls",
            param="prompt",
            code="request_too_large",
        )


MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1


def check_priority(priority: int, config: SchedulerConfig) -> None:
    """Raises `RequestError` for a priority that is out of bounds, or that would have no effect. 0 is always fine.

    A policy of somebody's own may look at priorities; of those that come with Noria only `priority` does.
    """
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise RequestError(
            f"priority must be between {MIN_PRIORITY} and {MAX_PRIORITY}, not {priority}", param="priority"
        )
    policy = config.scheduling_policy
    if priority != 0 and policy in POLICIES and policy != "priority":
        raise RequestError(
            f"priority {priority} would have no effect under the scheduling policy {policy}: start the server with "
            '--scheduling-policy priority (noria.LLM: scheduling_policy="priority"), or leave it out',
            param="priority",
        )


def check_queue(
    num_running: int, num_waiting: int, num_queued_tokens: int, num_prompt: int, config: SchedulerConfig
) -> None:
    """Raises `UnavailableError` if the queue has no place for one more request of `num_prompt` tokens.

    Those that would run at once do not count as queued. A prompt is never too long for an empty queue.
    """
    num_places = config.num_slots + config.max_num_queued_reqs
    if num_running + num_waiting >= num_places:
        raise UnavailableError(
            f"the queue is full: {num_running} requests run and {num_waiting} wait, at most {config.num_slots} may run "
            f"and {config.max_num_queued_reqs} more wait (max_num_queued_reqs)",
            code="queue_full",
        )
    most = config.max_num_queued_tokens
    if most is not None and num_queued_tokens and num_prompt and num_queued_tokens + num_prompt > most:
        raise UnavailableError(
            f"the queue is full: prompts of {num_queued_tokens} tokens together are waiting, this one has "
            f"{num_prompt}, and at most {most} may wait (max_num_queued_tokens)",
            code="queue_full",
        )
