"""From a recorded program to what the native executor runs: `lower` fuses ops and assigns buffers.

The recorded program is exact and knows nothing of machines. Here ops that pay to be one become one: a norm writes
its result in the layout of the product that reads it; a product scales what it gives, adds it to the residual stream,
multiplies gate by up or caps it in its last step; a norm of what is added adds it; the rows that want logits are picked
by the norm before the head. Buffers are reused as soon as
nobody reads them any more. The result prints one operation per line.

Numpy and torch are not needed. What cannot be lowered is an `UnsupportedError` that names the op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn

from noria.errors import UnsupportedError
from noria.ops.base import AttentionSpec, Linear
from noria.ops.record import Argument, Op, Program, Value

BufferKind = Literal["rows", "slabs"]
GATES = ("silu_mul", "gelu_mul")
"""Ops that a product of gates and what they gate does in its last step."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """float32 rows, or a product's input in slabs; `number` counts those of its kind."""

    kind: BufferKind
    number: int
    width: int

    def __str__(self) -> str:
        return f"{self.kind}{self.number}[{self.width}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of the native executor (csrc/executor.h)."""

    kind: str
    output: Buffer
    input: Buffer | None = None
    table: Buffer | None = None
    weight: str | None = None
    """A parameter's canonical name: of a matrix for embeddings and products, of a vector else."""
    bias: str | None = None
    layer: int | None = None
    attention: AttentionSpec | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    epsilon: float = 0.0
    """Of its norm, or norms."""
    factor: float = 1.0
    """Of what an embedding or a product gives, before it is added, and of a rotary table."""
    soft_cap: float = 0.0
    """Of what a product gives; 0: none."""
    epilogue: str = "store"
    selects: bool = False
    on_logit_rows: bool = False
    fused: tuple[str, ...] = ()
    """The recorded ops that it stands for."""

    def __str__(self) -> str:
        sources = (self.input, self.table, self.weight, self.bias, self.q_norm, self.k_norm)
        source = ", ".join(str(x) for x in sources if x is not None)
        layer = "" if self.layer is None else f" layer {self.layer}"
        if self.kind == "attention" and self.attention is not None and self.attention.window is not None:
            layer += f" window {self.attention.window}"
        return f"{self.output} = {self.kind}({source}){layer}  # {' + '.join(self.fused)}"


@dataclass(frozen=True, slots=True)
class _Pending:
    """An op that is left to the one that reads its result, with what has been found to be done to that."""

    op: Op
    factor: float = 1.0
    fused: tuple[str, ...] = ()

    def then(self, op: Op, factor: float = 1.0) -> _Pending:
        return replace(self, factor=self.factor * factor, fused=(*self.fused, op.name))


@dataclass(slots=True)
class Lowered:
    """Operations in order, and the buffers they use. The last operation's output are the logits."""

    operations: list[Operation] = field(default_factory=list)
    widths: dict[BufferKind, list[int]] = field(default_factory=lambda: {"rows": [], "slabs": []})

    def __str__(self) -> str:
        return "\n".join(map(str, self.operations))


def lower(program: Program) -> Lowered:
    """Fuses and assigns buffers. Raises `UnsupportedError`."""
    return _Lowering(program).run()


class _Lowering:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._uses = Counter(value.name for op in program.ops for value in _read(op))
        self._readers: dict[str, list[Op]] = {}
        for op in program.ops:
            for value in _read(op):
                self._readers.setdefault(value.name, []).append(op)
        self._result = Lowered()
        self._places: dict[str, Buffer] = {}
        self._free: list[Buffer] = []
        self._pending: dict[str, _Pending] = {}  # values that the op reading them computes on the way
        self._queries: set[str] = set()  # these stand row by row in their slabs, as attention reads them

    def run(self) -> Lowered:
        for op in self._program.ops:
            getattr(self, f"_{op.name}", self._unknown)(op)
        return self._result

    def _unknown(self, op: Op) -> NoReturn:
        raise UnsupportedError(f"the native executor has no operation for {op}")

    # --- one method per recorded op ---

    def _embedding(self, op: Op) -> None:
        self._now_or_later(_Pending(op, fused=(op.name,)), op.result, "scale")

    def _rotary_table(self, op: Op) -> None:
        frequencies = _value(op, "inverse_frequencies")
        factor = _number(op, "factor") if "factor" in dict(op.arguments) else 1.0
        self._emit("rotary_table", op.result, "rows", weight=frequencies.name, factor=factor, fused=(op.name,))

    def _select(self, op: Op) -> None:
        self._pending[op.result.name] = _Pending(op, fused=(op.name,))

    def _rms_norm(self, op: Op) -> None:
        if self._reader(op.result) == "add":
            self._pending[op.result.name] = _Pending(op, fused=(op.name,))
            return
        x, selects = _value(op, "x"), False
        fused: tuple[str, ...] = (op.name,)
        if (select := self._pending.pop(x.name, None)) is not None:
            x, selects, fused = _value(select.op, "x"), True, (*select.fused, op.name)
        self._emit(
            "norm",
            op.result,
            "slabs",
            reads=(self._in_rows(x, op),),
            weight=_value(op, "weight").name,
            epsilon=_number(op, "eps"),
            selects=selects,
            on_logit_rows=selects,
            fused=fused,
        )

    def _linear(self, op: Op) -> None:
        self._now_or_later(_Pending(op, fused=(op.name,)), op.result, "add", "scale", *GATES)

    def _silu_mul(self, op: Op) -> None:
        self._gate(op)

    def _gelu_mul(self, op: Op) -> None:
        self._gate(op)

    def _gate(self, op: Op) -> None:
        linear = self._pending.pop(_value(op, "gate_up").name, None)
        if linear is None or linear.factor != 1.0:
            self._unknown(op)
        else:
            self._product(linear.then(op), op.result, "slabs", epilogue=op.name)

    def _add(self, op: Op) -> None:
        a, b = _value(op, "a"), _value(op, "b")
        pending, place = self._pending.pop(b.name, None), self._places.get(a.name)
        if pending is None or place is None or self._uses[a.name] != 1 or place.kind != "rows":
            self._unknown(op)
            return
        # Nobody reads the old stream after this, so the sum takes its place.
        self._places[op.result.name] = self._places.pop(a.name)
        self._uses[a.name] = 0
        if pending.op.name == "linear":
            self._product(pending.then(op), op.result, "rows", epilogue="add")
        else:
            self._norm_add(pending.then(op), op.result)

    def _norm_add(self, norm: _Pending, result: Value) -> None:
        self._emit(
            "norm_add",
            result,
            "rows",
            reads=(self._in_rows(_value(norm.op, "x"), norm.op),),
            weight=_value(norm.op, "weight").name,
            epsilon=_number(norm.op, "eps"),
            fused=norm.fused,
        )

    def _logits(self, op: Op) -> None:
        self._now_or_later(_Pending(op, fused=(op.name,)), op.result, "scale", "soft_cap")

    def _scale(self, op: Op) -> None:
        pending = self._pending.pop(_value(op, "x").name, None)
        if pending is None or pending.op.name == "select":
            self._unknown(op)
            return
        further = ("add",) if pending.op.name == "linear" else ("soft_cap",) if pending.op.name == "logits" else ()
        self._now_or_later(pending.then(op, _number(op, "factor")), op.result, *further)

    def _soft_cap(self, op: Op) -> None:
        pending = self._pending.pop(_value(op, "x").name, None)
        if pending is None:
            self._unknown(op)
        else:
            self._product(pending.then(op), op.result, "rows", soft_cap=_number(op, "cap"))

    def _rotary_and_write_kv(self, op: Op) -> None:
        arguments = dict(op.arguments)
        self._queries.add(op.result.name)
        self._emit(
            "rotary",
            op.result,
            "slabs",
            reads=tuple(x for x in (arguments["qkv"], arguments["table"]) if isinstance(x, Value)),
            layer=_layer(op),
            attention=_spec(op),
            q_norm=_value(op, "q_norm").name if "q_norm" in arguments else None,
            k_norm=_value(op, "k_norm").name if "k_norm" in arguments else None,
            epsilon=_number(op, "eps") if "eps" in arguments else 0.0,
            fused=(op.name,),
        )

    def _paged_attention(self, op: Op) -> None:
        self._emit(
            "attention", op.result, "slabs", reads=(_value(op, "q"),), layer=_layer(op), attention=_spec(op),
            fused=(op.name,),
        )  # fmt: skip

    # --- helpers ---

    def _reader(self, value: Value) -> str | None:
        """What the only op that reads a value is called, if it can do more than read; None if there are others."""
        readers = self._readers.get(value.name, [])
        if len(readers) != 1 or (readers[0].name == "add" and _value(readers[0], "b") != value):
            return None
        return readers[0].name

    def _now_or_later(self, pending: _Pending, result: Value, *readers: str) -> None:
        """Leaves an op to the one that reads its result if that is one of `readers`, or else emits it."""
        if self._reader(result) in readers:
            self._pending[result.name] = pending
        elif pending.op.name == "embedding":
            weight = _value(pending.op, "weight")
            self._emit("embedding", result, "rows", weight=weight.name, factor=pending.factor, fused=pending.fused)
        else:
            self._product(pending, result, "rows")

    def _product(
        self,
        pending: _Pending,
        result: Value,
        kind: BufferKind,
        *,
        epilogue: str = "store",
        soft_cap: float = 0.0,
    ) -> None:
        """A linear op or the logits, with what is done to the sums on the way to `result`."""
        is_head = pending.op.name == "logits"
        linear = Linear(_value(pending.op, "weight")) if is_head else _argument(pending.op, "linear")
        assert isinstance(linear, Linear)
        self._emit(
            "product",
            result,
            kind,
            reads=(self._product_input(pending.op),),
            weight=linear.weight.name,
            bias=None if linear.bias is None else linear.bias.name,
            factor=pending.factor,
            soft_cap=soft_cap,
            epilogue=epilogue,
            on_logit_rows=is_head,
            fused=pending.fused,
        )

    def _in_rows(self, x: Value, op: Op) -> Value:
        place = self._places.get(x.name)
        if place is None or place.kind != "rows":
            self._unknown(op)
        return x

    def _product_input(self, op: Op) -> Value:
        x = _value(op, "x")
        if self._places[x.name].kind != "slabs" or x.name in self._queries:
            self._unknown(op)
        return x

    def _emit(
        self,
        kind: str,
        result: Value,
        place: BufferKind,
        *,
        reads: tuple[Value, ...] = (),
        weight: str | None = None,
        bias: str | None = None,
        layer: int | None = None,
        attention: AttentionSpec | None = None,
        q_norm: str | None = None,
        k_norm: str | None = None,
        epsilon: float = 0.0,
        factor: float = 1.0,
        soft_cap: float = 0.0,
        epilogue: str = "store",
        selects: bool = False,
        on_logit_rows: bool = False,
        fused: tuple[str, ...],
    ) -> None:
        sources = [self._places[value.name] for value in reads]
        # The output is placed before the inputs are given up: an operation never writes into what it reads.
        output = self._places.get(result.name) or self._place(result, place)
        for value in reads:
            self._uses[value.name] -= 1
            if not self._uses[value.name]:
                self._free.append(self._places.pop(value.name))
        self._result.operations.append(
            Operation(
                kind=kind,
                output=output,
                input=sources[0] if sources else None,
                table=sources[1] if len(sources) > 1 else None,
                weight=weight,
                bias=bias,
                layer=layer,
                attention=attention,
                q_norm=q_norm,
                k_norm=k_norm,
                epsilon=epsilon,
                factor=factor,
                soft_cap=soft_cap,
                epilogue=epilogue,
                selects=selects,
                on_logit_rows=on_logit_rows,
                fused=fused,
            )
        )

    def _place(self, value: Value, kind: BufferKind) -> Buffer:
        width = value.shape[1]
        assert isinstance(width, int), f"{value} has no width"
        for buffer in self._free:
            if (buffer.kind, buffer.width) == (kind, width):
                self._free.remove(buffer)
                break
        else:
            widths = self._result.widths[kind]
            buffer = Buffer(kind, len(widths), width)
            widths.append(width)
        self._places[value.name] = buffer
        return buffer


def _read(op: Op) -> Iterator[Value]:
    """The computed values that an op reads, weights left out."""
    for _, argument in op.arguments:
        if isinstance(argument, Value) and argument.name.startswith("%"):
            yield argument


def _argument(op: Op, name: str) -> Argument:
    return dict(op.arguments)[name]


def _value(op: Op, name: str) -> Value:
    value = _argument(op, name)
    assert isinstance(value, Value)
    return value


def _number(op: Op, name: str) -> float:
    value = _argument(op, name)
    assert isinstance(value, int | float)
    return float(value)


def _layer(op: Op) -> int:
    layer = _argument(op, "layer")
    assert isinstance(layer, int)
    return layer


def _spec(op: Op) -> AttentionSpec:
    spec = _argument(op, "spec")
    assert isinstance(spec, AttentionSpec)
    return spec
