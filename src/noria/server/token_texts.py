"""How tokens and their log-probabilities are written in answers. Every number that goes out is finite, or null.

Three shapes: completions have parallel lists, chat has an object for each token, and `prompt_logprobs` (vLLM's
extension, in both) a map from token ids for each token of the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from noria.core.plan import TokenLogprobs
from noria.server.answers import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from noria.text.detokenizer import Detokenizer
from noria.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for "impossible", as in OpenAI's API: JSON has no infinity, and clients add these up."""


class TokenTexts:
    """Writes tokens of one tokenizer; `as_ids` writes "token_id:17" in the place of every text."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self.spelling(token_id)

    def spelling(self, token_id: int) -> str:
        """A token's text within a text: with its space, if it has one."""
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def key(self, token_id: int) -> str:
        """A text that differs for tokens that differ: part of a character is "bytes:\\xf0\\x9f", as OpenAI has it."""
        text = self.text(token_id)
        if "\ufffd" not in text:
            return text
        data = self._tokenizer.token_bytes(token_id)
        return text if data == text.encode() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def completion(
        self, positions: Sequence[TokenLogprobs], num_top: int, advance: Callable[[int], int]
    ) -> CompletionLogprobs:
        """`num_top` alternatives per token; `advance` takes a token into account and says where its text begins."""
        logprobs = CompletionLogprobs([], [], [], [])
        for position in positions:
            self.add_token(logprobs, position.token_id, position, num_top, advance(position.token_id))
        return logprobs

    def add_token(
        self, logprobs: CompletionLogprobs, token_id: int, position: TokenLogprobs | None, num_top: int, offset: int
    ) -> None:
        """Appends one entry to each list."""
        text = self.key(token_id)
        logprobs.text_offset.append(offset)
        logprobs.tokens.append(text)
        if position is None:
            logprobs.token_logprobs.append(None)
            logprobs.top_logprobs.append(None)
            return
        logprobs.token_logprobs.append(finite(position.logprob))
        # As OpenAI does, the token itself stands in the map even when it is not among the most probable.
        top = {self.key(other): finite(value) for other, value in position.top[:num_top]}
        top.setdefault(text, finite(position.logprob))
        logprobs.top_logprobs.append(top)

    def chat(self, positions: Sequence[TokenLogprobs]) -> ChatLogprobs:
        return ChatLogprobs([self._chat_token(position) for position in positions])

    def _chat_token(self, position: TokenLogprobs) -> ChatLogprob:
        top = [TopLogprob(*self._spelled(token_id, value)) for token_id, value in position.top]
        return ChatLogprob(*self._spelled(position.token_id, position.logprob), top)

    def _spelled(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        return self.text(token_id), finite(logprob), list(self._tokenizer.token_bytes(token_id))

    def prompt(self, positions: Sequence[TokenLogprobs | None], num_top: int) -> PromptLogprobs:
        """vLLM's: for each prompt token but the first (null) its `num_top` alternatives and itself, by token id."""
        return [None if position is None else self._prompt_token(position, num_top) for position in positions]

    def _prompt_token(self, position: TokenLogprobs, num_top: int) -> dict[str, PromptLogprob]:
        entries = [(position.token_id, position.logprob, position.rank)]
        entries += [(token_id, value, rank) for rank, (token_id, value) in enumerate(position.top[:num_top], start=1)]
        return {
            str(token_id): PromptLogprob(finite(value), rank, self.text(token_id)) for token_id, value, rank in entries
        }


class TextOffsets:
    """Where in a choice's text each of its tokens begins, as the tokens come.

    A token that has no text, or only part of a character, begins where the next one does.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, start: int = 0) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._offset = start

    def continue_from(self, prompt_token_ids: Sequence[int]) -> None:
        self._detokenizer.continue_from(prompt_token_ids)

    def advance(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._detokenizer.push((token_id,)))
        return offset


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
