"""Incremental text equals text at once, however the ids are bunched."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from noria.fakes.tokenizer import ByteTokenizer
from noria.files.model import TokenizerFiles
from noria.text.detokenizer import Detokenizer
from noria.text.tokenizer import Tokenizer, load_tokenizer
from text.vocabularies import sentencepiece_json, write_json


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_json(tmp_path_factory.mktemp("sentencepiece"), sentencepiece_json())
    return load_tokenizer(TokenizerFiles(tokenizer_json=path))


def pieces(tokenizer: Tokenizer, bunches: list[list[int]], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(bunch) for bunch in bunches), detokenizer.flush()]


bytes_of_text = st.text().map(lambda text: list(text.encode()))
byte_ids = st.lists(st.integers(0, 257) | st.integers(0x80, 0xFF)) | bytes_of_text
bunches_of_bytes = st.lists(byte_ids)


@given(bunches_of_bytes, st.booleans())
def test_bunches_join_to_the_text(bunches: list[list[int]], skip: bool) -> None:
    tokenizer = ByteTokenizer()
    ids = [token_id for bunch in bunches for token_id in bunch]
    joined = "".join(pieces(tokenizer, bunches, skip=skip))
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)
    assert joined == "".join(pieces(tokenizer, [[i] for i in ids], skip=skip))
    spelled = b"".join(tokenizer.token_bytes(i) for i in ids if not (skip and i in tokenizer.special_token_ids))
    assert joined == spelled.decode("utf-8", "replace")


@given(st.lists(st.lists(st.integers(0, 290))), st.booleans())
def test_bunches_join_to_the_text_where_a_first_space_is_trimmed(
    sentencepiece: Tokenizer, bunches: list[list[int]], skip: bool
) -> None:
    ids = [token_id for bunch in bunches for token_id in bunch]
    expected = sentencepiece.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(sentencepiece, bunches, skip=skip)) == expected
    assert "".join(pieces(sentencepiece, [[i] for i in ids], skip=skip)) == expected


@given(bytes_of_text)
def test_no_character_is_split_or_held_longer_than_needed(ids: list[int]) -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    data = b""
    text = ""
    for token_id in ids:
        text += detokenizer.push([token_id])
        data += bytes([token_id])
        assert text == data.decode("utf-8", "ignore")
    assert detokenizer.flush() == ""


@given(st.binary())
def test_bytes_that_are_not_utf_8_are_replaced_as_the_library_does(data: bytes) -> None:
    decoder = tokenizers.decoders.ByteLevel()
    alphabet = {byte: character for character, byte in BYTES.items()}
    assert ByteTokenizer().decode(list(data)) == decoder.decode([alphabet[byte] for byte in data])


BYTES = {
    tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(chr(b))[0][0][-1]: (
        b if b < 0x80 else chr(b).encode()[-1]
    )
    for b in range(256)
}
BYTES |= {chr(b): b for b in range(0xC0, 0x100)}


def test_invalid_bytes_do_not_hold_back_their_neighbours() -> None:
    #                     a  lone     E0 needs A0..BF next   complete
    given_bytes = list(b"a\xffb\xe0\x80\xc3\xa9")
    assert pieces(ByteTokenizer(), [[i] for i in given_bytes]) == [
        "a", "\ufffd", "b", "", "\ufffd\ufffd", "", "é", "",
    ]  # fmt: skip
    assert pieces(ByteTokenizer(), [[0xF0], [0x9F], [0x98]]) == ["", "", "", "\ufffd"]


def test_text_continues_its_context(sentencepiece: Tokenizer) -> None:
    a = sentencepiece.encode("a", add_special_tokens=False)
    assert sentencepiece.decode(a) == "a"
    continuing = Detokenizer(sentencepiece)
    continuing.continue_from(a)
    assert continuing.push(a) == " a"
    only_special = Detokenizer(sentencepiece)
    only_special.continue_from([1])
    assert only_special.push(a) == "a"


@given(st.text(min_size=1), st.integers(0, 3), bytes_of_text)
def test_a_character_that_the_context_began_is_completed(before: str, num_cut: int, after: list[int]) -> None:
    data = list(before.encode())
    cut = len(data) - min(num_cut, len(before[-1].encode()) - 1)
    detokenizer = Detokenizer(ByteTokenizer())
    detokenizer.continue_from(data[:cut])
    output = detokenizer.push(data[cut:] + after) + detokenizer.flush()
    assert output == (before[-1] if cut < len(data) else "") + bytes(after).decode()
