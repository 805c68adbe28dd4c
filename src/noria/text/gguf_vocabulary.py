"""The tokenizer that a GGUF file describes: a vocabulary, merges, and the name of a pre-tokenizer.

Called by `noria.text.tokenizer.load_tokenizer`. Follows llama.cpp, which defines the format: same ids for the same
text, special tokens parsed or not. `docs/tokenizers.md` lists where the Hugging Face tokenizer of a model differs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import tokenizers
from tokenizers import AddedToken, Regex, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

from noria.errors import ModelFileError, UnsupportedError
from noria.files.model import GgufVocabulary
from noria.text.chat_template import ChatTemplate
from noria.text.library import LibraryTokenizer, add_tokens, view_of
from noria.text.spelling import CHARACTER_OF_BYTE, ByteLevelSpelling

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
"""`tokenizer.ggml.token_type`."""

CONTROL_BY_NAME = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "<|eom_id|>",
    "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|fim_repo|>", "<|repo_name|>",
    "<|file_sep|>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<reponame>",
))  # fmt: skip
"""Tokens that llama.cpp takes for control tokens whatever type the file gives them.

Except "</s>": where the file calls it an ordinary token it is one, the end tag of HTML's <s>, not an end of text.
"""

_QWEN2_SPLIT = (
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _gpt2() -> list[PreTokenizer]:
    return [ByteLevel(add_prefix_space=False, use_regex=True)]


def _smollm() -> list[PreTokenizer]:
    return [Digits(individual_digits=True), *_gpt2()]


def _split_by(pattern: str) -> Callable[[], list[PreTokenizer]]:
    return lambda: [
        Split(Regex(pattern), behavior="isolated"),
        ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_PRE_TOKENIZERS: dict[str, Callable[[], list[PreTokenizer]]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "starcoder": _smollm,
    "refact": _smollm,
    "command-r": _smollm,
    "qwen2": _split_by(_QWEN2_SPLIT),
    "deepseek-r1-qwen": _split_by(_QWEN2_SPLIT),
    "llama-bpe": _split_by(_LLAMA3_SPLIT),
    "llama3": _split_by(_LLAMA3_SPLIT),
    "llama-v3": _split_by(_LLAMA3_SPLIT),
}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")


def make_pre_tokenizer(name: str, *, missing_characters: Sequence[str] = ()) -> PreTokenizer:
    """The pre-tokenizer that GGUF calls `name`: what no merge may cross.

    A byte that the vocabulary lacks has no id and is lost; split off by itself, what stood around it is not merged.
    """
    parts = _PRE_TOKENIZERS[name]()
    if missing_characters:
        pattern = f"[{''.join(map(re.escape, missing_characters))}]"
        parts.append(Split(Regex(pattern), behavior="isolated"))
    return pre_tokenizers.Sequence(parts)


def tokenizer_from_gguf(vocabulary: GgufVocabulary, *, chat_template: str | None = None) -> LibraryTokenizer:
    """Raises `UnsupportedError` for other models than byte-level BPE and for pre-tokenizers that we do not have,
    `ModelFileError` for a vocabulary that contradicts itself."""
    _check(vocabulary)
    pre = vocabulary.pre or ""
    special, user_defined = _added_tokens(vocabulary)
    model = _model(vocabulary, ignore_merges=pre in _LLAMA3_NAMES)
    parsing = tokenizers.Tokenizer(model)
    parsing.pre_tokenizer = make_pre_tokenizer(pre, missing_characters=_missing_characters(vocabulary))
    add_tokens(parsing, [token for _, token in sorted((special | user_defined).items())])
    plain = view_of(parsing)
    add_tokens(plain, list(user_defined.values()))
    bos = vocabulary.bos_token_id
    return LibraryTokenizer(
        parsing,
        plain,
        spelling=ByteLevelSpelling(),
        literal_bytes=_literal_bytes(vocabulary, special, user_defined),
        bos_token_id=bos,
        eos_token_id=vocabulary.eos_token_id,
        wants_bos=pre in _LLAMA3_NAMES if vocabulary.add_bos_token is None else vocabulary.add_bos_token,
        chat_template=_chat_template(vocabulary, chat_template),
    )


def _check(vocabulary: GgufVocabulary) -> None:
    if vocabulary.model != "gpt2":
        raise UnsupportedError(
            f"tokenizer.ggml.model {vocabulary.model!r} is not supported; supported is 'gpt2' (byte-level BPE)"
        )
    if vocabulary.pre not in _PRE_TOKENIZERS:
        raise UnsupportedError(
            f"tokenizer.ggml.pre {vocabulary.pre!r} is not supported; supported are {', '.join(_PRE_TOKENIZERS)}"
        )
    num_tokens = len(vocabulary.tokens)
    if len(vocabulary.token_types) not in (0, num_tokens):
        raise ModelFileError(
            f"tokenizer.ggml.token_type has {len(vocabulary.token_types)} entries for {num_tokens} tokens"
        )
    if len(set(vocabulary.tokens)) != num_tokens:
        raise ModelFileError("tokenizer.ggml.tokens holds the same token twice")
    for name in ("bos", "eos", "unknown", "padding"):
        token_id = getattr(vocabulary, f"{name}_token_id")
        if token_id is not None and not 0 <= token_id < num_tokens:
            raise ModelFileError(f"tokenizer.ggml.{name}_token_id is {token_id}, but there are {num_tokens} tokens")


def _model(vocabulary: GgufVocabulary, *, ignore_merges: bool) -> BPE:
    merges: list[tuple[str, str]] = []
    for merge in vocabulary.merges:
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    try:
        return BPE(vocab=ids, merges=merges, ignore_merges=ignore_merges)
    except Exception as error:  # The library raises bare Exception.
        raise ModelFileError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error


def _added_tokens(vocabulary: GgufVocabulary) -> tuple[dict[int, AddedToken], dict[int, AddedToken]]:
    """By id: special tokens (found only when asked to parse them), and user-defined ones (always found)."""
    special: dict[int, AddedToken] = {}
    user_defined: dict[int, AddedToken] = {}
    for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.token_types, strict=False)):
        if kind in (UNKNOWN, CONTROL) or token in CONTROL_BY_NAME:
            special[token_id] = AddedToken(token, special=True, normalized=False)
        elif kind == USER_DEFINED:
            user_defined[token_id] = AddedToken(token, special=False, normalized=False)
    return special, user_defined


def _literal_bytes(
    vocabulary: GgufVocabulary, special: dict[int, AddedToken], user_defined: dict[int, AddedToken]
) -> dict[int, bytes]:
    """What the tokens stand for that are not spelled in the byte alphabet."""
    literal = {token_id: token.content.encode() for token_id, token in (special | user_defined).items()}
    for token_id, kind in enumerate(vocabulary.token_types):
        if kind == UNUSED:
            literal[token_id] = b""
        elif kind == BYTE and (match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", vocabulary.tokens[token_id])):
            literal[token_id] = bytes([int(match[1], 16)])
    return literal


def _missing_characters(vocabulary: GgufVocabulary) -> list[str]:
    """The bytes that the vocabulary has no token for, as the byte alphabet spells them."""
    known = set(vocabulary.tokens)
    return [character for character in CHARACTER_OF_BYTE.values() if character not in known]


def _chat_template(vocabulary: GgufVocabulary, source: str | None) -> ChatTemplate | None:
    if source is None:
        return None
    named = {
        "bos_token": vocabulary.bos_token_id,
        "eos_token": vocabulary.eos_token_id,
        "unk_token": vocabulary.unknown_token_id,
        "pad_token": vocabulary.padding_token_id,
    }
    return ChatTemplate(
        source, special_tokens={name: vocabulary.tokens[i] for name, i in named.items() if i is not None}
    )
