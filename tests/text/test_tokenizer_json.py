"""Tokenizers from `tokenizer.json`: the same ids as the `tokenizers` library itself, and the same text."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from noria.errors import ModelFileError, UnsupportedError
from noria.files.model import TokenizerFiles
from noria.text.tokenizer import Tokenizer, load_tokenizer
from text.strings import STRINGS
from text.vocabularies import added_token, huggingface_json, sentencepiece_json, small_gguf_vocabulary, write_json

Pair = tuple[Tokenizer, tokenizers.Tokenizer]


def load(directory: Path, description: dict[str, Any], config: dict[str, Any] | None = None) -> Pair:
    """Our tokenizer and the library's, of the same file."""
    path = write_json(directory, description)
    ours = load_tokenizer(TokenizerFiles(tokenizer_json=path, tokenizer_config=config or {}))
    return ours, tokenizers.Tokenizer.from_file(str(path))


@pytest.fixture(scope="module")
def smollm2_pair(tmp_path_factory: pytest.TempPathFactory, smollm2_files: TokenizerFiles) -> Pair:
    assert smollm2_files.vocabulary is not None
    return load(tmp_path_factory.mktemp("smollm2"), huggingface_json(smollm2_files.vocabulary))


@pytest.fixture(scope="module", params=[False, True], ids=["llama2", "metaspace"])
def sentencepiece_pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Pair:
    description = sentencepiece_json(metaspace=request.param)
    return load(tmp_path_factory.mktemp("sentencepiece"), description, {"bos_token": "<s>", "eos_token": "</s>"})


def assert_same_ids(pair: Pair) -> None:
    ours, library = pair
    for string in STRINGS:
        for add_special_tokens in (True, False):
            expected = library.encode(string, add_special_tokens=add_special_tokens).ids
            if expected[:2] == [ours.bos_token_id] * 2 and add_special_tokens:
                del expected[0]
            assert ours.encode(string, add_special_tokens=add_special_tokens) == expected
        assert ours.encode_rendered(string, marker="\ufdd1", add_special_tokens=False) == expected
    library.encode_special_tokens = True
    for string in STRINGS:
        assert (
            ours.encode(string, add_special_tokens=False, parse_special=False)
            == library.encode(string, add_special_tokens=False).ids
        )
    library.encode_special_tokens = False


def test_smollm2_gives_the_ids_of_the_library(smollm2_pair: Pair) -> None:
    assert_same_ids(smollm2_pair)


def test_sentencepiece_gives_the_ids_of_the_library(sentencepiece_pair: Pair) -> None:
    assert_same_ids(sentencepiece_pair)


def test_smollm2_from_gguf_and_from_json_differ_only_around_bytes_without_a_token(
    smollm2: Tokenizer, smollm2_pair: Pair
) -> None:
    ours, _ = smollm2_pair
    assert [s for s in STRINGS if smollm2.encode(s) != ours.encode(s)] == ["=\x04=", "-\x1d- +\x16+"]


@pytest.mark.full
def test_qwen_gives_the_ids_of_the_library_and_differs_from_gguf_by_normalisation(
    tmp_path: Path, qwen_files: TokenizerFiles
) -> None:
    assert qwen_files.vocabulary is not None
    pair = load(tmp_path, huggingface_json(qwen_files.vocabulary))
    assert_same_ids(pair)
    from_gguf = load_tokenizer(qwen_files)
    differing = [string for string in STRINGS if from_gguf.encode(string) != pair[0].encode(string)]
    assert differing
    for string in STRINGS:
        assert from_gguf.encode(unicodedata.normalize("NFC", string)) == pair[0].encode(string)


@given(data=st.data(), skip=st.booleans())
def test_byte_level_decodes_as_the_library_does(smollm2_pair: Pair, data: st.DataObject, skip: bool) -> None:
    ours, library = smollm2_pair
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 3) | st.integers(0, 20) | st.integers(17, 260)))
    assert ours.decode(ids, skip_special_tokens=skip) == library.decode(ids, skip_special_tokens=skip)


@given(data=st.data(), skip=st.booleans())
def test_sentencepiece_decodes_as_the_library_does(sentencepiece_pair: Pair, data: st.DataObject, skip: bool) -> None:
    """But for bytes that are not UTF-8, of which the library makes one U+FFFD each, in whole runs of byte tokens."""
    ours, library = sentencepiece_pair
    plain = st.integers(0, ours.vocab_size + 3).filter(lambda i: not 0x80 <= i - 3 < 256)
    characters = st.sampled_from([[3 + byte for byte in c.encode()] for c in "é漢😀\n "])
    pieces = data.draw(st.lists(plain.map(lambda i: [i]) | characters))
    ids = [token_id for piece in pieces for token_id in piece]
    if not isinstance(library.decoder, tokenizers.decoders.Metaspace):
        assert ours.decode(ids, skip_special_tokens=skip) == library.decode(ids, skip_special_tokens=skip)
    else:
        ids = [i for i in ids if not 3 <= i < 259]  # This decoder has no bytes.
        assert ours.decode(ids, skip_special_tokens=skip) == library.decode(ids, skip_special_tokens=skip)


def test_bos_of_the_post_processor_is_not_doubled_and_the_configuration_rules(tmp_path: Path) -> None:
    named = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    ours, _ = load(tmp_path, sentencepiece_json(), named)
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)
    a = ours.encode("a", add_special_tokens=False)
    assert ours.encode("a") == [1, *a]
    assert ours.encode("<s>a") == [1, *a]
    without, _ = load(tmp_path, sentencepiece_json(), named | {"add_bos_token": False})
    assert without.encode("a") == a
    no_processor = sentencepiece_json() | {"post_processor": None}
    wanting, _ = load(tmp_path, no_processor, named | {"add_bos_token": True})
    assert wanting.encode("a") == [1, *a]
    assert load(tmp_path, no_processor, named)[0].encode("a") == a


def test_added_tokens_of_the_configuration_are_added(tmp_path: Path) -> None:
    description = sentencepiece_json()
    size = len(description["model"]["vocab"])
    entry = {"content": "<new>", "special": True}
    ours, _ = load(tmp_path, description, {"added_tokens_decoder": {str(size): entry, "1": {"content": "<s>"}}})
    assert ours.encode("<new>", add_special_tokens=False) == [size]
    assert size in ours.special_token_ids
    assert ours.vocab_size == size + 1
    with pytest.raises(ModelFileError, match=r"tokenizer_config.json.*'<new>'.*id 7"):
        load(tmp_path, description, {"added_tokens_decoder": {"7": entry}})


def test_named_tokens_are_special_even_if_the_file_does_not_say_so(tmp_path: Path) -> None:
    description = sentencepiece_json()
    description["added_tokens"][2]["special"] = False
    assert 2 not in load(tmp_path, description)[0].special_token_ids
    assert 2 in load(tmp_path, description, {"eos_token": "</s>"})[0].special_token_ids
    assert load(tmp_path, description, {"eos_token": "<none>"})[0].eos_token_id is None


def test_special_tokens_that_swallow_white_space(tmp_path: Path) -> None:
    description = huggingface_json(small_gguf_vocabulary(pre="smollm"))
    size = len(description["model"]["vocab"]) + 1
    description["added_tokens"].append(added_token(size, "<m>", special=True, lstrip=True, rstrip=True))
    description["model"]["vocab"]["<m>"] = size
    ours, library = load(tmp_path, description)
    for text in ("a <m> b", "<m>", "\n<m>\t<m> <s>", " <s> <m>"):
        assert ours.encode(text) == library.encode(text).ids == ours.encode_rendered(text, marker="\ufdd0")


def test_truncation_and_padding_of_the_file_are_not_for_us(tmp_path: Path) -> None:
    description = sentencepiece_json()
    description["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    ours, _ = load(tmp_path, description)
    assert len(ours.encode("abcd" * 10)) > 40


def test_files_that_are_not_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": 3}')
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        load_tokenizer(TokenizerFiles(tokenizer_json=path))
    with pytest.raises(ModelFileError, match=r"no tokenizer\.json"):
        load_tokenizer(TokenizerFiles())
    description = sentencepiece_json() | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
    with pytest.raises(UnsupportedError, match=r"WordPiece.*supported are ByteLevel"):
        load(tmp_path, description)
