"""A tiny deterministic executor in numpy: no weights, but real paged KV.

Public, for tests of anything above an executor. Its logits are a hash of the whole context, read back through the
block table from the slots the batch named, so a wrong slot, block, position or token changes the output or is
refused outright. They are the same however a sequence is chunked, batched or resumed. With several groups of layers
(`kv_windows`) each has KV of its own, and a sliding one sees its window only.

It does not resemble language, and its speed says nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from noria.errors import EngineError
from noria.runner.executor import Float32Array, ForwardBatch, Sampler

_UNWRITTEN = 0xFFFFFFFF
_GROUP = 1 << 40
"""Added to positions once for each group, so that none takes another's KV for its own."""


class HashExecutor:
    """Implements `noria.runner.executor.Executor`. Logits spread like a normal distribution's of deviation `scale`.

    `num_forwards` and `num_tokens` count what was asked of it.
    """

    kv_bytes_per_token = 8
    free_device_bytes: int | None = None
    sampler: Sampler | None = None

    def __init__(
        self, vocab_size: int = 64, *, scale: float = 2.0, kv_windows: tuple[int | None, ...] = (None,)
    ) -> None:
        self.vocab_size = vocab_size
        self.kv_windows = kv_windows
        self.num_forwards = 0
        self.num_tokens = 0
        self._scale = scale
        self._block_size = 0
        self._kv = np.zeros((0, 2), dtype=np.uint64)  # [slots, (token id, position)]

    def set_max_model_len(self, max_model_len: int) -> None:
        """Nothing depends on it."""

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._kv = np.full(((num_blocks + 1) * block_size, 2), _UNWRITTEN, dtype=np.uint64)

    def forward(self, batch: ForwardBatch) -> Float32Array:
        self.num_forwards += 1
        self.num_tokens += len(batch.token_ids)
        if len(batch.groups) != len(self.kv_windows):
            raise EngineError(
                f"the batch has blocks for {len(batch.groups)} of {len(self.kv_windows)} groups of layers"
            )
        for group, blocks in enumerate(batch.groups):
            if (blocks.slots < self._block_size).any():
                raise EngineError("a token was written into the null block")
            self._kv[blocks.slots, 0] = batch.token_ids
            self._kv[blocks.slots, 1] = batch.positions.astype(np.int64) + group * _GROUP
        row_of_token = np.repeat(np.arange(len(batch.context_len)), np.diff(batch.query_start))
        contexts = np.zeros(len(batch.logit_tokens), dtype=np.uint64)
        for group, blocks in enumerate(batch.groups):
            contexts += np.array(
                [
                    self._context_hash(group, blocks.block_table[row_of_token[i]], int(batch.positions[i]))
                    for i in batch.logit_tokens
                ],
                dtype=np.uint64,
            )
        return self._logits(contexts)

    def _context_hash(self, group: int, table: npt.NDArray[np.int32], last: int) -> np.uint64:
        window = self.kv_windows[group]
        positions = np.arange(0 if window is None else max(0, last - window + 1), last + 1)
        slots = table[positions // self._block_size].astype(np.int64) * self._block_size + positions % self._block_size
        found = self._kv[slots]
        expected = (positions + group * _GROUP).astype(np.uint64)
        if (found[:, 1] != expected).any():
            raise EngineError(f"the KV of positions {positions[found[:, 1] != expected]} is not in its slot")
        # Wrapping sum: the order of the terms does not matter, each is bound to its position.
        return np.uint64(_mix(found[:, 0] << np.uint64(32) | found[:, 1]).sum(dtype=np.uint64))

    def _logits(self, contexts: npt.NDArray[np.uint64]) -> Float32Array:
        columns = _mix(np.arange(self.vocab_size, dtype=np.uint64))
        words = _mix(contexts[:, None] ^ columns)
        # The sum of a word's eight bytes is near enough to normal: mean 1020, deviation 209.
        bytes_ = words.view(np.uint8).reshape(len(contexts), self.vocab_size, 8)
        logits: Float32Array = (bytes_.sum(axis=2, dtype=np.float32) - np.float32(1020)) * np.float32(self._scale / 209)
        return logits


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64: every input bit moves about half of the output bits."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
