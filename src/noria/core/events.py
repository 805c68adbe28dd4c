"""What the core tells the outside about one request: tokens, never text."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from noria.core.plan import TokenLogprobs
from noria.errors import EngineError, NoriaError, RequestError, UnavailableError


class FinishReason(StrEnum):
    STOP = "stop"  # end of sequence, stop token, or a stop string that the client found
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"  # the client went away or asked for it
    ERROR = "error"  # the engine failed, or found that it cannot serve the request after all
    TIMEOUT = "timeout"  # a deadline of the server passed


class RequestEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one request, or its end, or both. The last event of a request has a `finish_reason`.

    `stop_reason` is the stop token's id (None for the model's own end of sequence). `num_cached_tokens` is how
    many prompt tokens were found in the prefix cache at first admission.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    """What went wrong, when `finish_reason` is `ERROR` or `TIMEOUT`."""
    error_code: str | None = None
    """The same for machines: `queue_full`, `draining`, `deadline_exceeded`, `refused` (the request can never be
    served), or None for a failure."""

    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the next prompt tokens, from the second on; they may come bunch by bunch, before there are tokens."""

    def as_exception(self) -> NoriaError | None:
        """What a caller should see raised; None if the request did not go wrong."""
        if self.finish_reason is None or self.finish_reason not in (FinishReason.ERROR, FinishReason.TIMEOUT):
            return None
        message = self.error or "the engine failed"
        match self.error_code:
            case None:
                return EngineError(message)
            case "refused":
                return RequestError(message, code="refused")
            case code:
                return UnavailableError(message, code=code)
