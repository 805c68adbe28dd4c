"""Tokenizers over the `tokenizers` library, and how one is read from a `tokenizer.json`.

Built by `noria.text.tokenizer.load_tokenizer`; `noria.text.gguf_vocabulary` builds the same class from a GGUF
vocabulary. The library does normalising, pre-tokenizing and merging; text from ids is ours (`noria.text.detokenizer`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers

from noria.errors import ModelFileError
from noria.files.fields import Fields, short
from noria.files.model import TokenizerFiles
from noria.text.any_of import any_of
from noria.text.chat_template import ChatTemplate
from noria.text.spelling import Spelling, spelling_from_decoder
from noria.text.tokenizer import Tokenizer, well_formed

LONG_TEXT = 4096
"""From so many characters on, a text is worth another way into the library (`share_interpreter`)."""

COMPOSED_SHRINKS = 4
"""The normal form NFC never makes a text shorter than one in so many of its bytes (U+1FBE U+0308 U+0301: 7 to 2)."""

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


_shares_interpreter = False


def share_interpreter() -> None:
    """From here on other threads run while a long text is encoded. For a server, whose event loop must go on.

    The library lets go of the interpreter's lock for batches only, and would start threads for them: this process
    is told not to want those.
    """
    global _shares_interpreter
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _shares_interpreter = True


def _encode(view: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    if _shares_interpreter and len(text) > LONG_TEXT:
        [encoding] = view.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoding.ids
    return view.encode(text, add_special_tokens=add_special_tokens).ids


class LibraryTokenizer(Tokenizer):
    """Two or three views of one vocabulary, because how the library treats special tokens is a setting of an object.

    Changing that setting between calls would not be safe with threads. The views share the model, so that a
    further one costs next to nothing, and nothing is changed once they are built. Only single texts are encoded:
    the library then uses no threads of its own, and has nothing to warn about when the process forks.
    """

    def __init__(
        self,
        parsing: tokenizers.Tokenizer,
        plain: tokenizers.Tokenizer,
        *,
        spelling: Spelling,
        bos_token_id: int | None,
        eos_token_id: int | None,
        wants_bos: bool,
        chat_template: ChatTemplate | None = None,
        literal_bytes: Mapping[int, bytes] | None = None,
    ) -> None:
        """`parsing` finds special tokens in text, `plain` takes them for text.

        `literal_bytes`: what the tokens stand for that `spelling` does not apply to.
        """
        self._parsing = parsing
        self._plain = plain
        self._continuing = _without_first_prefix(plain)
        self._spelling = spelling
        self._bytes: dict[int, bytes] = dict(literal_bytes or {})
        self._literal_ids = frozenset(self._bytes)
        added = parsing.get_added_tokens_decoder()
        special = {token_id: token for token_id, token in sorted(added.items()) if token.special}
        self.special_token_ids = tuple(special)
        self.special_token_texts = tuple(token.content for token in special.values())
        self._special_id = dict(zip(self.special_token_texts, self.special_token_ids, strict=True))
        self._special_pattern = _special_pattern(list(special.values()))
        self.vocab_size = max(parsing.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added), 1)
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.chat_template = chat_template
        self._processor_adds_bos = bos_token_id is not None and parsing.encode("a", add_special_tokens=True).ids[
            :1
        ] == [bos_token_id]
        self._wants_bos = wants_bos

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        view = self._parsing if parse_special else self._plain
        ids = _encode(view, well_formed(text), add_special_tokens=add_special_tokens)
        if add_special_tokens:
            if self._processor_adds_bos:
                del ids[0]
            self._ensure_bos(ids)
        return ids

    def encode_rendered(self, text: str, *, marker: str, add_special_tokens: bool = True) -> list[int]:
        text = well_formed(text)
        ids: list[int] = []
        position = 0
        for match in self._special_pattern.finditer(text):
            ids += self._encode_piece(text[position : match.start()].replace(marker, ""), opening=position == 0)
            spelled = match.group()
            ids.append(self._special_id[spelled if spelled in self._special_id else spelled.strip()])
            position = match.end()
        ids += self._encode_piece(text[position:].replace(marker, ""), opening=position == 0)
        if add_special_tokens:
            self._ensure_bos(ids)
        return ids

    def least_num_tokens(self, text: str) -> int:
        if self._size_rule is None:
            return 0
        max_bytes, uncounted = self._size_rule
        return -(-len(well_formed(text).encode().translate(None, uncounted)) // max_bytes)

    @cached_property
    def _size_rule(self) -> tuple[int, bytes] | None:
        """The most bytes of a text that one token stands for, and bytes that may need no token. At first use, since it
        looks at the whole vocabulary.

        None where a token can stand for ever so much text: unknown characters, special tokens that swallow the white
        space beside them, text that is normalised away.
        """
        vocabulary = self._parsing.get_vocab()
        uncounted = self._spelling.unspelled_bytes(vocabulary)
        shrinks = _shrinkage(self._parsing)
        added = self._parsing.get_added_tokens_decoder().values()
        if uncounted is None or shrinks is None or any(token.lstrip or token.rstrip for token in added):
            return None
        longest = 1
        for token in sorted(vocabulary, key=len, reverse=True):
            if len(token) * 4 <= longest:  # no character has more than four bytes
                break
            longest = max(longest, len(self._spelling.bytes_of(token)))
        return longest * shrinks, uncounted

    def token_bytes(self, token_id: int) -> bytes:
        data = self._bytes.get(token_id)
        if data is None:
            token = self.id_to_token(token_id)
            if token is None:
                return b""
            data = self._bytes[token_id] = self._spelling.bytes_of(token)
        return data

    def opening_bytes(self, token_id: int) -> bytes:
        token = self.id_to_token(token_id)
        if token is None or token in self._special_id or token_id in self._literal_ids:
            return self.token_bytes(token_id)
        return self._spelling.opening_bytes_of(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self._parsing.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def _ensure_bos(self, ids: list[int]) -> None:
        if self._wants_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)

    def _encode_piece(self, text: str, *, opening: bool) -> list[int]:
        """Ordinary text between special tokens; `opening`: at the very beginning."""
        if not text:
            return []
        view = self._plain if opening else self._continuing
        return _encode(view, text, add_special_tokens=False)


def tokenizer_from_json(files: TokenizerFiles) -> LibraryTokenizer:
    """From `tokenizer.json`, with what `tokenizer_config.json` adds: named tokens, added tokens, the wish for a BOS.

    Raises `ModelFileError` if the file is missing or not one, `UnsupportedError` for decoders that we do not have.
    """
    path = files.tokenizer_json
    if path is None:
        raise ModelFileError("the model has no tokenizer.json; Noria needs one beside config.json")
    parsing = _open(path)
    config = files.tokenizer_config
    config_source = str(path.parent / "tokenizer_config.json")
    named = _named_tokens(config, config_source)
    _add_configured_tokens(parsing, config, named, source=config_source)
    bos, eos = (parsing.token_to_id(named[name]) if name in named else None for name in ("bos_token", "eos_token"))
    configured = config.get("add_bos_token")
    return LibraryTokenizer(
        parsing,
        plain_view(parsing),
        spelling=spelling_from_decoder(_description(parsing.decoder), source=str(path)),
        bos_token_id=bos,
        eos_token_id=eos,
        wants_bos=configured if isinstance(configured, bool) else _begins_with(parsing, bos),
        chat_template=None if files.chat_template is None else ChatTemplate(files.chat_template, special_tokens=named),
    )


def _open(path: Path) -> tokenizers.Tokenizer:
    try:
        parsing = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        parsing.no_truncation()
        parsing.no_padding()
        parsing.encode("a", add_special_tokens=True)  # a post-processor that lacks a token shows only here
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # The library raises bare Exception, and its panics are not even that.
        raise ModelFileError(f"{path}: cannot be read as a tokenizer: {str(error)[:200]}") from error
    return parsing


def view_of(origin: tokenizers.Tokenizer, *, pre_tokenizer: Any = None) -> tokenizers.Tokenizer:
    """Another tokenizer over the same model, without added tokens."""
    view = tokenizers.Tokenizer(origin.model)
    # The library's setters take no None.
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        value = getattr(origin, part)
        if part == "pre_tokenizer" and pre_tokenizer is not None:
            value = pre_tokenizer
        if value is not None:
            setattr(view, part, value)
    return view


def plain_view(origin: tokenizers.Tokenizer, *, pre_tokenizer: Any = None) -> tokenizers.Tokenizer:
    """A view that takes spellings of special tokens for ordinary text; other added tokens are found as before."""
    view = view_of(origin, pre_tokenizer=pre_tokenizer)
    add_tokens(view, [token for _, token in sorted(origin.get_added_tokens_decoder().items())])
    view.encode_special_tokens = True
    return view


def add_tokens(view: tokenizers.Tokenizer, added: list[tokenizers.AddedToken]) -> None:
    """Add in the given order, which decides the ids of tokens that the model itself lacks."""
    for special, group in groupby(added, key=lambda token: bool(token.special)):
        if special:
            view.add_special_tokens(list(group))
        else:
            view.add_tokens(list(group))


def _without_first_prefix(view: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """`view` for text that continues: where a space is put before the first piece of a text only, without it."""
    description = _description(view.pre_tokenizer)
    if description is None or not _drop_first_prefix(description):
        return view
    empty_model = {"type": "BPE", "vocab": {}, "merges": []}
    shell = tokenizers.Tokenizer.from_str(json.dumps({"model": empty_model, "pre_tokenizer": description}))
    continuing = plain_view(view, pre_tokenizer=shell.pre_tokenizer)
    continuing.encode_special_tokens = view.encode_special_tokens
    return continuing


def _shrinkage(view: tokenizers.Tokenizer) -> int | None:
    """How many times shorter, in bytes, a text can be before its pieces are looked up; None if that is not known."""
    shrinks = 1
    for part in _parts(view.normalizer, "normalizers"):
        if part["type"] == "NFC":
            shrinks *= COMPOSED_SHRINKS
        elif part["type"] == "Replace" and "String" in part["pattern"]:
            if len(part["content"].encode()) < len(part["pattern"]["String"].encode()):
                return None
        elif part["type"] != "Prepend":
            return None
    for part in _parts(view.pre_tokenizer, "pretokenizers"):
        if part["type"] not in ("ByteLevel", "Digits", "Metaspace", "Split") or part.get("behavior") == "Removed":
            return None
    return shrinks


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """The description of each part of a normalizer or pre-tokenizer, which may be a sequence of them."""
    description = _description(component)
    return [] if description is None else list(description.get(name, [description]))


def _description(component: Any) -> dict[str, Any] | None:
    """What a `tokenizer.json` would say of a part of a tokenizer, whole and well-formed; None if there is none."""
    description: dict[str, Any] | None = None if component is None else json.loads(component.__getstate__())
    return description


def _drop_first_prefix(description: dict[str, Any]) -> bool:
    """Change a pre-tokenizer's description in place; true if there was something to change."""
    changed = False
    for part in description.get("pretokenizers", [description]):
        if part.get("prepend_scheme") == "first":
            part["prepend_scheme"] = "never"
            changed = True
    return changed


def _special_pattern(special: list[tokenizers.AddedToken]) -> re.Pattern[str]:
    """Matches special tokens as the library does: leftmost, then longest, with the white space that they swallow."""
    if not any(token.lstrip or token.rstrip or token.single_word for token in special):
        return re.compile(any_of(token.content for token in special))
    alternatives = []
    for token in sorted(special, key=lambda token: len(token.content), reverse=True):
        if token.content:
            core = re.escape(token.content)
            core = rf"(?<!\w){core}(?!\w)" if token.single_word else core
            alternatives.append((r"\s*" if token.lstrip else "") + core + (r"\s*" if token.rstrip else ""))
    return re.compile("|".join(alternatives) or r"(?!)")


def _named_tokens(config: Mapping[str, Any], source: str) -> dict[str, str]:
    """{"bos_token": "<s>", ...} from `tokenizer_config.json`, where each is a string or an object."""
    fields = Fields(config, source)
    named: dict[str, str] = {}
    for name in NAMED_TOKENS:
        value = fields.get(name)
        if isinstance(value, dict) and (section := fields.section(name)) is not None:
            content = section.optional_text("content")
        else:
            content = fields.text(name) if isinstance(value, str) else None
        if content is not None:
            named[name] = content
    return named


def _add_configured_tokens(
    parsing: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str], *, source: str
) -> None:
    known = {token.content for token in parsing.get_added_tokens_decoder().values()}
    missing = [(token_id, token) for token_id, token in _declared_tokens(config, source) if token.content not in known]
    add_tokens(parsing, [token for _, token in missing])
    for token_id, token in missing:
        if parsing.token_to_id(token.content) != token_id:
            raise ModelFileError(
                f"{source}: added token {short(token.content)} should have id {token_id}, "
                f"but tokenizer.json gives it {parsing.token_to_id(token.content)}"
            )
    special = {token.content for token in parsing.get_added_tokens_decoder().values() if token.special}
    for content in named.values():
        if content not in special and parsing.token_to_id(content) is not None:
            parsing.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False)])


def _declared_tokens(config: Mapping[str, Any], source: str) -> list[tuple[int, tokenizers.AddedToken]]:
    """`added_tokens_decoder` of a `tokenizer_config.json`, by id."""
    section = Fields(config, source).section("added_tokens_decoder")
    declared: list[tuple[int, tokenizers.AddedToken]] = []
    if section is None:
        return declared
    for key in section.values:
        entry = section.section(key)
        if entry is None or not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise ModelFileError(f"{section.source}: {short(key)} should be a token id, with an object")
        flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
        declared.append((int(key), tokenizers.AddedToken(entry.text("content"), **flags)))
    return sorted(declared, key=lambda item: item[0])


def _begins_with(view: tokenizers.Tokenizer, token_id: int | None) -> bool:
    return token_id is not None and view.encode("a", add_special_tokens=True).ids[:1] == [token_id]
