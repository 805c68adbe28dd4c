"""Lowering a recorded program: what is fused, what is printed, and what cannot be done is said by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.support import tiny_model
from noria.errors import UnsupportedError
from noria.files.sources import open_model
from noria.models import registry
from noria.models.decoder import Outputs
from noria.ops.base import AttentionSpec, Linear
from noria.ops.lowering import lower
from noria.ops.record import Op, Program, Value, record
from noria.runner.executor import ForwardBatch

EMPTY = np.zeros(0, dtype=np.int32)
NO_BATCH = ForwardBatch(EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, np.zeros((0, 0), dtype=np.int32), EMPTY)


def recorded(path: Path, **config: int) -> Program:
    tiny_model("qwen2", **config).save_pretrained(path)
    files = open_model(path)
    architecture = registry.find(files.config.architecture)
    shapes = architecture.plan(files).shapes
    shapes |= {name: value.shape for name, value in architecture.constants(files.config).items()}
    return record(architecture.forward, partial(architecture.bind, files.config), shapes, NO_BATCH)


def test_one_layer_is_eight_operations(tmp_path: Path) -> None:
    assert str(lower(recorded(tmp_path, num_hidden_layers=1))).splitlines() == [
        "rows0[16] = rotary_table(rope.inverse_frequencies)  # rotary_table",
        "rows1[64] = embedding(embedding.weight)  # embedding",
        "slabs0[64] = norm(rows1[64], layers.0.attention_norm.weight)  # rms_norm",
        "rows2[128] = product(slabs0[64], layers.0.qkv.weight, layers.0.qkv.bias)  # linear",
        "slabs0[64] = rotary(rows2[128], rows0[16]) layer 0  # rotary_and_write_kv",
        "slabs1[64] = attention(slabs0[64]) layer 0  # paged_attention",
        "rows1[64] = product(slabs1[64], layers.0.attention_output.weight)  # linear + add",
        "slabs0[64] = norm(rows1[64], layers.0.mlp_norm.weight)  # rms_norm",
        "slabs2[96] = product(slabs0[64], layers.0.gate_up.weight)  # linear + silu_mul",
        "rows1[64] = product(slabs2[96], layers.0.down.weight)  # linear + add",
        "slabs1[64] = norm(rows1[64], norm.weight)  # select + rms_norm",
        "rows3[131] = product(slabs1[64], head.weight)  # logits",
    ]


def test_more_layers_need_no_more_buffers(tmp_path: Path) -> None:
    one, five = (lower(recorded(tmp_path / str(n), num_hidden_layers=n)) for n in (1, 5))
    assert one.widths == five.widths
    assert len(five.operations) - len(one.operations) == 4 * 8


def test_no_operation_writes_into_what_it_reads_except_to_add(tmp_path: Path) -> None:
    for op in lower(recorded(tmp_path)).operations:
        assert op.output not in (op.input, op.table)


def test_what_it_has_no_operation_for_is_named(tmp_path: Path) -> None:
    program = recorded(tmp_path, num_hidden_layers=1)
    strange = Op("scale", (("x", program.ops[2].result), ("factor", 2.0)), Value("%99", ("tokens", 64)))
    with pytest.raises(UnsupportedError, match=r"no operation for %99\[tokens, 64\] = scale"):
        lower(Program(program.weights, (*program.ops[:3], strange), program.outputs))


def test_what_further_architectures_do_costs_few_operations() -> None:
    """Scales, caps and head norms none; a norm of what is added one."""
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, window=8, soft_cap=50.0)
    shapes = {"e": (131, 64), "f": (8,), "qkv": (128, 64), "o": (64, 64), "gate_up": (192, 64), "down": (64, 96)}
    shapes |= {"n": (64,), "h": (16,)}

    def forward(ops: Any, w: dict[str, Any], batch: Any) -> Outputs[Value]:
        table = ops.rotary_table(w["f"], batch, factor=1.5)
        x = ops.scale(ops.embedding(w["e"], batch), 8.0)
        qkv = ops.linear(ops.rms_norm(x, w["n"], 1e-5), Linear(w["qkv"]))
        q = ops.rotary_and_write_kv(qkv, table, 0, spec, batch, q_norm=w["h"], k_norm=w["h"], eps=1e-6)
        branch = ops.linear(ops.paged_attention(q, 0, spec, batch), Linear(w["o"]))
        x = ops.add(x, ops.rms_norm(branch, w["n"], 1e-5))
        gated = ops.gelu_mul(ops.linear(ops.rms_norm(x, w["n"], 1e-5), Linear(w["gate_up"])))
        x = ops.add(x, ops.scale(ops.linear(gated, Linear(w["down"])), 0.5))
        logits = ops.logits(ops.rms_norm(ops.select(x, batch), w["n"], 1e-5), w["e"])
        return Outputs(logits=ops.soft_cap(ops.scale(logits, 0.1), 30.0))

    lowered = lower(record(forward, dict, shapes, NO_BATCH))
    assert str(lowered).splitlines() == [
        "rows0[16] = rotary_table(f)  # rotary_table",
        "rows1[64] = embedding(e)  # embedding + scale",
        "slabs0[64] = norm(rows1[64], n)  # rms_norm",
        "rows2[128] = product(slabs0[64], qkv)  # linear",
        "slabs0[64] = rotary(rows2[128], rows0[16], h, h) layer 0  # rotary_and_write_kv",
        "slabs1[64] = attention(slabs0[64]) layer 0 window 8  # paged_attention",
        "rows3[64] = product(slabs1[64], o)  # linear",
        "rows1[64] = norm_add(rows3[64], n)  # rms_norm + add",
        "slabs0[64] = norm(rows1[64], n)  # rms_norm",
        "slabs2[96] = product(slabs0[64], gate_up)  # linear + gelu_mul",
        "rows1[64] = product(slabs2[96], down)  # linear + scale + add",
        "slabs1[64] = norm(rows1[64], n)  # select + rms_norm",
        "rows4[131] = product(slabs1[64], e)  # logits + scale + soft_cap",
    ]
    table, embedding, rotary, down, head = (lowered.operations[i] for i in (0, 1, 4, 10, 12))
    assert (table.factor, embedding.factor, down.factor, head.factor, head.soft_cap) == (1.5, 8.0, 0.5, 0.1, 30.0)
    assert rotary.epsilon == 1e-6


def test_what_a_product_cannot_take_up_is_named() -> None:
    shapes = {"e": (131, 64), "n": (64,), "w": (64, 64), "gate_up": (192, 64)}

    def scales_gates(ops: Any, w: dict[str, Any], batch: Any) -> Outputs[Value]:
        x = ops.rms_norm(ops.embedding(w["e"], batch), w["n"], 1e-5)
        return Outputs(logits=ops.gelu_mul(ops.scale(ops.linear(x, Linear(w["gate_up"])), 2.0)))

    def adds_the_stream(ops: Any, w: dict[str, Any], batch: Any) -> Outputs[Value]:
        x = ops.embedding(w["e"], batch)
        return Outputs(logits=ops.add(ops.linear(ops.rms_norm(x, w["n"], 1e-5), Linear(w["w"])), x))

    def norms_a_norm(ops: Any, w: dict[str, Any], batch: Any) -> Outputs[Value]:
        x = ops.rms_norm(ops.embedding(w["e"], batch), w["n"], 1e-5)
        return Outputs(logits=ops.rms_norm(x, w["n"], 1e-5))

    for forward, name in ((scales_gates, "gelu_mul"), (adds_the_stream, "add"), (norms_a_norm, "rms_norm")):
        with pytest.raises(UnsupportedError, match=rf"no operation for %\d+\[tokens, \d+\] = {name}"):
            lower(record(forward, dict, shapes, NO_BATCH))


def test_a_product_reads_only_what_stands_as_products_read_it(tmp_path: Path) -> None:
    """Not the residual stream, and not rotated queries."""
    program = recorded(tmp_path, num_hidden_layers=1)
    [rotary] = [op for op in program.ops if op.name == "rotary_and_write_kv"]
    [head] = [op for op in program.ops if op.name == "logits"]
    for wrong in (program.ops[1].result, rotary.result):
        linear = Op("logits", (("x", wrong), *head.arguments[1:]), Value("%99", ("tokens", 131)))
        with pytest.raises(UnsupportedError, match="no operation for %99"):
            lower(Program(program.weights, (*program.ops[: program.ops.index(rotary) + 1], linear), program.outputs))


def test_a_stream_that_is_read_again_cannot_be_added_to_in_place(tmp_path: Path) -> None:
    program = recorded(tmp_path, num_hidden_layers=1)
    [first_add, *_] = [op for op in program.ops if op.name == "add"]
    again = Op("add", (("a", dict(first_add.arguments)["a"]), ("b", first_add.result)), Value("%99", ("tokens", 64)))
    with pytest.raises(UnsupportedError, match="no operation for"):
        lower(Program(program.weights, (*program.ops, again), program.outputs))
