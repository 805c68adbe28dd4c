"""Tokenizers from GGUF vocabularies: the same ids as llama.cpp, and clear refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from noria.errors import ModelFileError, UnsupportedError
from noria.files.model import GgufVocabulary, TokenizerFiles
from noria.files.sources import open_model
from noria.text.gguf_pre_tokenizers import make_pre_tokenizer
from noria.text.spelling import ByteLevelSpelling
from noria.text.tokenizer import Tokenizer, load_tokenizer
from text.strings import STRINGS
from text.vocabularies import small_gguf_vocabulary

GOLDEN = Path(__file__).parent / "golden"

NEW_LETTERS = ["\U00013470's"]
"""A letter since Unicode 16, which llama.cpp's tables do not know as one."""

END_OF_HTML_S = ["<s>struck</s> <b>bold</b>", "</s>", "a</s>b"]
"""llama.cpp takes "</s>" for an end of text in every vocabulary; in Qwen's and Gemma's it is the end of HTML's <s>."""

KNOWN_DIFFERENCES: dict[tuple[str, bool], list[str]] = {
    ("smollm2", True): NEW_LETTERS,
    ("smollm2", False): NEW_LETTERS,
    ("qwen2.5-coder", True): END_OF_HTML_S + NEW_LETTERS,
    ("qwen2.5-coder", False): NEW_LETTERS,
    ("gemma3", True): [],
    ("gemma3", False): END_OF_HTML_S,
}
"""Explained in docs/tokenizers.md."""


def load(vocabulary: GgufVocabulary) -> Tokenizer:
    return load_tokenizer(TokenizerFiles(vocabulary=vocabulary))


def differences(tokenizer: Tokenizer, name: str, *, parse_special: bool) -> list[str]:
    """The strings to which `tokenizer` gives other ids than the recording."""
    golden: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    assert golden["strings"] == STRINGS, "record again: see tests/text/golden/README.md"
    recorded = golden[f"parse_special_{str(parse_special).lower()}"]
    return [
        string
        for string, ids in zip(STRINGS, recorded, strict=True)
        if tokenizer.encode(string, parse_special=parse_special) != ids
    ]


def test_there_are_many_strings() -> None:
    assert len(set(STRINGS)) == len(STRINGS) >= 200


@pytest.mark.parametrize("parse_special", [True, False])
def test_smollm2_gives_the_ids_of_llama_cpp(smollm2: Tokenizer, parse_special: bool) -> None:
    found = differences(smollm2, "smollm2", parse_special=parse_special)
    assert found == KNOWN_DIFFERENCES["smollm2", parse_special]


@pytest.mark.full
def test_qwen_gives_the_ids_of_llama_cpp(qwen_files: TokenizerFiles) -> None:
    tokenizer = load_tokenizer(qwen_files)
    for parse_special in (True, False):
        found = differences(tokenizer, "qwen2.5-coder", parse_special=parse_special)
        assert found == KNOWN_DIFFERENCES["qwen2.5-coder", parse_special]


@pytest.mark.full
def test_gemma_gives_the_ids_of_llama_cpp(gemma_path: Path) -> None:
    tokenizer = load_tokenizer(open_model(gemma_path).tokenizer)
    for parse_special in (True, False):
        found = differences(tokenizer, "gemma3", parse_special=parse_special)
        assert found == KNOWN_DIFFERENCES["gemma3", parse_special]


def test_smollm2_round_trips_what_its_vocabulary_has_bytes_for(smollm2: Tokenizer) -> None:
    spelled = {smollm2.token_bytes(i) for i in range(smollm2.vocab_size)}
    for string in STRINGS:
        if all(bytes([byte]) in spelled for byte in string.encode()):
            assert smollm2.decode(smollm2.encode(string), skip_special_tokens=False) == string
            assert smollm2.decode(smollm2.encode(string, parse_special=False)) == string


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "it's 12345 café,\n\n x", ["it", "'s", " 12345", " café", ",", "\n\n", " x"]),
        ("smollm", "a12 3½", ["a", "1", "2", " ", "3", "½"]),
        ("qwen2", "IT'LL (ab) 123\r\n\n  x", ["IT", "'LL", " (", "ab", ")", " ", "1", "2", "3", "\r\n\n", " ", " x"]),
        ("qwen2", "a.\n\nb", ["a", ".\n\n", "b"]),
        ("llama-bpe", "1234567 _x'Re", ["123", "456", "7", " _", "x", "'Re"]),
        ("dbrx", "1234567 _x'Re", ["123", "456", "7", " _", "x", "'Re"]),
        (
            "tekken",
            "camelCase HTTPServer 123/\n\nx's",
            ["camel", "Case", " HTTPServer", " ", *"123", "/\n\n", "x", "'s"],
        ),
        ("tekken", "éÉa Éé ÀB", ["éÉa", " Éé", " À", "B"]),
        ("gpt-4o", "camelCase it's IT'S 1234", ["camel", "Case", " it's", " IT'S", " ", "123", "4"]),
    ],
)
def test_pre_tokenizers_split_as_published(name: str, text: str, words: list[str]) -> None:
    spelling = ByteLevelSpelling()
    split = [spelling.bytes_of(word).decode() for word, _ in make_pre_tokenizer(name).pre_tokenize_str(text)]
    assert split == words


def test_merges_apply_in_their_order_within_words() -> None:
    tokenizer = load(small_gguf_vocabulary())
    tokens = [tokenizer.id_to_token(i) for i in tokenizer.encode("abc ab ac 1234")]
    assert tokens == ["abc", "Ġ", "ab", "Ġa", "c", "Ġ", "123", "4"]


def test_control_tokens_are_found_only_when_asked_for_and_user_defined_ones_always() -> None:
    tokenizer = load(small_gguf_vocabulary())
    ids = tokenizer.encode("a<|im_end|><tool>", parse_special=True)
    assert [tokenizer.id_to_token(i) for i in ids] == ["a", "<|im_end|>", "<tool>"]
    ids = tokenizer.encode("a<|im_end|><tool>", parse_special=False)
    assert [tokenizer.id_to_token(i) for i in ids] == [*"a<|im_end|>", "<tool>"]
    assert [tokenizer.id_to_token(i) for i in tokenizer.special_token_ids] == ["<s>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.special_token_texts == ("<s>", "<|im_start|>", "<|im_end|>")


def test_user_defined_tokens_with_names_of_control_tokens_are_control_tokens() -> None:
    tokenizer = load(small_gguf_vocabulary(user_defined=("<|fim_prefix|>", "<think>")))
    assert "<|fim_prefix|>" in tokenizer.special_token_texts
    assert "<think>" not in tokenizer.special_token_texts


def test_bytes_without_a_token_are_lost_and_keep_their_neighbours_apart() -> None:
    tokenizer = load(small_gguf_vocabulary(missing_bytes=b"\x04"))
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("=\x04==")] == ["=", "=="]


def test_what_is_no_token_decodes_to_nothing() -> None:
    vocabulary = small_gguf_vocabulary()
    tokenizer = load(vocabulary)
    unused = vocabulary.tokens.index("[PAD0]")
    size = tokenizer.vocab_size
    assert size == len(vocabulary.tokens)
    assert tokenizer.decode([*tokenizer.encode("ab"), unused, size, size + 5, -1, 2**40]) == "ab"
    assert tokenizer.id_to_token(size) is None
    assert tokenizer.id_to_token(-1) is None
    assert tokenizer.token_bytes(size) == b""


@pytest.mark.parametrize(
    ("pre", "add_bos_token", "adds"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos_only_if_wanted_and_only_once(pre: str, add_bos_token: bool | None, adds: bool) -> None:
    tokenizer = load(small_gguf_vocabulary(pre=pre, add_bos_token=add_bos_token))
    bos = [tokenizer.bos_token_id] if adds else []
    a = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("a") == bos + a
    assert tokenizer.encode("") == bos
    assert tokenizer.encode("<s>a") == [tokenizer.bos_token_id, *a]
    assert tokenizer.encode("<s><s>a") == [tokenizer.bos_token_id] * 2 + a
    assert tokenizer.encode("<s>", parse_special=False)[: len(bos) + 1] == bos + tokenizer.encode("<")[-1:]


def test_a_lone_surrogate_is_a_replacement_character() -> None:
    tokenizer = load(small_gguf_vocabulary())
    assert tokenizer.decode(tokenizer.encode("a\ud83db \ud83d\ude00")) == "a\ufffdb 😀"


def test_unknown_kinds_are_refused_with_what_is_supported() -> None:
    with pytest.raises(UnsupportedError, match=r"'bert'.*supported are 'gpt2'"):
        load(small_gguf_vocabulary(model="bert"))
    for pre in ("deepseek-v3", None):
        with pytest.raises(UnsupportedError, match=rf"{pre!r}.*gpt-2, smollm.*qwen2.*llama-bpe"):
            load(small_gguf_vocabulary(pre=pre))


def test_vocabularies_that_contradict_themselves_are_refused() -> None:
    good = small_gguf_vocabulary()
    for bad, message in [
        (replace(good, token_types=good.token_types[:-1]), "token_type"),
        (replace(good, tokens=[*good.tokens[:-1], "a"]), "same token twice"),
        (replace(good, merges=[*good.merges, "no such"]), "merges"),
        (replace(good, eos_token_id=len(good.tokens)), "eos_token_id"),
    ]:
        with pytest.raises(ModelFileError, match=message):
            load(bad)
