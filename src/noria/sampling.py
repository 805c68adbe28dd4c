"""How one request wants its tokens chosen: names, defaults and bounds.

Only the parameters live here; `noria.runner.sampler` applies them. Field names are those that users
know from OpenAI's API and its common extensions.
"""

from __future__ import annotations

import msgspec

from noria.errors import RequestError

GREEDY_BELOW = 1e-5
"""A temperature under this means greedy decoding: highest score, lowest id on ties."""

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 4096
"""Of all stop strings of a request together: each sequence keeps a table of that size."""
MAX_TOKEN_ID = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one request; immutable, so it can be shared between its `n` sequences.

    `max_tokens` None means "what fits into the context". `seed` None means "the engine picks one".
    `logprobs` is the number of alternatives to report beside the chosen token (None: report nothing).
    `top_k` 0 or -1 means off.
    Raises `RequestError` naming the field when a value is out of bounds; what is accepted can go to another process,
    whose messages hold integers of 64 bits.
    """

    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, low, high in _BOUNDS:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # false for NaN too
                raise RequestError(f"{name} must be between {low} and {high}, not {_shown(value)}", param=name)
        if self.repetition_penalty <= 0:
            raise RequestError(
                f"repetition_penalty must be above 0, not {self.repetition_penalty}", param="repetition_penalty"
            )
        if self.top_p <= 0:
            raise RequestError(f"top_p must be above 0 and at most 1, not {self.top_p}", param="top_p")
        if any(not 0 <= token_id <= MAX_TOKEN_ID for token_id in self.stop_token_ids):
            raise RequestError(f"stop_token_ids must be between 0 and {MAX_TOKEN_ID}", param="stop_token_ids")
        if len(self.stop) > MAX_STOP_STRINGS or any(not s for s in self.stop):
            raise RequestError(f"stop takes up to {MAX_STOP_STRINGS} strings, none of them empty", param="stop")
        if sum(map(len, self.stop)) > MAX_STOP_CHARACTERS:
            raise RequestError(f"stop takes up to {MAX_STOP_CHARACTERS} characters in all", param="stop")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def _shown(value: float) -> str:
    """Any number at a sane length: an int may have more digits than Python is willing to print."""
    return str(value) if abs(value) < 2**64 or isinstance(value, float) else "a number beyond 64 bits"


_BOUNDS: tuple[tuple[str, float, float], ...] = (
    ("n", 1, 128),
    ("max_tokens", 1, 2**31 - 1),
    ("seed", -(2**63), 2**64 - 1),
    ("top_k", -1, 2**63 - 1),
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("logprobs", 0, MAX_LOGPROBS),
)
