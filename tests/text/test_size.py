"""What the size of a text alone tells: never more tokens than it has, and enough to refuse what is far too long."""

import threading
import time

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, normalizers, pre_tokenizers

from noria.errors import ContextLengthError
from noria.fakes.tokenizer import ByteTokenizer
from noria.text import library
from noria.text.gguf_vocabulary import tokenizer_from_gguf
from noria.text.library import LONG_TEXT, LibraryTokenizer, plain_view
from noria.text.spelling import ByteLevelSpelling, SentencePieceSpelling
from noria.text.tokenizer import check_size
from text.vocabularies import small_gguf_vocabulary

GGUF = tokenizer_from_gguf(small_gguf_vocabulary())
LOSSY = tokenizer_from_gguf(small_gguf_vocabulary(missing_bytes=b"\x04z"))
TOKENIZERS = {"bytes": ByteTokenizer(), "gguf": GGUF, "lossy": LOSSY}
PIECES = st.sampled_from(["<|im_start|>", "<bos>", "<tool>", "abc", " a", "zzzz", "\x04", "é", "😀", "=" * 9, "\ud800"])


def with_parts(normalizer=None, pre_tokenizer=None, added=None, spelling=None) -> LibraryTokenizer:
    """A byte-level tokenizer with other parts around it."""
    parsing = tokenizers.Tokenizer(GGUF._parsing.model)
    parsing.pre_tokenizer = pre_tokenizer or GGUF._parsing.pre_tokenizer
    if normalizer is not None:
        parsing.normalizer = normalizer
    if added is not None:
        parsing.add_special_tokens([added])
    return LibraryTokenizer(
        parsing,
        plain_view(parsing),
        spelling=spelling or ByteLevelSpelling(),
        bos_token_id=None,
        eos_token_id=None,
        wants_bos=False,
    )


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.lists(PIECES | st.text(max_size=20), max_size=20).map("".join))
def test_a_text_never_has_fewer_tokens_than_its_size_tells(name, text):
    tokenizer = TOKENIZERS[name]
    for parse_special in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)
        assert tokenizer.least_num_tokens(text) <= len(ids)


def test_the_bound_is_the_longest_token():
    longest = len("<|im_start|>")
    assert GGUF.least_num_tokens("a" * (10 * longest)) == 10
    assert GGUF.least_num_tokens("a" * (10 * longest + 1)) == 11
    assert LOSSY.least_num_tokens("z" * 1000) == len(LOSSY.encode("z" * 1000)) == 0


@given(st.text("a\u0301\u0308\u1fbe\u212a\u0327\u1100\u1161\u11a8é", max_size=60))
def test_composing_shrinks_a_text_no_more_than_is_allowed_for(text):
    composing = with_parts(normalizers.NFC())
    assert composing.least_num_tokens(text) <= len(composing.encode(text, add_special_tokens=False))
    assert composing.least_num_tokens("a" * 12 * 4 * 10) > 0


@pytest.mark.parametrize(
    "tokenizer",
    [
        with_parts(normalizers.Strip()),
        with_parts(normalizers.NFKC()),
        with_parts(normalizers.Sequence([normalizers.NFC(), normalizers.Replace("aaaa", "a")])),
        with_parts(pre_tokenizer=pre_tokenizers.Split(Regex(" +"), behavior="removed")),
        with_parts(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
        with_parts(added=tokenizers.AddedToken("<mask>", lstrip=True)),
        with_parts(spelling=SentencePieceSpelling(byte_fallback=False)),
    ],
)
def test_where_text_can_vanish_its_size_tells_nothing(tokenizer):
    assert tokenizer.least_num_tokens("a" * 100_000) == 0


def test_what_is_too_long_is_refused_without_encoding_it():
    class Unread(ByteTokenizer):
        def encode(self, text, **options):
            raise AssertionError("it was encoded")

    check_size("a" * 500, Unread(), 100, param="prompt")
    with pytest.raises(
        ContextLengthError, match="505 characters, at least 101 tokens, but this model's maximum context length is 100"
    ):
        check_size("a" * 505, Unread(), 100, param="prompt")


def test_others_run_while_a_long_text_is_encoded(monkeypatch):
    """And the tokens are those of the other way."""
    text = "abc a 123 é " * (400 * LONG_TEXT // 12)
    before = GGUF.encode(text)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setattr(library, "_shares_interpreter", False)
    library.share_interpreter()
    ticks = 0
    is_over = threading.Event()

    def tick():
        nonlocal ticks
        while not is_over.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    start_s, ticks = time.process_time(), 0
    shared = GGUF.encode(text)
    seen = ticks
    is_over.set()
    thread.join()
    print(f"{seen} ticks in {time.process_time() - start_s:.2f} s")
    assert shared == before
    assert seen > 10
