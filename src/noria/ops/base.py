"""The op set that models are written in: `Ops[T, B]`.

A model (`noria.models`) is a pure function over these ops. `T` is a value: a `torch.Tensor` in
`noria.ops.reference`, a symbol in `noria.ops.record`. `B` is a handle to one step's batch: token ids, positions,
slots, block tables, which rows want logits. Both are bare type variables in model code, so that a model can hand
them on and do nothing else: it has no way to ask how many rows or tokens there are, and the type checker says so.

Shapes below use `tokens` for all tokens of the step, flattened row after row, and `logits` for those of them whose
logits are wanted. What is NOT here: fusion (a pass over the recorded program), flags for what to return (a model
declares outputs), and anything about how a value is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
B = TypeVar("B")
B_contra = TypeVar("B_contra", contravariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The shape of an attention layer; immutable and hashable, shared by all layers that are alike.

    Causal, over the row's own tokens. Raises `ValueError` for numbers that make no attention.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Multiplies the products of queries and keys, usually head_dim ** -0.5."""
    window: int | None = None
    """How many keys a query sees, its own the last of them: at position p those from p - window + 1. None: all."""
    soft_cap: float | None = None
    """Bounds scores: after `scale` they become soft_cap * tanh(score / soft_cap). None: they stay."""
    rotary_dim: int | None = None
    """How many dimensions of each head are rotated, the first ones. None: all."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key/value heads evenly")
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window of {self.window} keys leaves a query none, not even its own")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"a soft cap must be positive, not {self.soft_cap}")
        if self.rotary_dim is not None and not (0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0):
            raise ValueError(f"{self.rotary_dim} dimensions of {self.head_dim} cannot be rotated in pairs")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def rotated(self) -> int:
        """Dimensions of each head that are rotated, where there is a table."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


@dataclass(frozen=True, slots=True)
class Linear(Generic[T]):
    """The weights of one linear op: `weight` [out, in] and, if the model has one, `bias` [out].

    Several matrices that read the same input (q, k and v; gate and up) are one `Linear`, stacked along `out` at load.
    """

    weight: T
    bias: T | None = None


class Ops(Protocol[T, B_contra]):
    """What a model may compute. Values have the executor's activation type unless a docstring says float32."""

    def embedding(self, weight: T, batch: B_contra) -> T:
        """Rows of `weight` [vocab, hidden] for the batch's token ids: [tokens, hidden]."""

    def linear(self, x: T, linear: Linear[T]) -> T:
        """`x @ weight.T + bias`: [tokens, in] to [tokens, out]."""

    def rms_norm(self, x: T, weight: T, eps: float) -> T:
        """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension: [tokens, n], weight [n], to [tokens, n]."""

    def rotary_table(self, inverse_frequencies: T, batch: B_contra, *, factor: float = 1.0) -> T:
        """Cosines, then sines, of position x frequency, all times `factor`.

        [rotary_dim / 2] (float32) to [tokens, rotary_dim] (float32). Once per step; all layers with the same
        frequencies share it.
        """

    def rotary_and_write_kv(
        self,
        qkv: T,
        table: T | None,
        layer: int,
        spec: AttentionSpec,
        batch: B_contra,
        *,
        q_norm: T | None = None,
        k_norm: T | None = None,
        eps: float = 0.0,
    ) -> T:
        """Rotates queries and keys by their positions and writes keys and values to the KV memory of `layer`.

        qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], queries first. table: [tokens, rotary_dim]; None: no
        rotation. q_norm, k_norm: [head_dim] (float32), the weights of an RMS norm of each head before it is rotated.
        Returns the rotated queries [tokens, num_heads * head_dim]. Dimension i is paired with i + rotary_dim / 2.
        """

    def paged_attention(self, q: T, layer: int, spec: AttentionSpec, batch: B_contra) -> T:
        """Each query over the keys and values of its own row that it sees, read from the KV of `layer`.

        Those are the ones up to its own position, and with a window only the last of them: others are not read.

        [tokens, num_heads * head_dim] to the same. This step's keys and values must have been written.
        """

    def silu_mul(self, gate_up: T) -> T:
        """`silu(gate) * up`: [tokens, 2 * n], gate first, to [tokens, n]."""

    def gelu_mul(self, gate_up: T) -> T:
        """`gelu(gate) * up`, gelu in its tanh form: [tokens, 2 * n], gate first, to [tokens, n]."""

    def add(self, a: T, b: T) -> T:
        """`a + b`, both [tokens, n]."""

    def scale(self, x: T, factor: float) -> T:
        """`x * factor`: [tokens, n] to [tokens, n]."""

    def soft_cap(self, x: T, cap: float) -> T:
        """`cap * tanh(x / cap)`: of scores, [logits, vocab] to the same."""

    def select(self, x: T, batch: B_contra) -> T:
        """The rows of `x` whose logits are wanted: [tokens, n] to [logits, n]."""

    def logits(self, x: T, weight: T) -> T:
        """Scores of every vocabulary entry: [logits, hidden] and weight [vocab, hidden] to [logits, vocab], float32."""
