"""From a recorded program to what the native executor runs: `lower` fuses ops and assigns buffers.

The recorded program is exact and knows nothing of machines. Here ops that pay to be one become one: a norm writes
its result in the layout of the product that reads it; a product adds to the residual stream, or multiplies gate by up,
in its last step; the rows that want logits are picked by the norm before the head. Buffers are reused as soon as
nobody reads them any more. The result prints one operation per line.

Numpy and torch are not needed. What cannot be lowered is an `UnsupportedError` that names the op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from noria.errors import UnsupportedError
from noria.ops.base import AttentionSpec, Linear
from noria.ops.record import Argument, Op, Program, Value

BufferKind = Literal["rows", "slabs"]


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
    number: float = 0.0
    epilogue: str = "store"
    selects: bool = False
    on_logit_rows: bool = False
    fused: tuple[str, ...] = ()
    """The recorded ops that it stands for."""

    def __str__(self) -> str:
        source = ", ".join(str(x) for x in (self.input, self.table, self.weight, self.bias) if x is not None)
        layer = "" if self.layer is None else f" layer {self.layer}"
        return f"{self.output} = {self.kind}({source}){layer}  # {' + '.join(self.fused)}"


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
        self._pending: dict[str, Op] = {}  # values that the op reading them computes on the way
        self._queries: set[str] = set()  # these stand row by row in their slabs, as attention reads them

    def run(self) -> Lowered:
        for op in self._program.ops:
            getattr(self, f"_{op.name}", self._unknown)(op)
        return self._result

    def _unknown(self, op: Op) -> None:
        raise UnsupportedError(f"the native executor has no operation for {op}")

    # --- one method per recorded op ---

    def _embedding(self, op: Op) -> None:
        weight = _value(op, "weight")
        self._emit("embedding", op.result, "rows", weight=weight.name, fused=(op.name,))

    def _rotary_table(self, op: Op) -> None:
        frequencies = _value(op, "inverse_frequencies")
        self._emit("rotary_table", op.result, "rows", weight=frequencies.name, fused=(op.name,))

    def _select(self, op: Op) -> None:
        self._pending[op.result.name] = op

    def _rms_norm(self, op: Op) -> None:
        x, selects = _value(op, "x"), False
        fused: tuple[str, ...] = (op.name,)
        if x.name in self._pending:
            x, selects = _value(self._pending.pop(x.name), "x"), True
            fused = ("select", op.name)
        self._emit(
            "norm",
            op.result,
            "slabs",
            reads=(x,),
            weight=_value(op, "weight").name,
            number=_number(op, "eps"),
            selects=selects,
            on_logit_rows=selects,
            fused=fused,
        )

    def _linear(self, op: Op) -> None:
        readers = [reader.name for reader in self._readers.get(op.result.name, [])]
        if readers in (["add"], ["silu_mul"]):
            self._pending[op.result.name] = op
        else:
            self._product(op, op.result, "rows", "store", ("linear",))

    def _silu_mul(self, op: Op) -> None:
        linear = self._pending.pop(_value(op, "gate_up").name, None)
        if linear is None:
            self._unknown(op)
        else:
            self._product(linear, op.result, "slabs", "silu_mul", ("linear", "silu_mul"))

    def _add(self, op: Op) -> None:
        a, b = _value(op, "a"), _value(op, "b")
        linear = self._pending.pop(b.name, None)
        if linear is None or self._uses[a.name] != 1 or self._places[a.name].kind != "rows":
            self._unknown(op)
            return
        # Nobody reads the old stream after this, so the sum takes its place.
        self._places[op.result.name] = self._places.pop(a.name)
        self._uses[a.name] = 0
        self._product(linear, op.result, "rows", "add", ("linear", "add"))

    def _logits(self, op: Op) -> None:
        x = self._product_input(op)
        self._emit(
            "product", op.result, "rows", reads=(x,), weight=_value(op, "weight").name, on_logit_rows=True,
            fused=(op.name,),
        )  # fmt: skip

    def _rotary_and_write_kv(self, op: Op) -> None:
        self._queries.add(op.result.name)
        self._emit(
            "rotary",
            op.result,
            "slabs",
            reads=(_value(op, "qkv"), _value(op, "table")),
            layer=_layer(op),
            attention=_spec(op),
            fused=(op.name,),
        )

    def _paged_attention(self, op: Op) -> None:
        self._emit(
            "attention", op.result, "slabs", reads=(_value(op, "q"),), layer=_layer(op), attention=_spec(op),
            fused=(op.name,),
        )  # fmt: skip

    # --- helpers ---

    def _product(self, op: Op, result: Value, kind: BufferKind, epilogue: str, fused: tuple[str, ...]) -> None:
        linear = dict(op.arguments)["linear"]
        assert isinstance(linear, Linear)
        x = self._product_input(op)
        self._emit(
            "product",
            result,
            kind,
            reads=(x,),
            weight=linear.weight.name,
            bias=None if linear.bias is None else linear.bias.name,
            epilogue=epilogue,
            fused=fused,
        )

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
        number: float = 0.0,
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
                number=number,
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
