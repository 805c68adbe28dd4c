"""The weight plan of a Llama-shaped decoder, from GGUF or Hugging Face tensor names.

Covers every architecture that differs from Llama only in which biases it has (Qwen2 does). Called through
`noria.models.registry`. Whether there are biases and whether the head is tied is decided from the tensors present.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from noria.errors import UnsupportedError
from noria.files.model import ModelFiles
from noria.weights.plan import Parameter, Source, WeightPlan, check_complete, equal_bits

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """How one file format spells the tensors of a decoder; the layer's number goes into `layer`."""

    embedding: str
    norm: str
    head: str
    layer: str
    attention_norm: str
    query: str
    key: str
    value: str
    attention_output: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    rope_factors: str | None = None
    ignored: tuple[str, ...] = ()


_GGUF = _Names(
    embedding="token_embd",
    norm="output_norm",
    head="output",
    layer="blk.{}.",
    attention_norm="attn_norm",
    query="attn_q",
    key="attn_k",
    value="attn_v",
    attention_output="attn_output",
    mlp_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    rope_factors="rope_freqs.weight",
)

_HUGGINGFACE = _Names(
    embedding="model.embed_tokens",
    norm="model.norm",
    head="lm_head",
    layer="model.layers.{}.",
    attention_norm="input_layernorm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    attention_output="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    ignored=(r"\.rotary_emb\.inv_freq$",),  # a buffer that old checkpoints saved; computed from the configuration
)


def plan_decoder(files: ModelFiles, *, qkv_bias: bool | None, gguf_interleaved: bool) -> WeightPlan:
    """The complete, checked plan of a decoder's weights. Raises `ModelFileError` naming file and tensor.

    `qkv_bias`: True where the architecture always has one, None where the file decides. `gguf_interleaved`: whether
    GGUF files of this architecture store q and k with rotary pairs side by side.
    """
    names = _GGUF if files.format == "gguf" else _HUGGINGFACE
    interleaved = gguf_interleaved and files.format == "gguf"
    config = files.config
    if config.num_heads % config.num_kv_heads:
        raise UnsupportedError(
            f"{files.path}: {config.num_heads} attention heads cannot evenly share {config.num_kv_heads} of keys"
        )
    parameters = [
        _parameter("embedding.weight", (f"{names.embedding}.weight", (config.vocab_size, config.hidden_size)))
    ]
    for index in range(config.num_layers):
        parameters += _layer(files, names, index, qkv_bias=qkv_bias, interleaved=interleaved)
    parameters.append(_parameter("norm.weight", (f"{names.norm}.weight", (config.hidden_size,))))
    ignored = list(names.ignored)
    if _head_is_tied(files, names):
        ignored.append(rf"^{re.escape(names.head)}\.weight$")
    else:
        parameters.append(_parameter("head.weight", (f"{names.head}.weight", (config.vocab_size, config.hidden_size))))
    if config.rope.frequency_factors and names.rope_factors is not None:
        ignored.append(rf"^{re.escape(names.rope_factors)}$")  # its values have come with the configuration
    plan = WeightPlan(parameters=tuple(parameters))
    check_complete(plan, files, ignored=ignored)
    return plan


def _layer(
    files: ModelFiles, names: _Names, index: int, *, qkv_bias: bool | None, interleaved: bool
) -> list[Parameter]:
    config = files.config
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    ours, theirs = f"layers.{index}.", names.layer.format(index)
    q_heads = config.num_heads if interleaved else None
    kv_heads = config.num_kv_heads if interleaved else None

    def linear(
        name: str, *parts: tuple[str, int, int | None], inputs: int, bias: bool | None = None
    ) -> list[Parameter]:
        """Weight, and bias if there is one, of `parts`: (tensor, outputs, interleaved heads)."""
        if bias is None:
            bias = any(f"{theirs}{part}.bias" in files.tensors for part, _, _ in parts)
        kinds: list[tuple[str, tuple[int, ...]]] = [("weight", (inputs,))]
        if bias:
            kinds.append(("bias", ()))
        return [
            Parameter(
                name=f"{ours}{name}.{kind}",
                sources=tuple(
                    Source(tensor=f"{theirs}{part}.{kind}", shape=(outputs, *tail), interleaved_heads=heads)
                    for part, outputs, heads in parts
                ),
            )
            for kind, tail in kinds
        ]

    qkv = ((names.query, q_size, q_heads), (names.key, kv_size, kv_heads), (names.value, kv_size, None))
    return [
        _parameter(f"{ours}attention_norm.weight", (f"{theirs}{names.attention_norm}.weight", (hidden,))),
        *linear("qkv", *qkv, inputs=hidden, bias=qkv_bias),
        *linear("attention_output", (names.attention_output, hidden, None), inputs=q_size),
        _parameter(f"{ours}mlp_norm.weight", (f"{theirs}{names.mlp_norm}.weight", (hidden,))),
        *linear("gate_up", (names.gate, inner, None), (names.up, inner, None), inputs=hidden),
        *linear("down", (names.down, hidden, None), inputs=inner),
    ]


def _head_is_tied(files: ModelFiles, names: _Names) -> bool:
    """Decided from the tensors: no head, or one that merely repeats the embedding of a model that claims to be tied."""
    head, embedding = f"{names.head}.weight", f"{names.embedding}.weight"
    claim = files.config.tie_word_embeddings
    if head not in files.tensors:
        if claim is False:
            logger.warning("%s: no tensor %s though the head is declared untied; using the embedding", files.path, head)
        return True
    if not claim:
        return False
    if embedding in files.tensors and equal_bits(files, head, embedding):
        return True
    logger.warning(
        "%s: the head is declared tied, but tensor %s differs from the embedding; using it", files.path, head
    )
    return False


def _parameter(name: str, source: tuple[str, tuple[int, ...]]) -> Parameter:
    tensor, shape = source
    return Parameter(name=name, sources=(Source(tensor=tensor, shape=shape),))
