"""A Llama-shaped decoder as one pure function over the op set: Llama, Qwen2 and what else differs only in weights.

`forward` is what an executor runs every step, or records once. It branches on the model's weights (is there a bias?),
never on data or on the batch, which it cannot read. How weights come to be is in `noria.weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic

from noria.files.model import ModelConfig
from noria.ops.base import AttentionSpec, B, Linear, Ops, T
from noria.ops.rope import Float32Array, inverse_frequencies


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(Generic[T]):
    """Weights of one layer. qkv: [(heads + 2 kv_heads) * head_dim, hidden]; gate_up: [2 * intermediate, hidden]."""

    attention_norm: T
    qkv: Linear[T]
    attention_output: Linear[T]
    mlp_norm: T
    gate_up: Linear[T]
    down: Linear[T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder(Generic[T]):
    """All weights of a decoder and the constants of its computation."""

    attention: AttentionSpec
    eps: float
    inverse_frequencies: T
    embedding: T
    layers: tuple[Layer[T], ...]
    norm: T
    head: T
    """[vocab, hidden]; the same value as `embedding` when the head is tied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs(Generic[T]):
    """What a model declares to compute. A further output (hidden states) is a further field here."""

    logits: T  # [logits, vocab], float32


def constants(config: ModelConfig) -> dict[str, Float32Array]:
    """Parameters that no file holds, computed from the configuration: float32 whatever the executor's precision."""
    return {"rope.inverse_frequencies": inverse_frequencies(config.rope, config.head_dim)}


def bind(config: ModelConfig, parameters: Mapping[str, T]) -> Decoder[T]:
    """Puts parameters, by canonical name, in their places. A missing bias is no bias; a missing head is tied."""

    def linear(name: str) -> Linear[T]:
        return Linear(parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))

    layers = tuple(
        Layer(
            attention_norm=parameters[f"layers.{i}.attention_norm.weight"],
            qkv=linear(f"layers.{i}.qkv"),
            attention_output=linear(f"layers.{i}.attention_output"),
            mlp_norm=parameters[f"layers.{i}.mlp_norm.weight"],
            gate_up=linear(f"layers.{i}.gate_up"),
            down=linear(f"layers.{i}.down"),
        )
        for i in range(config.num_layers)
    )
    embedding = parameters["embedding.weight"]
    return Decoder(
        attention=AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
        ),
        eps=config.rms_norm_eps,
        inverse_frequencies=parameters["rope.inverse_frequencies"],
        embedding=embedding,
        layers=layers,
        norm=parameters["norm.weight"],
        head=parameters.get("head.weight", embedding),
    )


def forward(ops: Ops[T, B], model: Decoder[T], batch: B) -> Outputs[T]:
    """One step of the decoder: writes the KV of all tokens of `batch` and scores the rows that want it."""
    spec, eps = model.attention, model.eps
    rotary = ops.rotary_table(model.inverse_frequencies, batch)
    x = ops.embedding(model.embedding, batch)
    for index, layer in enumerate(model.layers):
        qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, eps), layer.qkv)
        q = ops.rotary_and_write_kv(qkv, rotary, index, spec, batch)
        attended = ops.paged_attention(q, index, spec, batch)
        x = ops.add(x, ops.linear(attended, layer.attention_output))
        gate_up = ops.linear(ops.rms_norm(x, layer.mlp_norm, eps), layer.gate_up)
        x = ops.add(x, ops.linear(ops.silu_mul(gate_up), layer.down))
    # Norm and head work row by row, so they are given only the rows that want logits.
    wanted = ops.rms_norm(ops.select(x, batch), model.norm, eps)
    return Outputs(logits=ops.logits(wanted, model.head))
