"""How a step's token budget is shared among unfinished prompts.

No chunk is longer than `long_prefill_token_threshold` while other requests are there: that is for their token gaps, so
nothing lifts it. Nor does one prompt take more than `max_prefill_share` of the budget while others could use it; what
they do not use is given to it afterwards. And each unfinished prompt that runs has a *floor*: at least half of an equal
share of what decodes leave (or all that it still needs, or what the other two allow, if those are less), whatever
stands before it. Without chunked prefill there are no such limits: a prompt runs whole or not at all.

Used by `noria.core.scheduler`, one `ChunkRule` per step.
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
        budget = config.max_num_batched_tokens
        self._threshold = self._share = budget
        self._num_reserved = 0
        if not is_alone and config.enable_chunked_prefill:
            self._threshold = config.long_prefill_token_threshold or budget
            self._share = max(1, int(budget * config.max_prefill_share))

    def in_turn(self, catching_up: Sequence[Request], num_left: int) -> Iterator[Request]:
        """Sets aside each request's floor out of the `num_left` tokens that steady requests leave, then yields one
        after the other, for `next_chunk` or to be passed by. There are at most `num_left` of them."""
        num_prompts = sum(not request.is_caught_up for request in catching_up)
        floor = 1
        if num_prompts:
            floor = max(1, (num_left - len(catching_up) + num_prompts) // (2 * num_prompts))
            floor = min(floor, self._threshold, self._share)
        floors = [1 if request.is_caught_up else min(floor, request.num_remaining) for request in catching_up]
        self._num_reserved = sum(floors)
        for request, own in zip(catching_up, floors, strict=True):
            self._num_reserved -= own
            yield request

    def next_chunk(self, request: Request, num_left: int) -> tuple[int, Limit]:
        """How many tokens the request may run now, at least one, and the limit that stops it if it could use more."""
        return self._cut(request.num_remaining, num_left - self._num_reserved)

    def first_chunk(self, num_remaining: int, num_left: int) -> tuple[int, Limit]:
        """The same for a newcomer; 0 tokens if none are left."""
        return self._cut(num_remaining, num_left)

    def more(self, chunk: Chunk, num_left: int) -> tuple[int, Limit]:
        """How many of the `num_left` tokens that nobody else could use may be added to a chunk, 0 or more."""
        num_allowed = self._threshold - chunk.num_tokens
        limit = Limit.LONG_PREFILL if num_allowed < num_left else Limit.TOKEN_BUDGET
        return max(0, min(num_left, chunk.num_left_out, num_allowed)), limit

    def _cut(self, num_wanted: int, num_left: int) -> tuple[int, Limit]:
        most, limit = num_left, Limit.TOKEN_BUDGET
        if self._share < most:
            most, limit = self._share, Limit.PREFILL_SHARE
        if self._threshold < most:
            most, limit = self._threshold, Limit.LONG_PREFILL
        return min(num_wanted, most), limit
