"""A model in a Hugging Face directory: `HuggingFaceModel`, which implements `noria.files.model.ModelFiles`.

Opened by `noria.files.sources.open_model`. Reads `config.json`, safetensors weights (one file, or shards and their
index) and the tokenizer's files. Opening compares index, shards and headers, so that a missing, truncated or left-over
shard is refused by name before anything is served. Not here: whether the tensors fit the configuration
(`noria.weights`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from noria.errors import ModelFileError, UnsupportedError
from noria.files.fields import Fields, read_json, short
from noria.files.fp8 import FP8_ENCODINGS, is_activation_scale, scaled, scales_of
from noria.files.generation import read_json_defaults
from noria.files.locate import gguf_hint, require_config, tokenizer_path
from noria.files.model import HostTensor, ModelConfig, RawTensor, TensorInfo, TokenizerFiles
from noria.files.model_config import config_from_json
from noria.files.quantization import read_quantization
from noria.files.safetensors import SafetensorsFile

SINGLE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
_SHARD: Final = re.compile(r"(?P<family>.+)-\d+-of-\d+\.safetensors")


class HuggingFaceModel:
    """An opened directory. All shards are open and checked; values are read from the mapped files when asked for."""

    format: Literal["huggingface"] = "huggingface"

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        """Raises ModelFileError when a file is missing, damaged or left over, UnsupportedError when a well-formed one
        cannot be read."""
        self.path = path
        self.name = name or path.resolve().name
        config_path = require_config(path)
        self._config_values = read_json(config_path)
        self._quantization = read_quantization(Fields(self._config_values, str(config_path)))
        self.config: ModelConfig = config_from_json(self._config_values, str(config_path))
        self._files = _open_weights(path)
        stored = {name: info for file in self._files for name, info in file.tensors.items()}
        self._file_of = {name: file for file in self._files for name in file.tensors}
        self._scales = scales_of(stored)
        hidden = set(self._scales.values()) | {name for name in stored if is_activation_scale(name, stored)}
        self._tensors = {name: info for name, info in stored.items() if name not in hidden}
        self._check_scales()

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return MappingProxyType(self._tensors)

    def read(self, name: str) -> HostTensor:
        tensor = self._holder(name).read(name)
        if name not in self._scales:
            return tensor
        scale = self._scale(self._scales[name])
        block_size = self._quantization.block_size if self._quantization else None
        return HostTensor(scaled(tensor.data, scale, self._tensors[name], block_size), tensor.dtype)

    def raw(self, name: str) -> RawTensor:
        return self._holder(name).raw(name)

    def _scale(self, name: str) -> npt.NDArray[np.float32]:
        scale = self._holder(name).read(name)
        if scale.dtype == "bfloat16":
            return (scale.data.astype(np.uint32) << 16).view(np.float32)
        return scale.data.astype(np.float32, copy=False)

    def _check_scales(self) -> None:
        """A checkpoint that says it is quantised has scales: without, its weights would be read as something else."""
        if self._quantization is None:
            return
        for name, info in self._tensors.items():
            if info.encoding in FP8_ENCODINGS and name not in self._scales:
                raise ModelFileError(
                    f"{info.file}: tensor {name!r} is stored as {info.encoding}, but there is neither "
                    f"{name + '_scale'!r} nor {name + '_scale_inv'!r}"
                )

    def _holder(self, name: str) -> SafetensorsFile:
        file = self._file_of.get(name)
        if file is None:
            raise ModelFileError(f"{self.path}: tensor {name!r} is missing")
        return file

    @cached_property
    def tokenizer(self) -> TokenizerFiles:
        return TokenizerFiles(
            tokenizer_json=tokenizer_path(self.path),
            tokenizer_config=self._tokenizer_config.values,
            chat_template=self._read_chat_template(),
        )

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids in `config.json` and `generation_config.json`, and the tokenizer's `eos_token`.

        Ids outside the vocabulary (old files write -1 for none) are left out.
        """
        ids = Fields(self._config_values, str(self.path / "config.json")).token_ids("eos_token_id")
        generation = self._optional_json("generation_config.json")
        ids += generation.token_ids("eos_token_id")
        token = self._tokenizer_config.get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            ids += self._ids_of_special_token(text)
        return tuple(sorted({token_id for token_id in ids if 0 <= token_id < self.config.vocab_size}))

    @cached_property
    def sampling_defaults(self) -> Mapping[str, Any]:
        return read_json_defaults(self._optional_json("generation_config.json"))

    @cached_property
    def _tokenizer_config(self) -> Fields:
        return self._optional_json("tokenizer_config.json")

    def _optional_json(self, name: str) -> Fields:
        path = self.path / name
        return Fields(read_json(path) if path.is_file() else {}, str(path))

    def _ids_of_special_token(self, text: str) -> list[int]:
        """At most one id: from `tokenizer_config.json` if it lists the special tokens, else from `tokenizer.json`."""
        decoder = self._tokenizer_config.section("added_tokens_decoder")
        for key, entry in (decoder.values if decoder else {}).items():
            if isinstance(entry, dict) and entry.get("content") == text and key.isdecimal() and len(key) < 10:
                return [int(key)]
        tokenizer = self._optional_json("tokenizer.json")
        added = tokenizer.get("added_tokens")
        for entry in added if isinstance(added, list) else []:
            if isinstance(entry, dict) and entry.get("content") == text and type(entry.get("id")) is int:
                return [entry["id"]]
        model = tokenizer.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        token_id = vocabulary.get(text) if isinstance(vocabulary, dict) else None
        return [token_id] if type(token_id) is int else []

    def _read_chat_template(self) -> str | None:
        """`chat_template.jinja`, else `chat_template` in tokenizer_config.json: one, or "default" among several."""
        path = self.path / "chat_template.jinja"
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelFileError(f"cannot read {path}: {error}") from error
        template = self._tokenizer_config.get("chat_template")
        if isinstance(template, list):
            named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
            template = named[-1].get("template") if named else None
        if template is not None and not isinstance(template, str):
            raise self._tokenizer_config.wrong("chat_template", "a string or a list of named templates")
        return template


def _open_weights(directory: Path) -> list[SafetensorsFile]:
    """All weight files of the directory, in order of their names, checked against the index and against each other."""
    present = sorted(path.name for path in directory.glob("*.safetensors"))
    if (directory / INDEX_NAME).is_file():
        return _open_shards(directory, present)
    if SINGLE_NAME not in present:
        raise _no_weights(directory, present)
    _refuse_left_over(directory, present, used=[SINGLE_NAME], reason=f"does not belong to {SINGLE_NAME}")
    return [SafetensorsFile(directory / SINGLE_NAME)]


def _open_shards(directory: Path, present: list[str]) -> list[SafetensorsFile]:
    index_path = directory / INDEX_NAME
    index = Fields(read_json(index_path), str(index_path))
    placement = index.section("weight_map")
    if placement is None or not placement.values:
        raise ModelFileError(f"{index_path}: field 'weight_map' is missing")
    tensors_of: dict[str, list[str]] = {}
    for tensor, shard in placement.values.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelFileError(
                f"{index_path}: tensor {short(tensor)} is placed in {short(shard)}, which is not a shard's name"
            )
        tensors_of.setdefault(shard, []).append(tensor)
    _refuse_left_over(directory, present, used=sorted(tensors_of), reason=f"is not in {INDEX_NAME}")
    files = [_open_shard(directory / shard, tensors) for shard, tensors in sorted(tensors_of.items())]
    metadata = index.section("metadata")
    claimed = metadata.optional_int("total_size") if metadata else None
    total = sum(file.num_data_bytes for file in files)
    if claimed is not None and claimed != total:
        raise ModelFileError(f"{index_path}: total_size is {claimed} bytes, but the shards hold {total}")
    return files


def _open_shard(path: Path, expected: list[str]) -> SafetensorsFile:
    if not path.is_file():
        raise ModelFileError(
            f"shard {path} is missing; the index places {len(expected)} tensors in it, {expected[0]!r} among them"
        )
    file = SafetensorsFile(path)
    for name in expected:
        if name not in file.tensors:
            raise ModelFileError(f"{path}: tensor {name!r} is missing, though the index places it here")
    if len(file.tensors) > len(expected):
        extra = next(name for name in file.tensors if name not in set(expected))
        raise ModelFileError(
            f"{path}: tensor {extra!r} is not in {INDEX_NAME}; index and shard are of different models"
        )
    return file


def _refuse_left_over(directory: Path, present: list[str], *, used: list[str], reason: str) -> None:
    """Refuses a weight file of the same family that nothing refers to: it means that two downloads are mixed up.

    Files of other families (`consolidated.safetensors`, `adapter_model.safetensors`) are none of our business.
    """
    families = {"model"} | {match["family"] for name in used if (match := _SHARD.fullmatch(name))}
    for name in present:
        match = _SHARD.fullmatch(name)
        if name not in used and (name == SINGLE_NAME or (match and match["family"] in families)):
            raise ModelFileError(f"{directory / name} is left over: it {reason}; remove it or download the model again")


def _no_weights(directory: Path, present: list[str]) -> ModelFileError | UnsupportedError:
    shards = [name for name in present if _SHARD.fullmatch(name)]
    if shards:
        return ModelFileError(f"{directory} holds shards such as {shards[0]}, but {INDEX_NAME} is missing")
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    if pickled:
        return UnsupportedError(
            f"{directory} holds weights only as {pickled[0]}; supported are safetensors files (and GGUF). "
            "transformers can convert it: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OTHER)"
        )
    return ModelFileError(
        f"{directory} holds no weights: {SINGLE_NAME} is missing, and so is {INDEX_NAME}{gguf_hint(directory)}"
    )
