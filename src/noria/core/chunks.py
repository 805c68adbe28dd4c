"""How a step's token budget is shared among unfinished prompts.

A prompt is *long* while it has more left than `max_prefill_share` of the budget. Long prompts together take no more
than that share of what decodes leave, in their order, while others could use the rest; what nobody uses is given to
them afterwards. No chunk is longer than `long_prefill_token_threshold` while other requests are there: that is for
their token gaps, so nothing lifts it. And everybody has a *floor*, whatever stands before it: an unfinished prompt
that runs gets at least half of an equal share of what decodes leave (or all that it still needs, or what the limits
above allow one prompt, if those are less), and a long newcomer an eighth of what long prompts may take, if that is
left. Without chunked prefill there are no such limits: a prompt runs whole or not at all.

Made for each step by `noria.core.scheduler`, asked by the two passes over running and waiting requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from noria.config import SchedulerConfig
from noria.core.draft import Chunk
from noria.core.plan import Limit
from noria.core.request import Request


class ChunkRule:
    """`is_alone`: there is only one request, running or waiting. Lengths in tokens."""

    def __init__(self, config: SchedulerConfig, *, is_alone: bool) -> None:
        self._has_limits = config.enable_chunked_prefill and not is_alone
        self._share = config.max_prefill_share
        self._long = int(config.max_num_batched_tokens * self._share)
        self._threshold = config.max_num_batched_tokens
        if self._has_limits and config.long_prefill_token_threshold:
            self._threshold = config.long_prefill_token_threshold
        self._most_for_long = self._num_long_left = 0
        self._floor = 1  # of the prompt whose turn it is
        self._num_reserved = 0

    def begin(self, num_left: int) -> None:
        """Decodes have left `num_left` tokens of the step."""
        self._most_for_long = self._num_long_left = max(1, int(num_left * self._share))
        self._floor = max(1, self._most_for_long // 8)

    def in_turn(self, catching_up: Sequence[Request], num_left: int) -> Iterator[Request]:
        """Sets aside each request's floor, then yields one after the other, for `next_chunk` or to be passed by.

        There are at most `num_left` of them.
        """
        newcomers_floor = self._floor
        num_prompts = sum(not request.is_caught_up for request in catching_up)
        floor = 1
        if num_prompts:
            floor = max(1, (num_left - len(catching_up) + num_prompts) // (2 * num_prompts))
            floor = min(floor, self._threshold, self._most_for_long)
        floors = [1 if request.is_caught_up else min(floor, request.num_remaining) for request in catching_up]
        self._num_reserved = sum(floors)
        for request, self._floor in zip(catching_up, floors, strict=True):
            self._num_reserved -= self._floor
            yield request
        self._floor = newcomers_floor

    def next_chunk(self, num_wanted: int, num_left: int) -> tuple[int, Limit]:
        """How many tokens the request whose turn it is may run now, at least one of a running request's and of a
        newcomer's if any are left; and the limit that stops it if it could use more."""
        most, limit = num_left - self._num_reserved, Limit.TOKEN_BUDGET
        if self._is_long(num_wanted):
            allowed = max(self._floor, self._num_long_left)
            if allowed < most:
                most, limit = allowed, Limit.PREFILL_SHARE
        if self._threshold < most:
            most, limit = self._threshold, Limit.LONG_PREFILL
        return min(num_wanted, most), limit

    def spend(self, num_wanted: int, num_tokens: int) -> None:
        """A request that wanted `num_wanted` tokens was given so many."""
        if self._is_long(num_wanted):
            self._num_long_left = max(0, self._num_long_left - num_tokens)

    def more(self, chunk: Chunk, num_left: int) -> tuple[int, Limit]:
        """How many of the `num_left` tokens that nobody else could use may be added to a chunk, 0 or more."""
        num_allowed = self._threshold - chunk.num_tokens
        limit = Limit.LONG_PREFILL if num_allowed < num_left else Limit.TOKEN_BUDGET
        return max(0, min(num_left, chunk.num_left_out, num_allowed)), limit

    def _is_long(self, num_wanted: int) -> bool:
        return self._has_limits and num_wanted > self._long
