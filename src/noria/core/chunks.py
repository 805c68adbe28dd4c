"""How a step's token budget is shared among unfinished prompts.

No chunk is longer than `long_prefill_token_threshold` while other requests are there: that is for their token gaps, so
nothing lifts it. A prompt is *long* while it has more left than `max_prefill_share` of the budget. One long prompt
takes no more than that in a step, and all that run leave something to others while somebody waits: half of what the
share leaves of what decodes leave. That part is for short newcomers; long ones wait for each other, and others go by
(unless the policy lets nobody go by, or they have run before).
What nobody uses goes to those that were cut. And every unfinished prompt that runs has a *floor*, whatever stands
before it: at least half of an equal share of what decodes leave (or all that it still needs, or what the limits above
allow one prompt, if those are less). Without chunked prefill there are no such limits: a prompt runs whole or not at
all.

Made for each step by `noria.core.scheduler`, asked by the two passes over running and waiting requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from noria.config import SchedulerConfig
from noria.core.draft import Chunk
from noria.core.plan import Limit
from noria.core.request import Request


class ChunkRule:
    """`is_alone`: there is only one request, running or waiting; `somebody_waits`: there is one that does not run.
    Lengths in tokens."""

    def __init__(self, config: SchedulerConfig, *, is_alone: bool, somebody_waits: bool = True) -> None:
        budget = config.max_num_batched_tokens
        self._share = config.max_prefill_share
        self._threshold = self._cap = budget
        self._somebody_waits = somebody_waits
        if config.enable_chunked_prefill and not is_alone:
            self._threshold = config.long_prefill_token_threshold or budget
            self._cap = max(1, int(budget * self._share))
        self._num_for_newcomers = 0
        self._num_reserved = 0
        self._floor: int | None = None  # of the running prompt whose turn it is; None when it is newcomers'

    def begin(self, num_left: int) -> None:
        """Decodes have left `num_left` tokens of the step."""
        if self._somebody_waits:
            self._num_for_newcomers = int(num_left * (1 - self._share) / 2)

    def in_turn(self, catching_up: Sequence[Request], num_left: int) -> Iterator[Request]:
        """Sets aside each request's floor, then yields one after the other, for `next_chunk` or to be passed by.

        There are at most `num_left` of them.
        """
        num_prompts = sum(not request.is_caught_up for request in catching_up)
        floor = 1
        if num_prompts:
            floor = max(1, (num_left - len(catching_up) + num_prompts) // (2 * num_prompts))
            floor = min(floor, self._threshold, self._cap)
        floors = [1 if request.is_caught_up else min(floor, request.num_remaining) for request in catching_up]
        self._num_reserved = sum(floors)
        for request, self._floor in zip(catching_up, floors, strict=True):
            self._num_reserved -= self._floor
            yield request
        self._floor = None

    def next_chunk(self, num_wanted: int, num_left: int, *, may_wait: bool = False) -> tuple[int, Limit]:
        """How many tokens the running prompt whose turn it is, or else a newcomer, may run now, and the limit that
        stops it if it could use more. At least one for a running prompt; 0 keeps a newcomer out.

        `may_wait`: a newcomer that others may go past, so that it can leave something to them.
        """
        most, limit = num_left - self._num_reserved, Limit.TOKEN_BUDGET
        if num_wanted > self._cap:
            allowed = min(self._cap, most)
            if self._floor is not None or may_wait:
                allowed = max(self._floor or 0, min(allowed, most - self._num_for_newcomers))
            if allowed < most:
                most, limit = allowed, Limit.PREFILL_SHARE
        if self._threshold < most:
            most, limit = self._threshold, Limit.LONG_PREFILL
        return min(num_wanted, most), limit

    def serve_everybody(self) -> None:
        """Nothing is set aside for short newcomers any more: there are none."""
        self._num_for_newcomers = 0

    def more(self, chunk: Chunk, num_left: int) -> tuple[int, Limit]:
        """How many of the `num_left` tokens that nobody else could use may be added to a chunk, 0 or more."""
        num_allowed = self._threshold - chunk.num_tokens
        limit = Limit.LONG_PREFILL if num_allowed < num_left else Limit.TOKEN_BUDGET
        return max(0, min(num_left, chunk.num_left_out, num_allowed)), limit
