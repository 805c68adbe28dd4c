"""Small vocabularies for tests, and a GGUF vocabulary written as the `tokenizer.json` that Hugging Face has for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noria.files.model import GgufVocabulary
from noria.text.spelling import CHARACTER_OF_BYTE

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def small_gguf_vocabulary(
    *,
    pre: str | None = "gpt-2",
    model: str = "gpt2",
    special: Sequence[str] = ("<s>", "<|im_start|>", "<|im_end|>"),
    user_defined: Sequence[str] = ("<tool>",),
    merges: Sequence[str] = ("a b", "ab c", "Ġ a", "1 2", "12 3", "= ="),
    missing_bytes: bytes = b"",
    add_bos_token: bool | None = None,
) -> GgufVocabulary:
    """All single bytes (but `missing_bytes`), the results of `merges`, then special, user-defined and unused tokens.

    BOS is the first special token, EOS the last.
    """
    tokens = [c for byte, c in sorted(CHARACTER_OF_BYTE.items()) if byte not in missing_bytes]
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [NORMAL] * len(tokens) + [CONTROL] * len(special) + [USER_DEFINED] * len(user_defined) + [UNUSED]
    tokens += [*special, *user_defined, "[PAD0]"]
    return GgufVocabulary(
        model=model,
        pre=pre,
        tokens=tokens,
        token_types=types,
        merges=list(merges),
        add_bos_token=add_bos_token,
        add_space_prefix=None,
        bos_token_id=tokens.index(special[0]) if special else None,
        eos_token_id=tokens.index(special[-1]) if special else None,
        eot_token_id=None,
        unknown_token_id=None,
        padding_token_id=None,
    )


def small_sentencepiece_vocabulary(
    *,
    pieces: Sequence[str] = ("▁a", "▁ab", "ab", "abc", "bc", "▁▁", "é", "b▁a", "aa", "ba"),
    letters: str = "▁abcd<>s/x0A",
    scores: Sequence[float] | None = None,
    user_defined: Sequence[str] = ("\n\n", "  ", "<b>"),
    add_space_prefix: bool | None = None,
    add_bos_token: bool | None = None,
) -> GgufVocabulary:
    """Unknown, BOS and EOS, all bytes, `user_defined`, `pieces` with `scores` (default: the sooner the better), and
    then single letters, the worst. "é" and what is not named here has no letter of its own."""
    named = ["<unk>", "<s>", "</s>"]
    tokens = [*named, *(f"<0x{byte:02X}>" for byte in range(256)), *user_defined, *pieces, *letters]
    types = [2, CONTROL, CONTROL] + [6] * 256 + [USER_DEFINED] * len(user_defined)
    types += [NORMAL] * (len(pieces) + len(letters))
    ranks = [-float(rank) for rank in range(len(pieces))] if scores is None else list(scores)
    ranks += [-1000.0 - i for i in range(len(letters))]
    return GgufVocabulary(
        model="llama",
        pre="default",
        tokens=tokens,
        token_types=types,
        merges=[],
        scores=[0.0] * (len(tokens) - len(ranks)) + ranks,
        add_bos_token=add_bos_token,
        add_space_prefix=add_space_prefix,
        bos_token_id=1,
        eos_token_id=2,
        eot_token_id=None,
        unknown_token_id=0,
        padding_token_id=None,
    )


def huggingface_json(vocabulary: GgufVocabulary) -> dict[str, Any]:
    """The `tokenizer.json` that goes with a GGUF vocabulary of pre-tokenizer "smollm" or "qwen2".

    Pipelines as in the published files of SmolLM2 and Qwen2.5; the vocabulary, merges and added tokens are the same.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    normalizer: dict[str, Any] | None = None
    if vocabulary.pre == "smollm":
        steps = [{"type": "Digits", "individual_digits": True}, byte_level]
    else:
        assert vocabulary.pre == "qwen2"
        normalizer = {"type": "NFC"}
        split = {"type": "Split", "pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Isolated", "invert": False}
        steps = [split, byte_level | {"use_regex": False}]
    used = [i for i, kind in enumerate(vocabulary.token_types) if kind != UNUSED]
    return {
        "version": "1.0",
        "added_tokens": [
            added_token(i, vocabulary.tokens[i], special=vocabulary.token_types[i] == CONTROL)
            for i in used
            if vocabulary.token_types[i] in (CONTROL, USER_DEFINED)
        ],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {vocabulary.tokens[i]: i for i in used},
            "merges": vocabulary.merges,
        },
    }


def sentencepiece_json(*, metaspace: bool = False) -> dict[str, Any]:
    """A `tokenizer.json` in the manner of Llama 2: "▁" for spaces, one put before each text, bytes as a last resort.

    With `metaspace` as newer versions of the library write it: the space only before the first piece of a text.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdHelo.,<>/s|é", "▁a", "▁▁"]
    merges = ["▁ a", "▁ ▁"]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    description: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [added_token(i, tokens[i], special=True) for i in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: i for i, token in enumerate(dict.fromkeys(tokens))},
            "merges": merges,
        },
    }
    if metaspace:
        scheme = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
        description |= {"normalizer": None, "pre_tokenizer": scheme, "decoder": scheme}
    return description


def added_token(token_id: int, content: str, *, special: bool, **flags: bool) -> dict[str, Any]:
    """An entry of `added_tokens`."""
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": special} | usual | flags


def write_json(directory: Path, description: dict[str, Any]) -> Path:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(description), encoding="utf-8")
    return path
