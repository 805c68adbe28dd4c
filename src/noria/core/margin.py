"""How many KV blocks admission leaves free so that those who run can grow: the watermark.

Without a margin a full pool admits until the first decode that needs a block preempts somebody, whose prompt is then
computed again. A fixed share costs memory when it is not needed. So there are two parts: `watermark`, a fixed share
of the pool, and one that learns: each preemption adds what the victim had held, up to half of the pool, and
it melts away, a block in `steps_per_block` steps, while nothing is preempted.

Asked by `noria.core.scheduler`. Never applied when nothing runs: then there is nobody to leave it to.
"""

from __future__ import annotations


class Margin:
    """Blocks that a newcomer must leave free."""

    def __init__(self, num_blocks: int, watermark: float, *, adaptive: bool, steps_per_block: int = 8) -> None:
        self._fixed = int(num_blocks * watermark)
        self._adaptive = adaptive
        self._most = num_blocks // 2
        self._steps_per_block = steps_per_block
        self._learnt = 0
        self._num_calm_steps = 0

    @property
    def num_blocks(self) -> int:
        return self._fixed + self._learnt

    def note_preemption(self, num_blocks: int) -> None:
        """A running request gave back so many blocks."""
        self._num_calm_steps = 0
        if self._adaptive:
            self._learnt = min(self._most, self._learnt + num_blocks)

    def note_step(self) -> None:
        if self._learnt:
            self._num_calm_steps += 1
            if self._num_calm_steps >= self._steps_per_block:
                self._num_calm_steps = 0
                self._learnt -= 1
