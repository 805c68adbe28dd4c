"""The one text pipeline: token ids, then text, then stop strings, then deltas.

Used for every sequence, streamed or not, by whoever talks to the engine: the engine knows tokens only. The client
that sees `TextDelta.stop` ends the request in the engine and drops the surplus tokens, which are not counted here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from noria.sampling import SamplingParams
from noria.text.detokenizer import Detokenizer
from noria.text.stop_strings import StopStrings
from noria.text.tokenizer import Tokenizer


class TextDelta(msgspec.Struct, frozen=True):
    """What one push adds to a sequence."""

    text: str
    num_tokens: int
    """How many of the pushed tokens count; fewer than were pushed only when a stop string ended the sequence."""
    stop: str | None
    """The stop string that ended the sequence here; the stream is over."""


class TextStream:
    """The output text of one sequence, in any bunching of its tokens.

    The text continues the prompt: no space is trimmed from its beginning, and a character that the prompt began is
    given whole. A token that ends the sequence by its id (a stop token, or one of `eos_token_ids` unless
    `ignore_eos`) contributes no text unless `include_stop_str_in_output`. `eos_token_ids` are all of the model's;
    by default the tokenizer's own. A stop string that completes within the first `min_tokens` tokens is text like
    any other.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        prompt_token_ids: Sequence[int],
        eos_token_ids: Collection[int] | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=sampling.skip_special_tokens)
        self._detokenizer.continue_from(prompt_token_ids)
        self._stops = StopStrings(sampling.stop, include_stop=sampling.include_stop_str_in_output)
        self._silent_ids: frozenset[int] = frozenset()
        if not sampling.include_stop_str_in_output:
            if eos_token_ids is None:
                eos_token_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
            self._silent_ids = frozenset(sampling.stop_token_ids)
            if not sampling.ignore_eos:
                self._silent_ids |= frozenset(eos_token_ids)
        self._num_tokens = 0
        self._min_tokens = sampling.min_tokens
        self._over = False
        self._stop: str | None = None

    def push(self, token_ids: Sequence[int], *, final: bool) -> TextDelta:
        """Add tokens; with `final`, nothing follows and what was held back is released.

        After the end, surplus tokens may still arrive from steps already under way: they are ignored.
        """
        if self._over:
            return TextDelta("", 0, self._stop)
        pieces: list[str] = []
        num_tokens = 0
        # One token at a time, so that a stop string is charged to the token that completes it.
        for token_id in token_ids:
            num_tokens += 1
            self._num_tokens += 1
            if token_id not in self._silent_ids and self._take(self._detokenizer.push((token_id,)), pieces):
                break
        if final and not self._over:
            if not self._take(self._detokenizer.flush(), pieces):
                pieces.append(self._stops.flush())
            self._over = True
        return TextDelta("".join(pieces), num_tokens, self._stop)

    @property
    def _may_stop(self) -> bool:
        return self._num_tokens > self._min_tokens or self._min_tokens == 0

    def _take(self, text: str, pieces: list[str]) -> bool:
        """Send text through the stop strings; true when that ends the stream."""
        if text:
            released, self._stop = self._stops.push(text, may_stop=self._may_stop)
            pieces.append(released)
            self._over = self._stop is not None
        return self._over
