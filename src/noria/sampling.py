"""How one request wants its tokens chosen: names, defaults and bounds.

Only the parameters live here; `noria.runner.sampler` applies them. Field names are those that users
know from OpenAI's API and its common extensions.
"""

from __future__ import annotations

import msgspec

from noria.errors import RequestError
from noria.typed_fields import mistyped, shown

GREEDY_BELOW = 1e-5
"""A temperature under this means greedy decoding: highest score, lowest id on ties."""

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 4096
"""Of all stop strings of a request together: each sequence keeps a table of that size."""
MAX_TOKEN_ID = 2**31 - 1
MAX_TOKEN_IDS = 4096
"""In each of `allowed_token_ids`, `stop_token_ids` and (all words together) `bad_words`: they travel with each
sequence."""
MAX_LOGIT_BIAS = 1024
"""Tokens that may have a bias."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one request; immutable, so it can be shared between its `n` sequences.

    `max_tokens` None means "what fits into the context"; with 0 the prompt is computed and nothing is generated.
    `min_tokens`: before so many tokens none that would end the sequence is chosen, and no stop string is looked for.
    `seed` None means "the engine picks one".
    `logprobs` is the number of alternatives to report beside the chosen token (None: report nothing), and
    `prompt_logprobs` the same for each token of the prompt but the first, given those before it.
    `top_k` 0 or -1 means off.
    `logit_bias` is added to tokens' scores before anything else, from -100 to 100.
    `allowed_token_ids` None means all. `bad_words` are sequences of token ids: the last one of a sequence is not
    chosen while the output ends with those before it.
    Lists are kept as tuples. Raises `RequestError` naming the field when a value is out of bounds or of the wrong type;
    what is accepted can go to another process, whose messages hold integers of 64 bits.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
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
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, message in mistyped(((name, getattr(self, name)) for name in _TYPES), _TYPES):
            raise RequestError(message, param=name, code="invalid_type")
        self._keep_lists_as_tuples()
        for name, low, high in _BOUNDS:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # false for NaN too
                raise RequestError(f"{name} must be between {low} and {high}, not {shown(value)}", param=name)
        if self.repetition_penalty <= 0:
            raise RequestError(
                f"repetition_penalty must be above 0, not {self.repetition_penalty}", param="repetition_penalty"
            )
        if self.top_p <= 0:
            raise RequestError(f"top_p must be above 0 and at most 1, not {self.top_p}", param="top_p")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must not exceed max_tokens, but is {self.min_tokens} of {self.max_tokens}",
                param="min_tokens",
            )
        self._check_token_ids()
        if len(self.stop) > MAX_STOP_STRINGS or any(not s for s in self.stop):
            raise RequestError(f"stop takes up to {MAX_STOP_STRINGS} strings, none of them empty", param="stop")
        if any("\ud800" <= character <= "\udfff" for character in "".join(self.stop)):
            raise RequestError("stop holds half of a surrogate pair, which is no character", param="stop")
        if sum(map(len, self.stop)) > MAX_STOP_CHARACTERS:
            raise RequestError(f"stop takes up to {MAX_STOP_CHARACTERS} characters in all", param="stop")

    def _keep_lists_as_tuples(self) -> None:
        for name in ("stop", "stop_token_ids", "allowed_token_ids"):
            if isinstance(value := getattr(self, name), list):
                msgspec.structs.force_setattr(self, name, tuple(value))
        if any(isinstance(words, list) for words in (self.bad_words, *self.bad_words)):
            msgspec.structs.force_setattr(self, "bad_words", tuple(tuple(word) for word in self.bad_words))

    def _check_token_ids(self) -> None:
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids allows nothing: name a token, or leave it out", param="allowed_token_ids"
            )
        if not all(self.bad_words):
            raise RequestError("bad_words holds an empty word", param="bad_words")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias takes up to {MAX_LOGIT_BIAS} tokens", param="logit_bias")
        for token_id, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:  # false for NaN too
                raise RequestError(
                    f"logit_bias must be between -100 and 100, not {shown(bias)} (token {shown(token_id)})",
                    param="logit_bias",
                )
        for name, token_ids in self.all_token_ids():
            if len(token_ids) > MAX_TOKEN_IDS:
                raise RequestError(f"{name} takes up to {MAX_TOKEN_IDS} token ids in all", param=name)
            if min(token_ids) < 0 or max(token_ids) > MAX_TOKEN_ID:
                raise RequestError(f"{name} must be between 0 and {MAX_TOKEN_ID}", param=name)

    def all_token_ids(self) -> list[tuple[str, tuple[int, ...]]]:
        """The token ids of each field that has some, with the field's name."""
        if not (self.stop_token_ids or self.logit_bias or self.allowed_token_ids or self.bad_words):
            return []
        of_words = tuple(token_id for word in self.bad_words for token_id in word)
        fields = (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", tuple(self.logit_bias)),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words", of_words),
        )
        return [(name, token_ids) for name, token_ids in fields if token_ids]

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


_TYPES: dict[str, str] = dict(SamplingParams.__annotations__)

_BOUNDS: tuple[tuple[str, float, float], ...] = (
    ("n", 1, 128),
    ("max_tokens", 0, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("seed", -(2**63), 2**64 - 1),
    ("top_k", -1, 2**63 - 1),
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
