"""Names for KV content: a prefix key of typed parts, and the chain of block hashes that grows from it.

A block's hash stands for everything that its KV depends on: the key's parts and all tokens up to and including
the block's own. Chained SHA-256, so equal hashes mean equal content and nothing else is compared. Called by
`noria.core`; knows nothing about blocks in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

import msgspec


class PrefixKey(msgspec.Struct, frozen=True):
    """What besides tokens decides the content of KV. Requests with different keys never share a block."""

    weights_version: str = ""
    adapter: str | None = None
    tenant: str | None = None
    """From the authenticated caller, never from a free field of the request alone."""
    salt: str | None = None

    def root(self) -> bytes:
        """The hash that the first block's chain starts from. Each part is typed and delimited by msgpack."""
        return sha256(msgspec.msgpack.encode(msgspec.to_builtins(self))).digest()


def extend_block_hashes(hashes: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Appends to `hashes` the hash of every full block of `token_ids` that it lacks yet (in place)."""
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = sha256(parent + array("q", token_ids[start : start + block_size]).tobytes()).digest()
        hashes.append(parent)
