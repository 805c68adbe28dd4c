"""What the rest of Noria knows about tokenizers: the abstract `Tokenizer` and `load_tokenizer`.

Used by the front ends (prompts in, text out), by `noria.text.stream` and by `noria.text.chat`. The real one is
`noria.text.library.LibraryTokenizer`; `noria.fakes.ByteTokenizer` needs no files. Tokens are turned into text as
bytes: a token stands for bytes, the bytes of all tokens together are UTF-8, and what is not UTF-8 becomes U+FFFD.
Incremental text is the business of `noria.text.detokenizer`; stop strings are not handled here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from noria.errors import ContextLengthError
from noria.files.model import TokenizerFiles
from noria.text.chat_template import ChatTemplate
from noria.text.detokenizer import Detokenizer


class Tokenizer(ABC):
    """Text to token ids and back. Immutable once built, so threads may share it.

    Ids run from 0 to `vocab_size - 1`. A model's embedding is often padded beyond that: any other id, negative
    ones included, is no token, stands for no bytes and decodes to nothing.
    """

    vocab_size: int
    """One more than the highest id."""
    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: ChatTemplate | None
    special_token_ids: tuple[int, ...]
    """Ascending. Tokens of structure, not of text: hidden by `skip_special_tokens`, never made of chat content."""
    special_token_texts: tuple[str, ...]
    """The spellings of those tokens, in the order of `special_token_ids`; for finding look-alikes in text."""

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens`: let the model have the BOS it wants (at most one: none is added to a text that begins
        with it) and whatever else its own tokenizer puts around a text. `parse_special`: spellings of special
        tokens in the text become those tokens; otherwise they are ordinary text. Lone surrogates, which are not
        text, are read as U+FFFD.
        """

    @abstractmethod
    def encode_rendered(self, text: str, *, marker: str, add_special_tokens: bool = True) -> list[int]:
        """Like `encode` with `parse_special`, for a text in which the character `marker` breaks up look-alikes.

        Special tokens are found with the marker in place, then it is taken out of the text between them, which is
        encoded as ordinary text. So what the marker has broken is tokenized as if the marker had never been there,
        but never as a special token. `noria.text.chat` puts the markers.
        """

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token stands for within a text; a special token's are its spelling."""

    def opening_bytes(self, token_id: int) -> bytes:
        """The bytes of a token that opens a text; differs where the tokenizer puts a space before every text."""
        return self.token_bytes(token_id)

    @abstractmethod
    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it ("Ġthe"), or None if the id is no token."""

    def least_num_tokens(self, text: str) -> int:
        """A number of tokens that `text` certainly has, told from its size alone: what is far too long need not be
        encoded. 0 where the size tells nothing."""
        return 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()


def load_tokenizer(files: TokenizerFiles) -> Tokenizer:
    """Build the tokenizer of a model. Raises `ModelFileError` and `UnsupportedError`."""
    # Imported here because the implementations subclass what this module defines.
    from noria.text.gguf_vocabulary import tokenizer_from_gguf
    from noria.text.library import tokenizer_from_json

    if files.vocabulary is not None:
        return tokenizer_from_gguf(files.vocabulary, chat_template=files.chat_template)
    return tokenizer_from_json(files)


def check_size(text: str, tokenizer: Tokenizer, max_num_tokens: int, *, param: str) -> None:
    """Raises `ContextLengthError` for a text that must have more than `max_num_tokens`, without encoding it."""
    least = tokenizer.least_num_tokens(text) if len(text) > max_num_tokens // 4 else 0
    if least > max_num_tokens:
        raise ContextLengthError(
            f"the prompt has {len(text)} characters, at least {least} tokens, but this model's maximum context length "
            f"is {max_num_tokens} tokens: shorten it by {least - max_num_tokens} tokens or more",
            param=param,
        )


def well_formed(text: str) -> str:
    """`text` with lone surrogates (JSON can bring them) as U+FFFD: they are not text and have no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
