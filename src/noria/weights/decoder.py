"""The weight plan of a decoder, from GGUF or Hugging Face tensor names: `plan_decoder`.

Serves every architecture; what differs between them is in `noria.weights.maps`. Called through `noria.models.registry`.
Whether there are biases and whether the head is tied is decided from the tensors present.
"""

from __future__ import annotations

import logging
import re

from noria.files.model import ModelConfig, ModelFiles
from noria.files.rope_config import FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS
from noria.weights.maps import MAPS, Names, WeightMap
from noria.weights.plan import Parameter, Source, WeightPlan, check_complete, equal_bits

logger = logging.getLogger(__name__)


def plan_decoder(files: ModelFiles) -> WeightPlan:
    """The complete, checked plan of a decoder's weights. Raises `ModelFileError` naming file and tensor."""
    return _Planner(files, MAPS[files.config.architecture]).plan()


class _Planner:
    def __init__(self, files: ModelFiles, weights: WeightMap) -> None:
        is_gguf = files.format == "gguf"
        self._files = files
        self._config: ModelConfig = files.config
        self._names: Names = weights.gguf if is_gguf else weights.huggingface
        self._qkv_bias = weights.qkv_bias
        self._interleaved = is_gguf and weights.gguf_interleaved
        self._norm_added = 0.0 if is_gguf else weights.norm_added

    def plan(self) -> WeightPlan:
        files, config, names = self._files, self._config, self._names
        vocabulary = (config.vocab_size, config.hidden_size)
        parameters = [_parameter("embedding.weight", Source(tensor=f"{names.embedding}.weight", shape=vocabulary))]
        for index in range(config.num_layers):
            parameters += self._layer(index)
        parameters.append(self._norm("norm", names.norm, config.hidden_size))
        ignored = list(names.ignored)
        if _head_is_tied(files, names):
            ignored.append(rf"^{re.escape(names.head)}\.weight$")
        else:
            parameters.append(_parameter("head.weight", Source(tensor=f"{names.head}.weight", shape=vocabulary)))
        ignored += [rf"^{re.escape(tensor)}$" for tensor in self._read_with_the_configuration()]
        plan = WeightPlan(parameters=tuple(parameters))
        check_complete(plan, files, ignored=ignored)
        return plan

    def _layer(self, index: int) -> list[Parameter]:
        config, names = self._config, self._names
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        ours, theirs = f"layers.{index}.", names.layer.format(index)

        qkv: list[tuple[int, int | None]] = [(q_size + 2 * kv_size, None)]
        if len(names.qkv) == 3:
            q_heads, kv_heads = (config.num_heads, config.num_kv_heads) if self._interleaved else (None, None)
            qkv = [(q_size, q_heads), (kv_size, kv_heads), (kv_size, None)]
        gate_up: list[tuple[int, int | None]] = [(2 * inner // len(names.gate_up), None)] * len(names.gate_up)

        def linear(
            name: str,
            tensors: tuple[str, ...],
            parts: list[tuple[int, int | None]],
            inputs: int,
            bias: bool | None = None,
        ) -> list[Parameter]:
            return self._linear(ours + name, [theirs + tensor for tensor in tensors], parts, inputs, bias)

        def norm(name: str, tensor: str, size: int = hidden) -> Parameter:
            return self._norm(ours + name, theirs + tensor, size)

        return [
            norm("attention_norm", names.attention_norm),
            *linear("qkv", names.qkv, qkv, hidden, self._qkv_bias),
            *(
                norm(f"{of}_norm", name, config.head_dim)
                for of, name in zip("qk", names.head_norms or (), strict=False)
            ),
            *linear("attention_output", (names.attention_output,), [(hidden, None)], q_size),
            *(norm("post_attention_norm", name) for name in (names.post_norms or ())[:1]),
            norm("mlp_norm", names.mlp_norm),
            *linear("gate_up", names.gate_up, gate_up, hidden),
            *linear("down", (names.down,), [(hidden, None)], inner),
            *(norm("post_mlp_norm", name) for name in (names.post_norms or ())[1:]),
        ]

    def _linear(
        self, name: str, tensors: list[str], parts: list[tuple[int, int | None]], inputs: int, bias: bool | None
    ) -> list[Parameter]:
        """Weight, and bias if there is one, of stacked tensors; of each its outputs and interleaved heads."""
        if bias is None:
            bias = any(f"{tensor}.bias" in self._files.tensors for tensor in tensors)
        kinds: list[tuple[str, tuple[int, ...]]] = [("weight", (inputs,))]
        if bias:
            kinds.append(("bias", ()))
        return [
            _parameter(
                f"{name}.{kind}",
                *(
                    Source(tensor=f"{tensor}.{kind}", shape=(outputs, *tail), interleaved_heads=heads)
                    for tensor, (outputs, heads) in zip(tensors, parts, strict=True)
                ),
            )
            for kind, tail in kinds
        ]

    def _norm(self, name: str, tensor: str, size: int) -> Parameter:
        source = Source(tensor=f"{tensor}.weight", shape=(size,), added=self._norm_added)
        return _parameter(f"{name}.weight", source)

    def _read_with_the_configuration(self) -> list[str]:
        """Tensors of a GGUF file whose values the model has already, in its rope."""
        if self._files.format != "gguf":
            return []
        rope = self._config.rope
        return [FREQUENCY_FACTORS] * bool(rope.frequency_factors) + [LONG_FACTORS, SHORT_FACTORS] * bool(
            rope.long_factors
        )


def _head_is_tied(files: ModelFiles, names: Names) -> bool:
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


def _parameter(name: str, *sources: Source) -> Parameter:
    return Parameter(name=name, sources=sources)
