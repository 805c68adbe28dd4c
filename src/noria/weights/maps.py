"""How the files of each architecture name and store the tensors of a decoder: one `WeightMap` for each, in `MAPS`.

Read by `noria.weights.decoder`, which makes the plan. Whether a product has a bias and whether the head is tied is
decided from the tensors present, so that a map says nothing of it but where the architecture leaves no choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """How one file format spells the tensors of a decoder; the layer's number goes into `layer`."""

    embedding: str
    norm: str
    head: str
    layer: str
    attention_norm: str
    qkv: tuple[str, ...]
    """Query, key and value; or one tensor that holds them in this order."""
    attention_output: str
    mlp_norm: str
    gate_up: tuple[str, ...]
    """Gate and up; or one tensor that holds them in this order."""
    down: str
    head_norms: tuple[str, str] | None = None
    """Norms of each head of queries and of keys."""
    post_norms: tuple[str, str] | None = None
    """Norms of what attention and MLP add to the residual stream."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of tensors that may be there and are of no use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMap:
    """The tensors of one architecture in both kinds of file."""

    huggingface: Names
    gguf: Names
    gguf_interleaved: bool = False
    """GGUF files store q and k with rotary pairs side by side: where llama.cpp's converter permutes their rows."""
    qkv_bias: bool | None = None
    """True where the architecture always has one, None where the file decides."""
    norm_added: float = 0.0
    """Added to the norms of Hugging Face files; GGUF files have it in."""


_HUGGINGFACE: Final = Names(
    embedding="model.embed_tokens",
    norm="model.norm",
    head="lm_head",
    layer="model.layers.{}.",
    attention_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    gate_up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    ignored=(r"\.rotary_emb\.inv_freq$",),  # a buffer that old checkpoints saved; computed from the configuration
)

_GGUF: Final = Names(
    embedding="token_embd",
    norm="output_norm",
    head="output",
    layer="blk.{}.",
    attention_norm="attn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    attention_output="attn_output",
    mlp_norm="ffn_norm",
    gate_up=("ffn_gate", "ffn_up"),
    down="ffn_down",
)

LLAMA: Final = WeightMap(huggingface=_HUGGINGFACE, gguf=_GGUF, gguf_interleaved=True)
QWEN2: Final = WeightMap(huggingface=_HUGGINGFACE, gguf=_GGUF, qkv_bias=True)
QWEN3: Final = WeightMap(
    huggingface=replace(_HUGGINGFACE, head_norms=("self_attn.q_norm", "self_attn.k_norm")),
    gguf=replace(_GGUF, head_norms=("attn_q_norm", "attn_k_norm")),
)
GEMMA2: Final = WeightMap(
    huggingface=replace(
        _HUGGINGFACE,
        mlp_norm="pre_feedforward_layernorm",
        post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    gguf=replace(_GGUF, post_norms=("post_attention_norm", "post_ffw_norm")),
    norm_added=1.0,
)
GEMMA3: Final = replace(
    GEMMA2,
    huggingface=replace(GEMMA2.huggingface, head_norms=QWEN3.huggingface.head_norms),
    gguf=replace(GEMMA2.gguf, head_norms=QWEN3.gguf.head_norms),
)
PHI3: Final = WeightMap(
    huggingface=replace(_HUGGINGFACE, qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    gguf=replace(_GGUF, qkv=("attn_qkv",), gate_up=("ffn_up",)),
)

MAPS: Final[dict[str, WeightMap]] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mistral": LLAMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi3": PHI3,
    "smollm3": LLAMA,
    "granite": LLAMA,
}
"""By our names of the architectures."""
