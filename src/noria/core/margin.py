"""How many KV blocks admission leaves free so that those who run can grow: the watermark.

Without a margin a full pool admits until the first decode that needs a block preempts somebody, whose prompt is then
computed again. A fixed share of the pool costs memory when it is not needed. So there are two parts: `watermark`, a
fixed share of the pool, and one that learns: a *share of what running requests may still compute*, up to their
`max_tokens`. A share of 0 admits whatever fits now, a share of 1 only what could run to its end. Each preemption
raises it until the margin has grown by what the victim had held; while nothing is preempted it melts, by a fiftieth
every eight steps. So it finds out how much of their `max_tokens` requests make use of. That part is never more
than half of the pool, for when that is next to nothing.

Asked by `noria.core.scheduler`. Never applied when nothing runs: then there is nobody to leave it to.
"""

from __future__ import annotations

_STEPS_TO_MELT = 8
_MELTING = 0.98


class Margin:
    """Blocks that a newcomer must leave free. `num_blocks_ahead`: how many more running requests may come to need."""

    def __init__(self, num_blocks: int, watermark: float, *, adaptive: bool) -> None:
        self._fixed = int(num_blocks * watermark)
        self._adaptive = adaptive
        self._most = num_blocks // 2
        self._num_calm_steps = 0
        self.share = 0.0

    def num_blocks_for(self, num_blocks_ahead: int) -> int:
        return self._fixed + min(self._most, int(self.share * num_blocks_ahead))

    def note_preemption(self, num_blocks_freed: int, num_blocks_ahead: int) -> None:
        """A running request gave back so many blocks; `num_blocks_ahead` is for those that are left."""
        self._num_calm_steps = 0
        if self._adaptive:
            self.share = min(1.0, self.share + num_blocks_freed / (num_blocks_freed + num_blocks_ahead))

    def note_step(self) -> None:
        if self.share:
            self._num_calm_steps += 1
            if self._num_calm_steps >= _STEPS_TO_MELT:
                self._num_calm_steps = 0
                self.share *= _MELTING
