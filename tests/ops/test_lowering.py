"""Lowering a recorded program: what is fused, what is printed, and what cannot be done is said by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from models.support import tiny_model
from noria.errors import UnsupportedError
from noria.files.sources import open_model
from noria.models import registry
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
    strange = Op("scale", (("x", program.ops[1].result), ("factor", 2.0)), Value("%99", ("tokens", 64)))
    with pytest.raises(UnsupportedError, match=r"no operation for %99\[tokens, 64\] = scale"):
        lower(Program(program.weights, (*program.ops[:2], strange), program.outputs))


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
