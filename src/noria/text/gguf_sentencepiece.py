"""Vocabularies of the SentencePiece kind in GGUF files (`tokenizer.ggml.model` "llama"): pieces with scores.

Used by `noria.text.gguf_vocabulary`. Of two neighbouring pieces whose text together is a piece, those are joined first
whose joint piece has the highest score; a character that is no piece becomes the pieces of its bytes. The `tokenizers`
library does the same when each way to make a piece of two others is a merge, in the order of scores. Of two different
pieces with one score the library joins the one with the lower id first, others the one further left: trained
vocabularies give every piece that is made of others a score of its own.
"""

from __future__ import annotations

import math

from tokenizers import normalizers
from tokenizers.models import BPE
from tokenizers.normalizers import Normalizer, Prepend, Replace

from noria.errors import ModelFileError, UnsupportedError
from noria.files.model import GgufVocabulary

SPACE = "▁"

UNKNOWN, CONTROL, BYTE = 2, 3, 6
_NEVER_MADE = frozenset((UNKNOWN, CONTROL, BYTE))
"""Types of tokens that are no text: spelling one out in a text must not give it, whatever pieces there are."""


def sentencepiece_model(vocabulary: GgufVocabulary) -> BPE:
    """Raises `ModelFileError` for scores that are missing or no numbers, `UnsupportedError` without byte tokens and
    without an unknown token: then some texts would have no ids."""
    tokens, scores = vocabulary.tokens, vocabulary.scores
    if len(scores) != len(tokens):
        raise ModelFileError(
            f"{vocabulary.source}: tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens"
        )
    if any(map(math.isnan, scores)):
        place = next(i for i, score in enumerate(scores) if math.isnan(score))
        raise ModelFileError(f"{vocabulary.source}: tokenizer.ggml.scores: entry {place} is not a number")
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = vocabulary.unknown_token_id
    if unknown is None and not all(f"<0x{byte:02X}>" in ids for byte in range(256)):
        raise UnsupportedError(
            f"{vocabulary.source}: the vocabulary has neither a token for each byte nor an unknown token"
        )
    return BPE(
        vocab=ids,
        merges=_merges(vocabulary, ids),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=False,
        byte_fallback=True,
    )


def sentencepiece_normalizer(vocabulary: GgufVocabulary) -> Normalizer:
    """A space is "▁", and unless the file says otherwise there is one more before each text and behind each special
    token."""
    parts: list[Normalizer] = [Prepend(SPACE)] if adds_space_prefix(vocabulary) else []
    return normalizers.Sequence([*parts, Replace(" ", SPACE)])


def adds_space_prefix(vocabulary: GgufVocabulary) -> bool:
    return vocabulary.add_space_prefix is not False


def _merges(vocabulary: GgufVocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of tokens that make another one, the best first."""
    tokens, scores = vocabulary.tokens, vocabulary.scores
    types = vocabulary.token_types or [1] * len(tokens)
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind not in _NEVER_MADE}
    best_first = sorted((-scores[ids[token]], ids[token], token) for token in pieces if len(token) > 1)
    return [
        (left, right)
        for _, _, token in best_first
        for end in range(1, len(token))
        if (left := token[:end]) in pieces and (right := token[end:]) in pieces
    ]
