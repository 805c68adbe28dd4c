"""The tokenizer that a GGUF file describes: a vocabulary with merges and the name of a pre-tokenizer, or with scores.

Called by `noria.text.tokenizer.load_tokenizer`. Follows llama.cpp, which defines the format: same ids for the same
text, special tokens parsed or not. `docs/tokenizers.md` lists where the Hugging Face tokenizer of a model differs.
"""

from __future__ import annotations

import re
from collections import Counter

import tokenizers
from tokenizers import AddedToken
from tokenizers.models import BPE

from noria.errors import ModelFileError, UnsupportedError
from noria.files.fields import short
from noria.files.model import GgufVocabulary
from noria.text.chat_template import ChatTemplate
from noria.text.gguf_pre_tokenizers import KINDS, make_pre_tokenizer
from noria.text.gguf_sentencepiece import adds_space_prefix, sentencepiece_model, sentencepiece_normalizer
from noria.text.library import LibraryTokenizer, add_tokens, view_of
from noria.text.spelling import CHARACTER_OF_BYTE, ByteLevelSpelling, SentencePieceSpelling, Spelling

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


def tokenizer_from_gguf(vocabulary: GgufVocabulary, *, chat_template: str | None = None) -> LibraryTokenizer:
    """Raises `UnsupportedError` for a model or a pre-tokenizer that we do not have, `ModelFileError` for a vocabulary
    that contradicts itself."""
    _check(vocabulary)
    special, user_defined = _added_tokens(vocabulary)
    parsing, spelling, wants_bos = _PIPELINES[vocabulary.model](vocabulary)
    add_tokens(parsing, [token for _, token in sorted((special | user_defined).items())])
    plain = view_of(parsing)
    add_tokens(plain, list(user_defined.values()))
    return LibraryTokenizer(
        parsing,
        plain,
        spelling=spelling,
        literal_bytes=_literal_bytes(vocabulary, special, user_defined),
        bos_token_id=vocabulary.bos_token_id,
        eos_token_id=vocabulary.eos_token_id,
        wants_bos=wants_bos if vocabulary.add_bos_token is None else vocabulary.add_bos_token,
        chat_template=_chat_template(vocabulary, chat_template),
    )


def _byte_level(vocabulary: GgufVocabulary) -> tuple[tokenizers.Tokenizer, Spelling, bool]:
    """Byte-level BPE: the tokenizer without added tokens, its spelling, and whether it wants a BOS by default."""
    pre = vocabulary.pre or ""
    if pre not in KINDS:
        raise UnsupportedError(
            f"{vocabulary.source}: tokenizer.ggml.pre {short(vocabulary.pre)} is not supported; supported are "
            f"{', '.join(KINDS)}"
        )
    kind = KINDS[pre]
    tokenizer = tokenizers.Tokenizer(_byte_level_model(vocabulary, ignore_merges=kind.ignore_merges))
    tokenizer.pre_tokenizer = make_pre_tokenizer(pre, missing_characters=_missing_characters(vocabulary))
    return tokenizer, ByteLevelSpelling(), kind.wants_bos


def _sentencepiece(vocabulary: GgufVocabulary) -> tuple[tokenizers.Tokenizer, Spelling, bool]:
    """The same for the SentencePiece kind."""
    tokenizer = tokenizers.Tokenizer(sentencepiece_model(vocabulary))
    tokenizer.normalizer = sentencepiece_normalizer(vocabulary)
    prefix = int(adds_space_prefix(vocabulary))
    return tokenizer, SentencePieceSpelling(byte_fallback=True, num_trimmed_spaces=prefix), True


_PIPELINES = {"gpt2": _byte_level, "llama": _sentencepiece}


def _check(vocabulary: GgufVocabulary) -> None:
    if vocabulary.model not in _PIPELINES:
        raise UnsupportedError(
            f"{vocabulary.source}: tokenizer.ggml.model {short(vocabulary.model)} is not supported; supported are "
            "'gpt2' (byte-level BPE) and 'llama' (SentencePiece's BPE)"
        )
    num_tokens = len(vocabulary.tokens)
    if len(vocabulary.token_types) not in (0, num_tokens):
        raise ModelFileError(
            f"{vocabulary.source}: tokenizer.ggml.token_type has {len(vocabulary.token_types)} entries for "
            f"{num_tokens} tokens"
        )
    if len(set(vocabulary.tokens)) != num_tokens:
        twice = next(token for token, number in Counter(vocabulary.tokens).items() if number > 1)
        raise ModelFileError(f"{vocabulary.source}: tokenizer.ggml.tokens holds the same token twice: {short(twice)}")
    for name in ("bos", "eos", "unknown", "padding"):
        token_id = getattr(vocabulary, f"{name}_token_id")
        if token_id is not None and not 0 <= token_id < num_tokens:
            raise ModelFileError(
                f"{vocabulary.source}: tokenizer.ggml.{name}_token_id is {token_id}, but there are {num_tokens} tokens"
            )


def _byte_level_model(vocabulary: GgufVocabulary, *, ignore_merges: bool) -> BPE:
    merges: list[tuple[str, str]] = []
    for merge in vocabulary.merges:
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    try:
        return BPE(vocab=ids, merges=merges, ignore_merges=ignore_merges)
    except Exception as error:  # The library raises bare Exception.
        raise ModelFileError(
            f"{vocabulary.source}: tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {short(str(error))}"
        ) from error


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
