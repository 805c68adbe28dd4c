"""When a request has said enough: end of sequence, stop tokens, length. Asked after every accepted token.

Stop strings are not here: the core sees no text. The client that finds one calls `Scheduler.finish`.
"""

from __future__ import annotations

from noria.core.events import FinishReason
from noria.core.request import Request


def why_stopped(request: Request, eos_token_ids: tuple[int, ...]) -> tuple[FinishReason, int | None] | None:
    """The reason to end after the last token, and the stop token's id if it was one that the request asked for.

    End of sequence goes before length: an end-of-sequence token in the last allowed place is a `stop`.
    """
    token_id, sampling = request.token_ids[-1], request.sampling
    if token_id in eos_token_ids and not sampling.ignore_eos:
        return FinishReason.STOP, None
    if token_id in sampling.stop_token_ids:
        return FinishReason.STOP, token_id
    # Prompt plus max_tokens never exceeds the context, so this is the context's end as well.
    if request.num_output_tokens >= request.max_tokens:
        return FinishReason.LENGTH, None
    return None
