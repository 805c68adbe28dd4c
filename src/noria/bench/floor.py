"""How fast a step could be at best on a machine: `StepCosts` of a lowered program.

The floor of a step is the sum over linears, the logits head and attention of max(FLOP / peak, bytes / bandwidth). Bytes
are those that must come from memory at least once: the weights of a product, and the KV of the tokens attended to.
Everything else (norms, rotation, activations, the sampler, the scheduler) counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from noria.ops.lowering import Lowered, Operation
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

    num_tokens: int
    num_logits: int
    num_pairs: int
    """Of a query and a key that it sees."""
    num_kv_tokens: int
    """Different tokens whose KV is read: rows that share a block of a prefix read it once."""

    @classmethod
    def of(cls, batch: ForwardBatch, block_size: int) -> StepShape:
        query_lens = np.diff(batch.query_start).astype(np.int64)
        context_lens = batch.context_len.astype(np.int64)
        pairs = query_lens * (context_lens - query_lens) + query_lens * (query_lens + 1) // 2
        blocks = batch.block_table[batch.block_table != 0]  # those in use, of the first group; a shared one is full
        num_shared = len(blocks) - len(np.unique(blocks))
        return cls(
            num_tokens=len(batch.token_ids),
            num_logits=len(batch.logit_tokens),
            num_pairs=int(pairs.sum()),
            num_kv_tokens=int(context_lens.sum()) - num_shared * block_size,
        )

    @classmethod
    def decode(cls, num_rows: int, context_len: int) -> StepShape:
        """One token for each of some rows, `context_len` tokens with it."""
        num_kv_tokens = num_rows * context_len
        return cls(num_tokens=num_rows, num_logits=num_rows, num_pairs=num_kv_tokens, num_kv_tokens=num_kv_tokens)


class StepCosts:
    """What the steps of a program cost at least. `itemsize`: bytes of one number of weights and KV."""

    def __init__(self, program: Lowered, itemsize: int) -> None:
        sizes = {"linears": 0, "logits": 0}
        for op in program.operations:
            if (kind := kind_of(op)) in sizes:
                sizes[kind] += _num_weights(op)
        self._sizes = sizes
        attentions = [op.attention for op in program.operations if op.kind == "attention" and op.attention is not None]
        self._flops_per_pair = sum(4 * spec.q_size for spec in attentions)
        self._kv_bytes_per_token = sum(2 * spec.kv_size for spec in attentions) * itemsize
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
        work["attention"] = Work(
            float(self._flops_per_pair * shape.num_pairs), float(self._kv_bytes_per_token * shape.num_kv_tokens)
        )
        return work

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
        case "attention" | "norm":
            return op.kind
        case "rotary":
            return "rotary_kv"
    return "other"


def _num_weights(product: Operation) -> int:
    assert product.input is not None, "a product reads something"
    # Gate and up, multiplied on the way: two outputs for each number that is written.
    outputs_per_number = 2 if product.epilogue == "silu_mul" else 1
    return product.input.width * product.output.width * outputs_per_number
