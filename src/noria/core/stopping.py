"""When a request has said enough: end of sequence, stop tokens, length. Asked about the token that may be its last.

Stop strings are not here: the core sees no text. The client that finds one calls `Scheduler.finish`.
"""

from __future__ import annotations

from noria.core.events import FinishReason
from noria.core.request import Request


def stop_ids(request: Request, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """All tokens that end the request."""
    own = request.sampling.stop_token_ids
    return frozenset(own if request.sampling.ignore_eos else (*own, *eos_token_ids))


def why_stopped(request: Request, eos_token_ids: tuple[int, ...]) -> tuple[FinishReason, int | None] | None:
    """The reason to end after the last token, and the stop token's id if it was one that the request asked for.

    End of sequence goes before length: an end-of-sequence token in the last allowed place is a `stop`.
    """
    token_id = request.token_ids[-1]
    if token_id in request.stop_ids:
        is_eos = token_id in eos_token_ids and not request.sampling.ignore_eos
        return FinishReason.STOP, None if is_eos else token_id
    # Prompt plus max_tokens never exceeds the context, so this is the context's end as well.
    if len(request.token_ids) >= request.max_num_tokens:
        return FinishReason.LENGTH, None
    return None
