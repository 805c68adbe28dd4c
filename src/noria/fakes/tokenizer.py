"""A tokenizer without files: one token per byte, for tests and for trying Noria out without a model's vocabulary."""

from __future__ import annotations

import re

from noria.text.chat_template import ChatTemplate
from noria.text.tokenizer import Tokenizer, well_formed

_CHAT_TEMPLATE = """\
{% for message in messages %}{{ bos_token }}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}\
{% if add_generation_prompt %}{{ bos_token }}assistant: {% endif %}"""


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of UTF-8, 256 is BOS ("<bos>") and 257 is EOS ("<eos>").

    `wants_bos`: whether `encode` puts BOS before a text that does not begin with it (default: no).
    """

    BOS = 256
    EOS = 257

    def __init__(self, *, wants_bos: bool = False) -> None:
        self.vocab_size = 258
        self.bos_token_id = self.BOS
        self.eos_token_id = self.EOS
        self.special_token_ids = (self.BOS, self.EOS)
        self.special_token_texts = ("<bos>", "<eos>")
        self.chat_template = ChatTemplate(_CHAT_TEMPLATE, special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"})
        self._wants_bos = wants_bos

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        if parse_special:
            return self.encode_rendered(text, marker="", add_special_tokens=add_special_tokens)
        return self._with_bos(_bytes_of(text), add_special_tokens)

    def encode_rendered(self, text: str, *, marker: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for piece in re.split("(<bos>|<eos>)", text):
            if piece in self.special_token_texts:
                ids.append(self.BOS if piece == "<bos>" else self.EOS)
            else:
                ids += _bytes_of(piece.replace(marker, "") if marker else piece)
        return self._with_bos(ids, add_special_tokens)

    def least_num_tokens(self, text: str) -> int:
        return len(text) // len("<bos>")

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < self.BOS:
            return bytes([token_id])
        return {self.BOS: b"<bos>", self.EOS: b"<eos>"}.get(token_id, b"")

    def id_to_token(self, token_id: int) -> str | None:
        if 0 <= token_id < self.BOS:
            return f"<0x{token_id:02X}>"
        return {self.BOS: "<bos>", self.EOS: "<eos>"}.get(token_id)

    def _with_bos(self, ids: list[int], add_special_tokens: bool) -> list[int]:
        needed = self._wants_bos and add_special_tokens and ids[:1] != [self.BOS]
        return [self.BOS, *ids] if needed else ids


def _bytes_of(text: str) -> list[int]:
    return list(well_formed(text).encode())
