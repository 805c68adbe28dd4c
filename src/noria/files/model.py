"""What a model on disk offers the rest of Noria, whatever its file format: `ModelFiles`.

Implemented by `noria.files.gguf` and `noria.files.huggingface`; found by `noria.files.sources.open_model`. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. `scaling`: None, "linear", "llama3", "yarn", "longrope" or "factors".

    "factors" is scaling already worked out, one divisor for each inverse frequency, so that inverse frequency i is
    `theta ** (-2i / rotary_dim) / frequency_factors[i]`: how GGUF files store llama3 scaling (`rope_freqs.weight`), and
    what `at_length` makes of longrope.
    """

    theta: float = 10_000.0
    scaling: str | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)
    """For linear: factor. For llama3: factor, low_freq_factor, high_freq_factor, original_max_position_embeddings. For
    yarn: factor, beta_fast, beta_slow, original_max_position_embeddings, truncate (0 or 1). For longrope:
    original_max_position_embeddings."""
    frequency_factors: tuple[float, ...] = ()
    """For "factors" only: rotary_dim / 2 positive numbers."""
    short_factors: tuple[float, ...] = ()
    """For longrope only: `frequency_factors` up to the original context."""
    long_factors: tuple[float, ...] = ()
    """For longrope only: `frequency_factors` beyond it."""
    attention_factor: float = 1.0
    """Multiplies cosines and sines (yarn and longrope)."""

    def at_length(self, max_model_len: int) -> RopeConfig:
        """The same with longrope's factors chosen for sequences of up to `max_model_len` tokens.

        They are chosen once, at start: keys that are in the cache have been rotated, so the factors cannot follow the
        length of a sequence as it grows.
        """
        if self.scaling != "longrope":
            return self
        long = max_model_len > self.parameters["original_max_position_embeddings"]
        return replace(
            self,
            scaling="factors",
            frequency_factors=self.long_factors if long else self.short_factors,
            parameters={},
            short_factors=(),
            long_factors=(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a model, in Hugging Face's terms, read from `config.json` or from GGUF metadata.

    Not here, because decided from the tensors present: whether the output head is tied to the embedding, which
    products have a bias, and which norms there are.
    """

    architecture: str
    """Name in `noria.models.registry`: "llama", "gemma3"."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool | None = None
    """What the file claims, if it does; only used to warn when the tensors disagree."""
    layer_windows: tuple[int | None, ...] | None = None
    """How many keys a query of each layer sees, its own included (None: all). None: full attention in every layer."""
    local_rope: RopeConfig | None = None
    """Rotary embedding of the layers that have a window, where it differs from `rope`, the others'."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers without rotary embedding, ascending."""
    rotary_dim: int | None = None
    """The first so many values of each head are rotated, the others kept. None: all."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    attention_scale: float | None = None
    """Multiplies the products of queries and keys. None: head_dim ** -0.5."""
    attention_soft_cap: float | None = None
    """Scores x become `cap * tanh(x / cap)`, after the scale and before the softmax."""
    logits_soft_cap: float | None = None
    """The same for logits."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Multiplies what attention and MLP add to the residual stream."""
    logits_scale: float = 1.0

    def at_length(self, max_model_len: int | None) -> ModelConfig:
        """The same with every choice made that depends on the longest sequence. None: the model's own context."""
        length = min(max_model_len or self.max_position_embeddings, self.max_position_embeddings)
        return replace(self, rope=self.rope.at_length(length))

    def window(self, layer: int) -> int | None:
        return None if self.layer_windows is None else self.layer_windows[layer]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a model file. `shape` is row-major: [out_features, in_features] for a linear weight."""

    name: str
    shape: tuple[int, ...]
    encoding: str
    """As the file names it: "F32", "BF16", "Q4_1", ..."""
    file: Path


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor's values on the host. bfloat16, which numpy lacks, comes as its bits in uint16."""

    data: npt.NDArray[Any]
    dtype: Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as the file encodes it: a read-only view, uint8 [rows, bytes of a row]; a vector is one row."""

    rows: npt.NDArray[np.uint8]
    encoding: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """The tokenizer as a GGUF file stores it (`tokenizer.ggml.*`)."""

    source: str = field(default="the vocabulary", compare=False)
    """Names the file in errors."""
    model: str  # "gpt2" is byte-level BPE, "llama" SentencePiece's BPE
    pre: str | None
    tokens: list[str]
    token_types: list[int]  # 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte
    merges: list[str]
    scores: list[float] = field(default_factory=list)
    """Only for "llama": of two joint pieces, the one with the higher score is made first."""
    add_bos_token: bool | None
    add_space_prefix: bool | None
    bos_token_id: int | None
    eos_token_id: int | None
    eot_token_id: int | None
    unknown_token_id: int | None
    padding_token_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """Where the tokenizer comes from: exactly one of `tokenizer_json` and `vocabulary` is set."""

    tokenizer_json: Path | None = None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    """The parsed `tokenizer_config.json` (empty when there is none)."""
    vocabulary: GgufVocabulary | None = None
    chat_template: str | None = None


class ModelFiles(Protocol):
    """One opened model. Opening has already checked that shards are present, whole and consistent."""

    @property
    def path(self) -> Path:
        """The file or directory that was opened."""

    @property
    def format(self) -> Literal["gguf", "huggingface"]: ...

    @property
    def name(self) -> str:
        """A short name for people: the file's stem or the directory's name or the hub id."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By the file's own names: `blk.0.attn_q.weight` in GGUF, `model.layers.0.self_attn.q_proj.weight` else."""

    @property
    def tokenizer(self) -> TokenizerFiles:
        """Raises ModelFileError when the model has none: weights alone can be opened and run."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All ids that end a sequence (config, generation config, tokenizer: EOS and end of turn), ascending."""

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """What the model's makers recommend, by the names of `noria.sampling.SamplingParams`. Raises ModelFileError."""

    def read(self, name: str) -> HostTensor:
        """The tensor's values, dequantised to float32 if its encoding is a quantised one. Raises ModelFileError.

        The array may be a read-only view of the mapped file: copy before writing.
        """

    def raw(self, name: str) -> RawTensor:
        """The tensor's bytes in the mapped file, for who decodes them alone. Raises ModelFileError."""
