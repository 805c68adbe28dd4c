"""The pre-tokenizers that GGUF files name (`tokenizer.ggml.pre`): what no merge of byte-level BPE may cross.

Used by `noria.text.gguf_vocabulary`. Each splits as llama.cpp does for that name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_SPLIT = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

# Words end where small letters meet capital ones, but only those of ASCII count as small or capital.
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"


def _cased_words(ending: str, digits: str) -> str:
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{_UPPER}*{_LOWER}+{ending}|{before}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_TEKKEN_SPLIT = _cased_words("", r"\p{N}")
_GPT4O_SPLIT = _cased_words(rf"(?:{_CONTRACTIONS})?", r"\p{N}{1,3}")


def _gpt2() -> list[PreTokenizer]:
    return [ByteLevel(add_prefix_space=False, use_regex=True)]


def _smollm() -> list[PreTokenizer]:
    return [Digits(individual_digits=True), *_gpt2()]


def _split_by(pattern: str) -> Callable[[], list[PreTokenizer]]:
    return lambda: [
        Split(Regex(pattern), behavior="isolated"),
        ByteLevel(add_prefix_space=False, use_regex=False),
    ]


@dataclass(frozen=True, slots=True)
class Kind:
    """What llama.cpp ties to the name of a pre-tokenizer."""

    make_parts: Callable[[], list[PreTokenizer]]
    ignore_merges: bool = False
    """A piece that is a token is that token, whether merges lead to it or not."""
    wants_bos: bool = False
    """Unless the file says otherwise."""


_QWEN2 = Kind(_split_by(_QWEN2_SPLIT))
_LLAMA3 = Kind(_split_by(_LLAMA3_SPLIT), ignore_merges=True, wants_bos=True)
_GPT4O = Kind(_split_by(_GPT4O_SPLIT))

KINDS: dict[str, Kind] = {
    "gpt-2": Kind(_gpt2),
    "smollm": Kind(_smollm),
    "starcoder": Kind(_smollm),
    "refact": Kind(_smollm),  # Granite 3
    "command-r": Kind(_smollm),
    "qwen2": _QWEN2,  # Qwen 2 to 3
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,  # Llama 3, SmolLM3
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": Kind(_split_by(_LLAMA3_SPLIT)),  # Phi-4, Granite 4
    "tekken": Kind(_split_by(_TEKKEN_SPLIT), ignore_merges=True, wants_bos=True),  # Mistral since Nemo
    "gpt-4o": _GPT4O,  # Phi-4-mini
    "llama4": _GPT4O,
}
"""By `tokenizer.ggml.pre`."""


def make_pre_tokenizer(name: str, *, missing_characters: Sequence[str] = ()) -> PreTokenizer:
    """The pre-tokenizer that GGUF calls `name`: what no merge may cross.

    A byte that the vocabulary lacks has no id and is lost; split off by itself, what stood around it is not merged.
    """
    parts = KINDS[name].make_parts()
    if missing_characters:
        pattern = f"[{''.join(map(re.escape, missing_characters))}]"
        parts.append(Split(Regex(pattern), behavior="isolated"))
    return pre_tokenizers.Sequence(parts)
