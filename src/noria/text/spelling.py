"""How vocabularies spell bytes: from a token's text in the vocabulary to the bytes it stands for.

Used by the tokenizers of `noria.text.library`. Covers byte-level BPE (one printable character per byte) and the
SentencePiece manner ("▁" for a space, "<0x0A>" for a byte); other decoders are refused.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any, Protocol

from noria.errors import UnsupportedError


class Spelling(Protocol):
    def bytes_of(self, token: str) -> bytes:
        """What the token stands for within a text."""

    def opening_bytes_of(self, token: str) -> bytes:
        """What it stands for at the beginning of a text."""

    def unspelled_bytes(self, vocabulary: Container[str]) -> bytes | None:
        """The bytes that have no token of their own: they may be lost, or many become one unknown token. None where
        that can happen to whole characters."""


def _byte_alphabet() -> dict[str, int]:
    """Character to byte: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = _byte_alphabet()
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


class ByteLevelSpelling:
    """GPT-2's: "Ġthe" is b" the". A token with a character outside the alphabet (an added one) is its own text."""

    def bytes_of(self, token: str) -> bytes:
        try:
            return bytes([BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:
            return token.encode()

    opening_bytes_of = bytes_of

    def unspelled_bytes(self, vocabulary: Container[str]) -> bytes | None:
        return bytes(byte for character, byte in BYTE_OF_CHARACTER.items() if character not in vocabulary)


class SentencePieceSpelling:
    """ "▁the" is b" the", and with `byte_fallback` "<0x0A>" is b"\\n".

    `num_trimmed_spaces` of a text's first token are not part of the text: the tokenizer puts them before each text.
    """

    def __init__(self, *, replacement: str = "▁", byte_fallback: bool = False, num_trimmed_spaces: int = 0) -> None:
        self._replacement = replacement
        self._byte_fallback = byte_fallback
        self._num_trimmed_spaces = num_trimmed_spaces

    def bytes_of(self, token: str) -> bytes:
        if self._byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return token.replace(self._replacement, " ").encode()

    def opening_bytes_of(self, token: str) -> bytes:
        data = self.bytes_of(token)
        num_spaces = len(data) - len(data.lstrip(b" "))
        return data[min(num_spaces, self._num_trimmed_spaces) :]

    def unspelled_bytes(self, vocabulary: Container[str]) -> bytes | None:
        if not self._byte_fallback:
            return None
        return bytes(byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary)


def spelling_from_decoder(decoder: Mapping[str, Any] | None, *, source: str) -> Spelling:
    """The spelling that the `decoder` of a `tokenizer.json` describes; `source` names the file in errors."""
    kinds = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    names = [kind["type"] for kind in kinds]
    if names == ["ByteLevel"]:
        return ByteLevelSpelling()
    if names == ["Metaspace"]:
        trims = kinds[0].get("prepend_scheme", "always") != "never"
        # The library drops every replacement character of the first token, however many there are.
        return SentencePieceSpelling(
            replacement=kinds[0].get("replacement", "▁"), num_trimmed_spaces=_MANY if trims else 0
        )
    if names and set(names) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and all(map(_is_sentencepiece, kinds)):
        return SentencePieceSpelling(
            byte_fallback="ByteFallback" in names,
            num_trimmed_spaces=sum(kind["start"] for kind in kinds if kind["type"] == "Strip"),
        )
    raise UnsupportedError(
        f"{source}: decoder {' + '.join(names) or 'none'} is not supported; supported are ByteLevel, Metaspace and "
        "the SentencePiece sequence (Replace ▁, ByteFallback, Fuse, Strip)"
    )


_MANY = 1 << 30


def _is_sentencepiece(kind: Mapping[str, Any]) -> bool:
    if kind["type"] == "Replace":
        return bool(kind["pattern"] == {"String": "▁"} and kind["content"] == " ")
    if kind["type"] == "Strip":
        return bool(kind["content"] == " " and kind["stop"] == 0)
    return True
