"""A model in a GGUF file, or in the files of a split one: `GgufModel`, which implements `noria.files.model.ModelFiles`.

Opened by `noria.files.sources.open_model`. The container itself is read by `noria.files.gguf_format`: the `gguf`
package's own reader takes seconds for a large vocabulary. That package is imported, lazily, for one thing: turning
blocks of quantised values into float32. Not here: building a tokenizer from the vocabulary (`noria.text`), and
llama.cpp's reordering of q and k rows in Llama files, which `noria.weights` undoes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from noria.errors import ModelFileError
from noria.files.fields import Fields
from noria.files.generation import read_gguf_defaults
from noria.files.gguf_format import ENCODING_IDS, ENCODINGS, GgufHeader
from noria.files.gguf_shards import joint_header, open_shards
from noria.files.model import GgufVocabulary, HostTensor, ModelConfig, RawTensor, TensorInfo, TokenizerFiles
from noria.files.model_config import config_from_gguf
from noria.files.rope_config import FACTOR_TENSORS

END_TOKENS: Final = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>",
    "<EOT>",
)  # fmt: skip
"""Tokens that end a sequence in whatever vocabulary has them, whatever type the file gives them.

A GGUF file names one EOS id, yet a chat model ends its turn with another token than its text, so llama.cpp recognises
these by their spelling, and so do we: all of them are among `noria.text.gguf_vocabulary.CONTROL_BY_NAME`, so that none
is text to the tokenizer. (llama.cpp adds the separators of fill-in-the-middle; those end a file, not an answer, and are
left out here.)
"""

_DIRECT: Final[dict[str, tuple[Literal["float32", "float16", "bfloat16"], str]]] = {
    "F32": ("float32", "<f4"),
    "F16": ("float16", "<f2"),
    "BF16": ("bfloat16", "<u2"),
}


class GgufModel:
    """An opened GGUF model. Its tensor table has been checked; values are read from the mapped file when asked for."""

    format: Literal["gguf"] = "gguf"

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        """Raises ModelFileError when the file is damaged, UnsupportedError when it asks for what we do not have."""
        self.path = path
        self.name = name or path.stem
        shards = open_shards(path)
        self._file_of = {name: shard.file for shard in shards for name in shard.header.tensors}
        self._header: GgufHeader = joint_header(shards)
        self._fields = Fields(self._header.metadata, str(path))
        self.config: ModelConfig = self._read_config()

    @property
    def metadata(self) -> Mapping[str, Any]:
        """All metadata of the (first) file by name: int, float, bool, str, or a list of one of these."""
        return MappingProxyType(self._header.metadata)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return MappingProxyType(self._header.tensors)

    def read(self, name: str) -> HostTensor:
        info = self._info(name)
        if info.encoding in _DIRECT:
            dtype, stored = _DIRECT[info.encoding]
            return HostTensor(self._file_of[name].array(self._header.offsets[name], info.shape, stored), dtype)
        values = _dequantise(self.raw(name).rows, ENCODING_IDS[info.encoding])
        return HostTensor(values.reshape(info.shape), "float32")

    def raw(self, name: str) -> RawTensor:
        info = self._info(name)
        encoding = ENCODINGS[ENCODING_IDS[info.encoding]]
        row_bytes = info.shape[-1] // encoding.block_values * encoding.block_bytes
        rows = self._file_of[name].rows(self._header.offsets[name], math.prod(info.shape[:-1]), row_bytes)
        return RawTensor(rows, info.encoding)

    def _info(self, name: str) -> TensorInfo:
        info = self._header.tensors.get(name)
        if info is None:
            raise ModelFileError(f"{self.path}: tensor {name!r} is missing")
        return info

    @cached_property
    def tokenizer(self) -> TokenizerFiles:
        if self._vocabulary is None:
            raise ModelFileError(f"{self.path} has no tokenizer: field 'tokenizer.ggml.tokens' is missing")
        return TokenizerFiles(
            vocabulary=self._vocabulary, chat_template=self._fields.optional_text("tokenizer.chat_template") or None
        )

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids named as end of sequence, of turn and of message, and those of `END_TOKENS`."""
        names = ("eos_token_id", "eot_token_id", "eom_token_id")
        ids = {token_id for name in names if (token_id := self._token_id(name)) is not None}
        if (vocabulary := self._vocabulary) is not None:
            ids.update(token_id for token_id, token in enumerate(vocabulary.tokens) if token in END_TOKENS)
        return tuple(sorted(ids))

    @cached_property
    def sampling_defaults(self) -> Mapping[str, Any]:
        return read_gguf_defaults(self._fields)

    def _read_config(self) -> ModelConfig:
        embedding = self._header.tensors.get("token_embd.weight")
        return config_from_gguf(
            self._header.metadata,
            str(self.path),
            num_embedding_rows=embedding.shape[0] if embedding is not None else None,
            rope_factors={name: self._factors(name) for name in FACTOR_TENSORS if name in self._header.tensors},
        )

    def _factors(self, name: str) -> tuple[float, ...]:
        tensor = self.read(name)
        if tensor.dtype != "float32" or not (np.isfinite(tensor.data).all() and (tensor.data > 0).all()):
            raise ModelFileError(f"{self.path}: tensor {name!r} should hold positive float32 numbers")
        return tuple(float(value) for value in tensor.data.reshape(-1))

    def _token_id(self, name: str) -> int | None:
        """A token id of the metadata; None when absent, or outside the vocabulary (some converters write -1)."""
        token_id = self._fields.optional_int("tokenizer.ggml." + name)
        return token_id if token_id is not None and 0 <= token_id < self.config.vocab_size else None

    @cached_property
    def _vocabulary(self) -> GgufVocabulary | None:
        """None when the file holds no tokenizer."""
        prefix = "tokenizer.ggml."
        if self._fields.get(prefix + "tokens") is None:
            return None
        tokens = self._list(prefix + "tokens", str)
        if len(tokens) > self.config.vocab_size:
            raise ModelFileError(
                f"{self.path}: {len(tokens)} tokens in '{prefix}tokens', but tensor 'token_embd.weight' has only "
                f"{self.config.vocab_size} rows"
            )
        types = self._list(prefix + "token_type", int) or [1] * len(tokens)
        if len(types) != len(tokens):
            raise ModelFileError(f"{self.path}: {len(tokens)} tokens, but {len(types)} entries in '{prefix}token_type'")
        return GgufVocabulary(
            source=str(self.path),
            model=self._fields.text(prefix + "model"),
            pre=self._fields.optional_text(prefix + "pre"),
            tokens=tokens,
            token_types=types,
            merges=self._list(prefix + "merges", str),
            scores=self._list(prefix + "scores", float),
            add_bos_token=self._fields.optional_flag(prefix + "add_bos_token"),
            add_space_prefix=self._fields.optional_flag(prefix + "add_space_prefix"),
            bos_token_id=self._token_id("bos_token_id"),
            eos_token_id=self._token_id("eos_token_id"),
            eot_token_id=self._token_id("eot_token_id"),
            unknown_token_id=self._token_id("unknown_token_id"),
            padding_token_id=self._token_id("padding_token_id"),
        )

    def _list(self, name: str, kind: type) -> list[Any]:
        value = self._fields.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or (value and type(value[0]) is not kind):
            raise self._fields.wrong(name, f"an array of {kind.__name__}")
        return value


def _dequantise(blocks: npt.NDArray[np.uint8], encoding: int) -> npt.NDArray[np.float32]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values: npt.NDArray[np.float32] = dequantize(blocks, GGMLQuantizationType(encoding))
    return values
