"""What travels between a client and the engine. Tokens only; text stays on the client's side."""

from __future__ import annotations

import msgspec

from noria.kv.prefix import PrefixKey
from noria.sampling import SamplingParams


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. `request_id` is internal and unique, made by the client object, never by a user."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    index: int = 0
    """Which of the `n` sequences of its request this is: 0 .. n - 1."""
    parent_id: str | None = None
    """The first of them, if this is another: they share a prompt."""
    priority: int = 0
    """Smaller is more urgent, under the policy `priority`."""
    prefix_key: PrefixKey = PrefixKey()
