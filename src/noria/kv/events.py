"""What happens to findable KV content, for those outside who keep a picture of it (a router, a shared cache).

`KVManager.subscribe` names a function that gets one batch of events per step, in the order in which they happened.
A block is stored when its content becomes findable, and removed when it stops being so.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class BlockStored(msgspec.Struct, frozen=True, tag="stored"):
    """A block of tokens can be found under its hash, which stands for everything before it as well."""

    block_hash: bytes
    parent_hash: bytes | None
    """None for the first block of a sequence."""
    token_ids: tuple[int, ...]
    group: int = 0
    """Of layers. In a model with sliding windows each group keeps its own block of the same tokens, or none."""


class BlockRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """A block was reused: its content is gone."""

    block_hash: bytes
    group: int = 0


class AllCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """Nothing that was stored before can be found any more."""


KVEvent = BlockStored | BlockRemoved | AllCleared
Subscriber = Callable[[tuple[KVEvent, ...]], None]
