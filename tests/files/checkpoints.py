"""Small model files for the tests of `noria.files`, written without torch: GGUF and Hugging Face directories."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

TINY_LLAMA_JSON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 50_000.0,
}

TINY_LLAMA_GGUF: dict[str, Any] = {
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def write_gguf(
    path: Path,
    tensors: Mapping[str, tuple[Array, gguf.GGMLQuantizationType | None]],
    metadata: Mapping[str, Any] = TINY_LLAMA_GGUF,
    *,
    architecture: str = "llama",
    alignment: int | None = None,
) -> Path:
    """Writes a GGUF file with the package's writer. Arrays are float32, float16, or uint8 with the encoding named."""
    writer = gguf.GGUFWriter(path, architecture)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for name, value in metadata.items():
        _add_metadata(writer, name, value)
    for name, (data, encoding) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=encoding)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value) if value >= 0 else writer.add_int32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def tiny_gguf_tensors(rows: int = 32) -> dict[str, tuple[Array, gguf.GGMLQuantizationType | None]]:
    """Two tensors, enough to open a model: the embedding and a Q8_0 matrix."""
    rng = np.random.default_rng(0)
    embedding = rng.standard_normal((rows, 64), dtype=np.float32)
    matrix = rng.standard_normal((8, 64), dtype=np.float32)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    return {
        "token_embd.weight": (embedding, None),
        "blk.0.attn_q.weight": (gguf.quants.quantize(matrix, q8_0), q8_0),
        "output_norm.weight": (rng.standard_normal(64, dtype=np.float32), None),
    }


def vocabulary_metadata(tokens: Sequence[str], types: Sequence[int], **more: Any) -> dict[str, Any]:
    """Tokenizer metadata of a GGUF file; `more` are further `tokenizer.ggml.*` fields."""
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": list(tokens),
        "token_type": list(types),
    } | more
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, Array]]) -> Path:
    """Writes a safetensors file; each tensor is its encoding's name and an array whose bytes are stored."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (encoding, data) in tensors.items():
        header[name] = {
            "dtype": encoding,
            "shape": list(data.shape),
            "data_offsets": [position, position + data.nbytes],
        }
        position += data.nbytes
    return write_raw_safetensors(path, header, b"".join(data.tobytes() for _, data in tensors.values()))


def write_raw_safetensors(path: Path, header: Mapping[str, Any] | bytes, data: bytes) -> Path:
    """Writes a safetensors file with whatever header is given."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def write_directory(path: Path, config: Mapping[str, Any] = TINY_LLAMA_JSON, **files: Any) -> Path:
    """A Hugging Face directory without weights: config.json and further JSON files (`generation_config={...}`)."""
    path.mkdir(parents=True, exist_ok=True)
    for name, content in {"config": config, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


SHARDS: dict[str, dict[str, tuple[str, Array]]] = {
    "model-00001-of-00002.safetensors": {
        "model.embed_tokens.weight": ("F32", np.arange(512, dtype=np.float32).reshape(32, 16)),
        "model.norm.weight": ("F16", np.arange(16, dtype=np.float16)),
    },
    "model-00002-of-00002.safetensors": {
        "lm_head.weight": ("BF16", np.arange(512, dtype=np.uint16).reshape(32, 16)),
    },
}

ALL_TENSORS: dict[str, tuple[str, Array]] = {name: t for tensors in SHARDS.values() for name, t in tensors.items()}


def write_sharded(path: Path) -> Path:
    """A directory whose weights are the two shards of `SHARDS`, with an index."""
    write_directory(path)
    for shard, tensors in SHARDS.items():
        write_safetensors(path / shard, tensors)
    write_index(path, {name: shard for shard, tensors in SHARDS.items() for name in tensors})
    return path


def write_index(path: Path, weight_map: Mapping[str, str], total_size: int | None = 2048 + 32 + 1024) -> None:
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
