"""How fast a step could be at best on a machine: `StepCosts` of a lowered program.

The floor of a step is the sum over linears, the logits head and attention of max(FLOP / peak, bytes / bandwidth). Bytes
are those that must come from memory at least once: the weights of a product, and the KV of the tokens attended to.
Everything else (norms, rotation, activations, the sampler, the scheduler) counts nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from noria.ops.lowering import GATES, Lowered, Operation
from noria.runner.executor import ForwardBatch

KINDS = ("linears", "logits", "attention", "rotary_kv", "norm", "other")
"""Kinds of operations that times are reported by."""
COSTED = ("linears", "logits", "attention")
"""Those that the floor counts."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a kind of operations has to do in a step."""

    flops: float
    """A multiplication and an addition are two."""
    num_bytes: float

    def seconds(self, peak_flops: float, bytes_per_s: float) -> float:
        return max(self.flops / peak_flops, self.num_bytes / bytes_per_s)


@dataclass(frozen=True, slots=True)
class StepShape:
    """As much of a step as its cost depends on."""

    query_lens: tuple[int, ...]
    """Tokens of each row."""
    context_lens: tuple[int, ...]
    """Tokens of each row that have KV at the end of the step."""
    num_logits: int
    num_shared: int = 0
    """Tokens of `context_lens` that are counted again: rows that share a block of a prefix read it once."""

    @classmethod
    def of(cls, batch: ForwardBatch, block_size: int) -> StepShape:
        blocks = batch.block_table[batch.block_table != 0]  # those in use, of the first group; a shared one is full
        return cls(
            query_lens=tuple(np.diff(batch.query_start).tolist()),
            context_lens=tuple(batch.context_len.tolist()),
            num_logits=len(batch.logit_tokens),
            num_shared=(len(blocks) - len(np.unique(blocks))) * block_size,
        )

    @classmethod
    def decode(cls, num_rows: int, context_len: int) -> StepShape:
        """One token for each of some rows, `context_len` tokens with it."""
        return cls((1,) * num_rows, (context_len,) * num_rows, num_logits=num_rows)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    def attended(self, window: int | None) -> tuple[int, int]:
        """By a layer with that window: pairs of a query and a key that it sees, and tokens whose KV is read once."""
        pairs = kv_tokens = 0
        for num_queries, context_len in zip(self.query_lens, self.context_lens, strict=True):
            reach = context_len if window is None else window
            # The query at position p sees p + 1 keys, at most `reach`.
            num_short = min(max(reach - (context_len - num_queries), 0), num_queries)
            first, last = context_len - num_queries + 1, context_len - num_queries + num_short
            pairs += num_short * (first + last) // 2 + (num_queries - num_short) * reach
            kv_tokens += min(context_len, num_queries - 1 + reach)
        return pairs, max(kv_tokens - self.num_shared, 0)


class StepCosts:
    """What the steps of a program cost at least. `itemsize`: bytes of one number of weights and KV."""

    def __init__(self, program: Lowered, itemsize: int) -> None:
        sizes = {"linears": 0, "logits": 0}
        for op in program.operations:
            if (kind := kind_of(op)) in sizes:
                sizes[kind] += _num_weights(op)
        self._sizes = sizes
        self._attentions = Counter(
            op.attention for op in program.operations if op.kind == "attention" and op.attention is not None
        )
        self._itemsize = itemsize

    @property
    def weight_bytes(self) -> int:
        """Of all products: what every step reads."""
        return sum(self._sizes.values()) * self._itemsize

    def work(self, shape: StepShape) -> dict[str, Work]:
        """By kind, those of `COSTED`."""
        rows = {"linears": shape.num_tokens, "logits": shape.num_logits}
        work = {
            kind: Work(2.0 * size * rows[kind], float(size * self._itemsize) if rows[kind] else 0.0)
            for kind, size in self._sizes.items()
        }
        flops = num_bytes = 0.0
        for spec, num_layers in self._attentions.items():
            num_pairs, num_kv_tokens = shape.attended(spec.window)
            flops += num_layers * 4.0 * spec.q_size * num_pairs
            num_bytes += num_layers * 2.0 * spec.kv_size * num_kv_tokens * self._itemsize
        return work | {"attention": Work(flops, num_bytes)}

    def floor_s(self, shapes: Iterable[StepShape], peak_flops: float, bytes_per_s: float) -> dict[str, float]:
        """Seconds by kind, added up over steps."""
        total = dict.fromkeys(COSTED, 0.0)
        for shape in shapes:
            for kind, work in self.work(shape).items():
                total[kind] += work.seconds(peak_flops, bytes_per_s)
        return total


def kind_of(op: Operation) -> str:
    """Which of `KINDS` an operation counts as."""
    match op.kind:
        case "product":
            return "logits" if op.on_logit_rows else "linears"
        case "attention":
            return "attention"
        case "norm" | "norm_add":
            return "norm"
        case "rotary":
            return "rotary_kv"
    return "other"


def _num_weights(product: Operation) -> int:
    assert product.input is not None, "a product reads something"
    # Gate and up, multiplied on the way: two outputs for each number that is written.
    outputs_per_number = 2 if product.epilogue in GATES else 1
    return product.input.width * product.output.width * outputs_per_number
