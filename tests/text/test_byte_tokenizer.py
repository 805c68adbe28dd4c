"""The byte tokenizer keeps the contract of `Tokenizer`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from noria.fakes.tokenizer import ByteTokenizer


@given(st.text())
def test_text_round_trips(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text, parse_special=False)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("<bos>a<eos>") == [256, 97, 257]
    assert tokenizer.encode("<bos>", parse_special=False) == list(b"<bos>")
    assert tokenizer.decode([256, 97, 257, 258, -1]) == "a"
    assert tokenizer.decode([256, 97, 257], skip_special_tokens=False) == "<bos>a<eos>"
    assert tokenizer.encode_rendered("<bos>x<e\ufdd0os>", marker="\ufdd0") == [256, *b"x<eos>"]
    assert (tokenizer.id_to_token(10), tokenizer.id_to_token(257), tokenizer.id_to_token(258)) == (
        "<0x0A>",
        "<eos>",
        None,
    )


def test_bos_is_added_once_when_wanted() -> None:
    tokenizer = ByteTokenizer(wants_bos=True)
    assert tokenizer.encode("a") == tokenizer.encode("<bos>a") == [256, 97]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]
