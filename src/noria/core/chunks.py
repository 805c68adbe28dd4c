"""How a step's token budget is shared among unfinished prompts.

Three numbers. A *cap*: no chunk is longer than `long_prefill_token_threshold`, nor than `max_prefill_share` of the
budget, unless the request is alone; what nobody else can use is given to capped prompts afterwards. A *floor*: each
unfinished prompt that runs gets at least half of an equal share of what decodes leave (or all that it still needs,
or the cap, if those are less), whatever stands before it. And what is *left*. Without chunked prefill there is no
cap: a prompt runs whole or not at all.

Used by `noria.core.scheduler`, one `ChunkRule` per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from noria.config import SchedulerConfig
from noria.core.plan import Limit
from noria.core.request import Request


class ChunkRule:
    """`is_alone`: there is only one request, running or waiting. Lengths in tokens."""

    def __init__(self, config: SchedulerConfig, *, is_alone: bool) -> None:
        self._cap, self._cap_limit = config.max_num_batched_tokens, Limit.TOKEN_BUDGET
        self._num_reserved = 0
        if is_alone or not config.enable_chunked_prefill:
            return
        share = max(1, int(config.max_num_batched_tokens * config.max_prefill_share))
        if share < self._cap:
            self._cap, self._cap_limit = share, Limit.PREFILL_SHARE
        if 0 < config.long_prefill_token_threshold < self._cap:
            self._cap, self._cap_limit = config.long_prefill_token_threshold, Limit.LONG_PREFILL

    def in_turn(self, catching_up: Sequence[Request], num_left: int) -> Iterator[Request]:
        """Sets aside each request's floor out of the `num_left` tokens that steady requests leave, then yields one
        after the other, for `next_chunk` or to be passed by. There are at most `num_left` of them."""
        num_prompts = sum(not request.is_caught_up for request in catching_up)
        floor = 1
        if num_prompts:
            floor = min(self._cap, max(1, (num_left - len(catching_up) + num_prompts) // (2 * num_prompts)))
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

    def _cut(self, num_wanted: int, num_left: int) -> tuple[int, Limit]:
        if num_left <= self._cap:
            return min(num_wanted, num_left), Limit.TOKEN_BUDGET
        return min(num_wanted, self._cap), self._cap_limit
