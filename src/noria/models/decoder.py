"""The decoder as one pure function over the op set: Llama and everything that differs from it in a few places.

`forward` is what an executor runs every step, or records once. It branches on the model's configuration and weights (is
there a norm here? does this layer rotate?), never on data or on the batch, which it cannot read. What an architecture
has comes from its configuration (`noria.files.architectures`) and from the tensors it brings (`noria.weights`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic

from noria.files.model import ModelConfig
from noria.ops.base import AttentionSpec, B, Linear, Ops, T
from noria.ops.rope import Float32Array, inverse_frequencies

ROPE, LOCAL_ROPE = "rope.inverse_frequencies", "rope.local_inverse_frequencies"
"""Canonical names of the two rotary embeddings that a model may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(Generic[T]):
    """Weights of one layer. qkv: [(heads + 2 kv_heads) * head_dim, hidden]; gate_up: [2 * intermediate, hidden]."""

    attention: AttentionSpec
    rope: str | None
    """Which of `Decoder.ropes` rotates its queries and keys; None: they are not rotated."""
    attention_norm: T
    qkv: Linear[T]
    q_norm: T | None
    """[head_dim], of each head before it is rotated; None: no norm. So are the others that may be None."""
    k_norm: T | None
    attention_output: Linear[T]
    post_attention_norm: T | None
    mlp_norm: T
    gate_up: Linear[T]
    down: Linear[T]
    post_mlp_norm: T | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope(Generic[T]):
    inverse_frequencies: T
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder(Generic[T]):
    """All weights of a decoder and the constants of its computation."""

    config: ModelConfig
    ropes: dict[str, Rope[T]]
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
    """Parameters that no file holds, computed from the configuration: float32 whatever the executor's precision.

    `config` is one whose choices are made (`ModelConfig.at_length`).
    """
    rotated = config.rotary_dim or config.head_dim
    ropes = {ROPE: config.rope} | ({} if config.local_rope is None else {LOCAL_ROPE: config.local_rope})
    return {name: inverse_frequencies(rope, rotated) for name, rope in ropes.items()}


def bind(config: ModelConfig, parameters: Mapping[str, T]) -> Decoder[T]:
    """Puts parameters, by canonical name, in their places. A missing bias or norm is none; a missing head is tied."""
    ropes = {ROPE: Rope(inverse_frequencies=parameters[ROPE], factor=config.rope.attention_factor)}
    if config.local_rope is not None:
        ropes[LOCAL_ROPE] = Rope(inverse_frequencies=parameters[LOCAL_ROPE], factor=config.local_rope.attention_factor)
    embedding = parameters["embedding.weight"]
    return Decoder(
        config=config,
        ropes=ropes,
        embedding=embedding,
        layers=tuple(_bind_layer(config, parameters, index) for index in range(config.num_layers)),
        norm=parameters["norm.weight"],
        head=parameters.get("head.weight", embedding),
    )


def _bind_layer(config: ModelConfig, parameters: Mapping[str, T], index: int) -> Layer[T]:
    def linear(name: str) -> Linear[T]:
        name = f"layers.{index}.{name}"
        return Linear(parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))

    def norm(name: str) -> T | None:
        return parameters.get(f"layers.{index}.{name}.weight")

    window = config.window(index)
    return Layer(
        attention=AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            window=window,
            soft_cap=config.attention_soft_cap,
            rotary_dim=config.rotary_dim,
        ),
        rope=_rope_of(config, index, window),
        attention_norm=parameters[f"layers.{index}.attention_norm.weight"],
        qkv=linear("qkv"),
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm"),
        attention_output=linear("attention_output"),
        post_attention_norm=norm("post_attention_norm"),
        mlp_norm=parameters[f"layers.{index}.mlp_norm.weight"],
        gate_up=linear("gate_up"),
        down=linear("down"),
        post_mlp_norm=norm("post_mlp_norm"),
    )


def _rope_of(config: ModelConfig, index: int, window: int | None) -> str | None:
    if index in config.unrotated_layers:
        return None
    return LOCAL_ROPE if config.local_rope is not None and window is not None else ROPE


def forward(ops: Ops[T, B], model: Decoder[T], batch: B) -> Outputs[T]:
    """One step of the decoder: writes the KV of all tokens of `batch` and scores the rows that want it."""
    config, eps = model.config, model.config.rms_norm_eps

    def scaled(x: T, factor: float) -> T:
        return x if factor == 1.0 else ops.scale(x, factor)

    def contribution(x: T, norm: T | None) -> T:
        """What a branch adds to the residual stream."""
        return scaled(x if norm is None else ops.rms_norm(x, norm, eps), config.residual_scale)

    gated = ops.silu_mul if config.activation == "silu" else ops.gelu_mul
    tables = {
        name: ops.rotary_table(rope.inverse_frequencies, batch, factor=rope.factor)
        for name, rope in model.ropes.items()
    }
    x = scaled(ops.embedding(model.embedding, batch), config.embedding_scale)
    for index, layer in enumerate(model.layers):
        qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, eps), layer.qkv)
        table = None if layer.rope is None else tables[layer.rope]
        q = ops.rotary_and_write_kv(
            qkv, table, index, layer.attention, batch, q_norm=layer.q_norm, k_norm=layer.k_norm, eps=eps
        )
        attended = ops.paged_attention(q, index, layer.attention, batch)
        x = ops.add(x, contribution(ops.linear(attended, layer.attention_output), layer.post_attention_norm))
        gate_up = ops.linear(ops.rms_norm(x, layer.mlp_norm, eps), layer.gate_up)
        x = ops.add(x, contribution(ops.linear(gated(gate_up), layer.down), layer.post_mlp_norm))
    # Norm and head work row by row, so they are given only the rows that want logits.
    wanted = ops.rms_norm(ops.select(x, batch), model.norm, eps)
    logits = scaled(ops.logits(wanted, model.head), config.logits_scale)
    return Outputs(logits=logits if config.logits_soft_cap is None else ops.soft_cap(logits, config.logits_soft_cap))
