"""Runs a model once on symbols and keeps what it did: `record` gives a `Program`, a flat list of ops.

The recorded program is the whole model: `run` executes it through any op set. A native executor compiles it; fusion
will be a pass over it. Recording needs no weights and no torch, and infers every shape, so that a model that puts
the wrong things together fails here by name. `tokens` and `logits` stand for the only two sizes that change from
step to step; a program in which any other trace of the batch is found comes from a model that breaks the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from noria.ops.base import AttentionSpec, B, Linear, Ops, T
from noria.runner.executor import ForwardBatch

Dim = int | str
"""A size: a number, or "tokens" or "logits"."""


@dataclass(frozen=True, slots=True)
class Value:
    """A symbolic value: a weight (named) or the result of the op of that number."""

    name: str
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.shape))}]"


class Handle(Enum):
    """Stands in a program for what each run brings anew."""

    BATCH = "batch"


Argument = Value | Linear[Value] | AttentionSpec | Handle | int | float | None


@dataclass(frozen=True, slots=True)
class Op:
    """One call of a method of `Ops`, by its name and its arguments' names."""

    name: str
    arguments: tuple[tuple[str, Argument], ...]
    result: Value

    def __str__(self) -> str:
        return f"{self.result} = {self.name}({', '.join(_show(key, value) for key, value in self.arguments)})"


@dataclass(frozen=True, slots=True)
class Program:
    """A recorded model. Prints one op per line; equal models print equally."""

    weights: tuple[Value, ...]
    """Those that the ops use, in the order of first use."""
    ops: tuple[Op, ...]
    outputs: tuple[tuple[str, Value], ...]

    def __str__(self) -> str:
        returned = ", ".join(f"{name}={value}" for name, value in self.outputs)
        return "\n".join([*map(str, self.ops), f"return {returned}"])


class Recorder:
    """The op set that only writes down: implements `Ops[Value, ForwardBatch]`. Use it through `record`."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def embedding(self, weight: Value, batch: ForwardBatch) -> Value:
        _, hidden = _matrix(weight)
        return self._add("embedding", ("tokens", hidden), weight=weight, batch=Handle.BATCH)

    def linear(self, x: Value, linear: Linear[Value]) -> Value:
        rows, width = _matrix(x)
        outputs, inputs = _matrix(linear.weight)
        _expect(width == inputs, "linear", x, linear.weight)
        if linear.bias is not None:
            _expect(linear.bias.shape == (outputs,), "linear", linear.weight, linear.bias)
        return self._add("linear", (rows, outputs), x=x, linear=linear)

    def rms_norm(self, x: Value, weight: Value, eps: float) -> Value:
        _expect(weight.shape == x.shape[-1:], "rms_norm", x, weight)
        return self._add("rms_norm", x.shape, x=x, weight=weight, eps=eps)

    def rotary_table(self, inverse_frequencies: Value, batch: ForwardBatch, *, factor: float = 1.0) -> Value:
        (pairs,) = inverse_frequencies.shape
        assert isinstance(pairs, int)
        arguments: dict[str, Argument] = {"inverse_frequencies": inverse_frequencies}
        if factor != 1.0:
            arguments["factor"] = factor
        return self._add("rotary_table", ("tokens", 2 * pairs), **arguments, batch=Handle.BATCH)

    def rotary_and_write_kv(
        self,
        qkv: Value,
        table: Value | None,
        layer: int,
        spec: AttentionSpec,
        batch: ForwardBatch,
        *,
        q_norm: Value | None = None,
        k_norm: Value | None = None,
        eps: float = 0.0,
    ) -> Value:
        _expect(qkv.shape == ("tokens", spec.qkv_size), "rotary_and_write_kv", qkv)
        if table is not None:
            _expect(table.shape == ("tokens", spec.rotated), "rotary_and_write_kv", table)
        arguments: dict[str, Argument] = {"qkv": qkv, "table": table, "layer": layer, "spec": spec}
        for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
            if norm is not None:
                _expect(norm.shape == (spec.head_dim,), "rotary_and_write_kv", qkv, norm)
                arguments[name] = norm
        if q_norm is not None or k_norm is not None:
            arguments["eps"] = eps
        return self._add("rotary_and_write_kv", ("tokens", spec.q_size), **arguments, batch=Handle.BATCH)

    def paged_attention(self, q: Value, layer: int, spec: AttentionSpec, batch: ForwardBatch) -> Value:
        _expect(q.shape == ("tokens", spec.q_size), "paged_attention", q)
        return self._add("paged_attention", q.shape, q=q, layer=layer, spec=spec, batch=Handle.BATCH)

    def silu_mul(self, gate_up: Value) -> Value:
        return self._gated("silu_mul", gate_up)

    def gelu_mul(self, gate_up: Value) -> Value:
        return self._gated("gelu_mul", gate_up)

    def add(self, a: Value, b: Value) -> Value:
        _expect(a.shape == b.shape, "add", a, b)
        return self._add("add", a.shape, a=a, b=b)

    def scale(self, x: Value, factor: float) -> Value:
        return self._add("scale", x.shape, x=x, factor=factor)

    def soft_cap(self, x: Value, cap: float) -> Value:
        return self._add("soft_cap", x.shape, x=x, cap=cap)

    def select(self, x: Value, batch: ForwardBatch) -> Value:
        rows, width = _matrix(x)
        _expect(rows == "tokens", "select", x)
        return self._add("select", ("logits", width), x=x, batch=Handle.BATCH)

    def logits(self, x: Value, weight: Value) -> Value:
        rows, width = _matrix(x)
        vocab, hidden = _matrix(weight)
        _expect(width == hidden, "logits", x, weight)
        return self._add("logits", (rows, vocab), x=x, weight=weight)

    def _gated(self, name: str, gate_up: Value) -> Value:
        rows, width = _matrix(gate_up)
        _expect(isinstance(width, int) and width % 2 == 0, name, gate_up)
        assert isinstance(width, int)
        return self._add(name, (rows, width // 2), gate_up=gate_up)

    def _add(self, name: str, shape: tuple[Dim, ...], **arguments: Argument) -> Value:
        result = Value(f"%{len(self.ops)}", shape)
        self.ops.append(Op(name, tuple(arguments.items()), result))
        return result


def record(
    forward: Callable[[Recorder, Any, ForwardBatch], Any],
    bind: Callable[[Mapping[str, Value]], Any],
    shapes: Mapping[str, tuple[int, ...]],
    batch: ForwardBatch,
) -> Program:
    """Records one call of `forward(ops, bind(weights), batch)`, which returns a dataclass of output values.

    `shapes` are those of the parameters by canonical name (`WeightPlan.shapes`, and the computed ones). `batch` is
    handed to the model as every executor hands it its own handle; no rule-abiding model reads it.
    """
    recorder = Recorder()
    weights = {name: Value(name, shape) for name, shape in shapes.items()}
    outputs = forward(recorder, bind(weights), batch)
    assert is_dataclass(outputs), "a model returns a dataclass of its outputs"
    used = {value.name: value for op in recorder.ops for _, argument in op.arguments for value in _values(argument)}
    return Program(
        weights=tuple(value for name, value in used.items() if name in weights),
        ops=tuple(recorder.ops),
        outputs=tuple((field.name, getattr(outputs, field.name)) for field in fields(outputs)),
    )


def run(program: Program, ops: Ops[T, B], weights: Mapping[str, T], batch: B) -> dict[str, T]:
    """Executes a program through an op set: its outputs by name. Raises `KeyError` for a weight it is not given."""
    values: dict[str, T] = {value.name: weights[value.name] for value in program.weights}

    def resolve(argument: Argument) -> Any:
        match argument:
            case Value():
                return values[argument.name]
            case Linear():
                return Linear(*(None if v is None else values[v.name] for v in (argument.weight, argument.bias)))
            case Handle.BATCH:
                return batch
            case _:
                return argument

    for op in program.ops:
        method = getattr(ops, op.name)
        values[op.result.name] = method(**{name: resolve(argument) for name, argument in op.arguments})
    return {name: values[value.name] for name, value in program.outputs}


def _values(argument: Argument) -> list[Value]:
    match argument:
        case Value():
            return [argument]
        case Linear(weight=weight, bias=bias):
            return [weight] if bias is None else [weight, bias]
        case _:
            return []


def _show(key: str, argument: Argument) -> str:
    match argument:
        case Value() | Linear():
            return " + ".join(map(str, _values(argument)))
        case AttentionSpec():
            return _show_attention(argument)
        case Handle():
            return argument.value
        case _:
            return f"{key}={argument!r}"


def _show_attention(spec: AttentionSpec) -> str:
    shown = f"heads={spec.num_heads}/{spec.num_kv_heads}x{spec.head_dim}, scale={spec.scale!r}"
    further = (("window", spec.window), ("soft_cap", spec.soft_cap), ("rotary_dim", spec.rotary_dim))
    return "".join([shown, *(f", {name}={value!r}" for name, value in further if value is not None)])


def _matrix(value: Value) -> tuple[Dim, Dim]:
    if len(value.shape) != 2:
        raise ValueError(f"{value} must have two dimensions")
    return value.shape[0], value.shape[1]


def _expect(condition: bool, op: str, *values: Value) -> None:
    if not condition:
        raise ValueError(f"{op}: shapes do not fit: {' and '.join(map(str, values))}")
