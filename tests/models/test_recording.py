"""The recording rule: a model is the same program whatever the batch, and the program is the whole model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from models.support import pack, random_prompts, tiny_model
from noria.errors import UnsupportedError
from noria.files.model import ModelConfig
from noria.files.sources import open_model
from noria.models import decoder, registry
from noria.ops.base import AttentionSpec
from noria.ops.record import Program, Recorder, Value, record, run
from noria.ops.reference import TorchExecutor
from noria.runner.executor import ForwardBatch


def one_row() -> ForwardBatch:
    return pack([(random_prompts([9])[0], 8, [3, 1, 2])], 4, wanted="last")


def many_rows() -> ForwardBatch:
    """64 rows: decodes and chunks, of which some want no logits."""
    prompts = random_prompts([1 + i for i in range(64)])
    rows = [(p, len(p) - 1 - (i % 5 == 0) * (len(p) // 2), list(range(1, 18))) for i, p in enumerate(prompts)]
    return pack(rows, 4, wanted="last")


def record_decoder(config: ModelConfig, shapes: dict[str, tuple[int, ...]], batch: ForwardBatch) -> Program:
    architecture = registry.find(config.architecture)
    constants = {name: value.shape for name, value in architecture.constants(config).items()}
    return record(architecture.forward, partial(architecture.bind, config), shapes | constants, batch)


@pytest.fixture(params=registry.supported())
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tiny_model(request.param, tie_word_embeddings=request.param == "qwen2").save_pretrained(tmp_path)
    return tmp_path


def test_the_program_does_not_depend_on_the_batch(directory: Path) -> None:
    files = open_model(directory)
    shapes = registry.find(files.config.architecture).plan(files).shapes
    alone, many = (record_decoder(files.config, shapes, batch) for batch in (one_row(), many_rows()))
    assert str(alone) == str(many)
    assert alone == many


def test_a_program_prints_every_op_with_names_and_shapes(tmp_path: Path) -> None:
    tiny_model("qwen2", num_hidden_layers=1).save_pretrained(tmp_path)
    files = open_model(tmp_path)
    program = record_decoder(files.config, registry.find("qwen2").plan(files).shapes, one_row())
    assert str(program).splitlines() == [
        "%0[tokens, 16] = rotary_table(rope.inverse_frequencies[8], batch)",
        "%1[tokens, 64] = embedding(embedding.weight[131, 64], batch)",
        "%2[tokens, 64] = rms_norm(%1[tokens, 64], layers.0.attention_norm.weight[64], eps=1e-06)",
        "%3[tokens, 128] = linear(%2[tokens, 64], layers.0.qkv.weight[128, 64] + layers.0.qkv.bias[128])",
        "%4[tokens, 64] = rotary_and_write_kv(%3[tokens, 128], %0[tokens, 16], layer=0, heads=4/2x16, scale=0.25, "
        "batch)",
        "%5[tokens, 64] = paged_attention(%4[tokens, 64], layer=0, heads=4/2x16, scale=0.25, batch)",
        "%6[tokens, 64] = linear(%5[tokens, 64], layers.0.attention_output.weight[64, 64])",
        "%7[tokens, 64] = add(%1[tokens, 64], %6[tokens, 64])",
        "%8[tokens, 64] = rms_norm(%7[tokens, 64], layers.0.mlp_norm.weight[64], eps=1e-06)",
        "%9[tokens, 192] = linear(%8[tokens, 64], layers.0.gate_up.weight[192, 64])",
        "%10[tokens, 96] = silu_mul(%9[tokens, 192])",
        "%11[tokens, 64] = linear(%10[tokens, 96], layers.0.down.weight[64, 96])",
        "%12[tokens, 64] = add(%7[tokens, 64], %11[tokens, 64])",
        "%13[logits, 64] = select(%12[tokens, 64], batch)",
        "%14[logits, 64] = rms_norm(%13[logits, 64], norm.weight[64], eps=1e-06)",
        "%15[logits, 131] = logits(%14[logits, 64], head.weight[131, 64])",
        "return logits=%15[logits, 131]",
    ]


def test_a_recorded_program_gives_the_same_bits(directory: Path) -> None:
    """Run through the reference op set, op by op from the program, against the model function itself."""
    files = open_model(directory)
    shapes = registry.find(files.config.architecture).plan(files).shapes
    program = record_decoder(files.config, shapes, one_row())
    executor = TorchExecutor(files, dtype="float32", threads=1)
    num_groups = len(executor.kv_windows)
    direct, replayed = [], []
    prompts = random_prompts([30, 7, 12])
    tables = [[4, 9, 1, 12, 7, 15, 3, 20], [2, 30], [8, 5, 6]]
    executor.allocate_kv(32 * num_groups, 4)
    for done, upto in ((0, 6), (6, 7), (7, 30)):
        rows = [(p[:upto], done, table) for p, table in zip(prompts, tables, strict=True) if len(p) > done]
        direct.append(executor.forward(pack(rows, 4, wanted="all").spread(num_groups, 4)))
    executor.allocate_kv(32 * num_groups, 4)
    for done, upto in ((0, 6), (6, 7), (7, 30)):
        rows = [(p[:upto], done, table) for p, table in zip(prompts, tables, strict=True) if len(p) > done]
        with torch.inference_mode():
            batch = executor._ops.batch(pack(rows, 4, wanted="all").spread(num_groups, 4))
            replayed.append(run(program, executor._ops, executor._parameters, batch)["logits"].numpy())
    assert sorted(value.name for value in program.weights) == sorted(executor._parameters)
    for a, b in zip(direct, replayed, strict=True):
        np.testing.assert_array_equal(a, b)


def tiny_forward(ops: Recorder, weights: dict[str, Value], batch: ForwardBatch) -> decoder.Outputs[Value]:
    x = ops.embedding(weights["embedding"], batch)
    if len(batch.context_len) > 8:  # what a model must not do
        x = ops.scale(x, 2.0)
    return decoder.Outputs(logits=ops.logits(ops.select(x, batch), weights["embedding"]))


def test_a_model_that_looks_at_the_batch_is_seen() -> None:
    """Plants the fault that the first test is there to find."""
    shapes = {"embedding": (131, 64)}
    alone, many = (record(tiny_forward, dict, shapes, batch) for batch in (one_row(), many_rows()))
    assert str(alone) != str(many)


def test_shapes_that_do_not_fit_are_named() -> None:
    recorder = Recorder()
    with pytest.raises(ValueError, match=r"rms_norm: .* x\[tokens, 64\] and norm\[65\]"):
        recorder.rms_norm(Value("x", ("tokens", 64)), Value("norm", (65,)), 1e-5)
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    with pytest.raises(ValueError, match=r"paged_attention: .* q\[tokens, 65\]"):
        recorder.paged_attention(Value("q", ("tokens", 65)), 0, spec, one_row())


def test_what_is_out_of_the_ordinary_is_printed() -> None:
    """Options that a model uses are part of the program, so that programs which differ print differently."""
    recorder = Recorder()
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, window=8, soft_cap=50.0, rotary_dim=4)
    qkv, norm = Value("qkv", ("tokens", spec.qkv_size)), Value("norm", (16,))
    table = recorder.rotary_table(Value("f", (2,)), one_row(), factor=1.5)
    recorder.rotary_and_write_kv(qkv, table, 3, spec, one_row(), q_norm=norm, k_norm=norm, eps=1e-6)
    recorder.rotary_and_write_kv(qkv, None, 4, spec, one_row())
    recorder.soft_cap(recorder.gelu_mul(qkv), 30.0)
    shown = "heads=4/2x16, scale=0.25, window=8, soft_cap=50.0, rotary_dim=4"
    assert [str(op) for op in recorder.ops] == [
        "%0[tokens, 4] = rotary_table(f[2], factor=1.5, batch)",
        f"%1[tokens, 64] = rotary_and_write_kv(qkv[tokens, 128], %0[tokens, 4], layer=3, {shown}, norm[16], norm[16], "
        "eps=1e-06, batch)",
        f"%2[tokens, 64] = rotary_and_write_kv(qkv[tokens, 128], table=None, layer=4, {shown}, batch)",
        "%3[tokens, 64] = gelu_mul(qkv[tokens, 128])",
        "%4[tokens, 64] = soft_cap(%3[tokens, 64], cap=30.0)",
    ]
    with pytest.raises(ValueError, match=r"rotary_and_write_kv: .* norm\[8\]"):
        recorder.rotary_and_write_kv(
            Value("qkv", ("tokens", 64)), None, 0, AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=16, scale=1.0),
            one_row(), q_norm=Value("norm", (16,)), k_norm=Value("norm", (8,)),
        )  # fmt: skip


def test_an_unknown_architecture_lists_what_there_is() -> None:
    with pytest.raises(UnsupportedError, match=r"'mamba' is not supported; supported: llama, qwen2"):
        registry.find("mamba")
