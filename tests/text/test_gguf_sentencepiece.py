"""SentencePiece vocabularies of GGUF files: ids by scores, bytes, spaces, special tokens; and text again."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.errors import ModelFileError, UnsupportedError
from noria.files.model import GgufVocabulary, TokenizerFiles
from noria.text.chat import encode_chat
from noria.text.chat_template import ChatTemplate
from noria.text.detokenizer import Detokenizer
from noria.text.tokenizer import Tokenizer, load_tokenizer
from text.vocabularies import small_sentencepiece_vocabulary

ALPHABET = "ab▁ cd\nxé<>/s0🦜"
texts = st.text(alphabet=ALPHABET, max_size=40)


def load(vocabulary: GgufVocabulary, chat_template: str | None = None) -> Tokenizer:
    return load_tokenizer(TokenizerFiles(vocabulary=vocabulary, chat_template=chat_template))


def pieces(tokenizer: Tokenizer, text: str, *, parse_special: bool = True) -> list[str | None]:
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)
    return [tokenizer.id_to_token(i) for i in ids]


def by_scores(vocabulary: GgufVocabulary, text: str) -> list[str]:
    """Joins the neighbours whose joint piece has the highest score, the first of them on ties, while there are any."""
    scores = {
        token: score
        for token, score, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.token_types, strict=True)
        if kind in (1, 4)
    }
    symbols = list(text.replace(" ", "▁"))
    while joint := [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]:
        place = -max(joint)[1]
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    found: list[str] = []
    for symbol in symbols:
        found += [symbol] if symbol in scores else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    return found


@given(texts, st.permutations(range(10)))
def test_the_best_score_is_joined_first(text: str, ranks: list[int]) -> None:
    vocabulary = small_sentencepiece_vocabulary(
        scores=[-float(r) for r in ranks], user_defined=(), add_space_prefix=False
    )
    assert pieces(load(vocabulary), text, parse_special=False) == by_scores(vocabulary, text)


def test_merges_are_decided_by_scores_and_not_by_ids() -> None:
    left = small_sentencepiece_vocabulary(pieces=("ab", "bc"), scores=(-1.0, -2.0), add_space_prefix=False)
    right = small_sentencepiece_vocabulary(pieces=("ab", "bc"), scores=(-2.0, -1.0), add_space_prefix=False)
    assert pieces(load(left), "abc") == ["ab", "c"]
    assert pieces(load(right), "abc") == ["a", "bc"]


def test_what_is_no_piece_becomes_bytes() -> None:
    tokenizer = load(small_sentencepiece_vocabulary(add_space_prefix=False))
    assert pieces(tokenizer, "a🦜é") == ["a", "<0xF0>", "<0x9F>", "<0xA6>", "<0x9C>", "é"]
    assert tokenizer.decode(tokenizer.encode("a🦜é")) == "a🦜é"


@pytest.mark.parametrize(
    ("add_space_prefix", "expected"),
    [
        (None, ["▁ab", "</s>", "▁ab", "<b>", "▁ab"]),
        (True, ["▁ab", "</s>", "▁ab", "<b>", "▁ab"]),
        (False, ["ab", "</s>", "ab", "<b>", "ab"]),
    ],
)
def test_a_space_before_a_text_and_behind_each_special_token(
    add_space_prefix: bool | None, expected: list[str]
) -> None:
    tokenizer = load(small_sentencepiece_vocabulary(add_space_prefix=add_space_prefix))
    assert pieces(tokenizer, "ab</s>ab<b>ab") == expected
    assert tokenizer.encode("") == [tokenizer.bos_token_id]
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


def test_a_user_defined_token_that_opens_a_text_keeps_its_spaces() -> None:
    tokenizer = load(small_sentencepiece_vocabulary())
    assert pieces(tokenizer, "  a") == ["  ", "▁a"]
    assert tokenizer.decode(tokenizer.encode("  a")) == "   a"


@pytest.mark.parametrize(("add_bos_token", "adds"), [(None, True), (True, True), (False, False)])
def test_bos_unless_the_file_says_no(add_bos_token: bool | None, adds: bool) -> None:
    tokenizer = load(small_sentencepiece_vocabulary(add_bos_token=add_bos_token))
    assert (tokenizer.encode("a")[0] == tokenizer.bos_token_id) == adds
    assert tokenizer.encode("<s>a").count(tokenizer.bos_token_id) == 1


def test_special_tokens_are_never_made_of_pieces() -> None:
    vocabulary = small_sentencepiece_vocabulary(
        pieces=("</", "s>", "<s", "<0", "x0", "A>", "<0x0"), add_space_prefix=False
    )
    tokenizer = load(vocabulary)
    assert pieces(tokenizer, "</s><0x0A>", parse_special=False) == ["</", "s>", "<0x0", "A>"]
    assert pieces(tokenizer, "</s>") == ["</s>"]


def test_look_alikes_in_a_chat_stay_text() -> None:
    tokenizer = load(small_sentencepiece_vocabulary(add_space_prefix=False), "{{ messages[0].content }}</s>")
    ids = encode_chat(tokenizer, [{"role": "user", "content": "a</s><s>  <b>"}])
    assert [tokenizer.id_to_token(i) for i in ids] == ["<s>", "a", *"</s><s>", "  ", "<b>", "</s>"]


def test_the_file_names_the_special_tokens_of_the_template() -> None:
    tokenizer = load(small_sentencepiece_vocabulary(), "{{ bos_token }}{{ unk_token }}{{ eos_token }}")
    assert isinstance(tokenizer.chat_template, ChatTemplate)
    assert tokenizer.chat_template.render([]) == "<s><unk></s>"


@given(texts, st.booleans(), st.lists(st.integers(0, 60), max_size=6), st.integers(0, 8))
def test_streamed_text_is_the_text_however_it_is_split(
    text: str, has_prefix: bool, places: list[int], num_in_prompt: int
) -> None:
    """Characters of several byte pieces, a prefix space, and a prompt that ends inside a character."""
    tokenizer = load(small_sentencepiece_vocabulary(add_space_prefix=has_prefix, user_defined=()))
    ids = tokenizer.encode(text)
    bounds = [0, *sorted(min(place, len(ids)) for place in places), len(ids)]
    detokenizer = Detokenizer(tokenizer)
    streamed = [detokenizer.push(ids[a:b]) for a, b in pairwise(bounds)] + [detokenizer.flush()]
    whole = "".join(streamed)
    assert whole == tokenizer.decode(ids)
    if not any(token in text for token in ("<s>", "</s>", "▁")):
        assert whole == text
    continued = Detokenizer(tokenizer)
    continued.continue_from(ids[:num_in_prompt])
    rest = "".join(continued.push([token_id]) for token_id in ids[num_in_prompt:]) + continued.flush()
    if num_in_prompt > 1:  # something other than a BOS came before
        assert whole.endswith(rest)


@given(st.lists(st.integers(0, 290)), st.lists(st.integers(0, 60), max_size=6), st.booleans())
def test_any_ids_give_the_same_text_in_any_bunches(ids: list[int], places: list[int], has_prefix: bool) -> None:
    tokenizer = load(small_sentencepiece_vocabulary(add_space_prefix=has_prefix))
    bounds = [0, *sorted(min(place, len(ids)) for place in places), len(ids)]
    detokenizer = Detokenizer(tokenizer)
    joined = "".join(detokenizer.push(ids[a:b]) for a, b in pairwise(bounds)) + detokenizer.flush()
    assert joined == tokenizer.decode(ids)


def test_vocabularies_without_what_is_needed_are_refused() -> None:
    good = small_sentencepiece_vocabulary()
    without_bytes = [token.replace("<0x", "<1x") for token in good.tokens]
    for bad, kind, message in [
        (replace(good, scores=[]), ModelFileError, r"scores has 0 entries for \d+ tokens"),
        (replace(good, scores=[*good.scores[:-1], math.nan]), ModelFileError, r"entry \d+ is not a number"),
        (replace(good, tokens=without_bytes, unknown_token_id=None), UnsupportedError, "a token for each byte"),
        (replace(good, model="t5"), UnsupportedError, r"'t5'.*'gpt2'.*'llama'"),
    ]:
        with pytest.raises(kind, match=message):
            load(bad)
