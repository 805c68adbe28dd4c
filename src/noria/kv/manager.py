"""Which KV blocks each request has, and whether another may have some: prefix match, admit, extend, release.

Called by `noria.core.scheduler`. Speaks of requests by id and of tokens by number; it does not decide who runs
or who is preempted. One group of layers (full attention) for now.

Three facts keep it live and truthful:

- A request is admitted only when what remains of its *whole known sequence* fits beside what the unfinished
  prefills already admitted still need (`num_owed_blocks`), so a first chunk never starts what cannot go on.
- A block is registered when its KV has been executed (`register_computed`), never when it was planned.
- Between the two, the block is *claimed*: `computing(hash)` names the request that is computing it, so that equal
  prompts which arrive together wait for the first one's work and do not repeat it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from noria.kv.block_pool import BlockPool


@dataclass(slots=True)
class _Holding:
    """One admitted request's blocks. `hashes` is the request's own list, which grows with its tokens."""

    block_ids: list[int]
    hashes: list[bytes]
    num_registered: int
    """Leading blocks whose content was offered to the index already."""
    num_claimed: int
    """Blocks num_registered .. num_claimed are claimed (or were found claimed by somebody else)."""
    num_owed: int
    """Blocks that the rest of the sequence known at admission will still take."""


@dataclass(slots=True, frozen=True)
class PrefixMatch:
    """Leading blocks of a sequence that are in the pool already, and what admission would therefore cost."""

    block_ids: list[int] = field(default_factory=list)
    num_idle: int = 0
    """How many of them nobody holds: taking those uses up free blocks like any other."""


class KVManager:
    """Block tables of all admitted requests over one pool. Sizes are in blocks, lengths in tokens."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_owed_blocks = 0
        self._holdings: dict[str, _Holding] = {}
        self._claims: dict[bytes, str] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_ids(self, request_id: str) -> tuple[int, ...]:
        return tuple(self._holdings[request_id].block_ids)

    def match(self, hashes: list[bytes], num_tokens: int) -> PrefixMatch:
        """The longest run of leading full blocks that can be shared by a sequence of `num_tokens` tokens.

        At most all but the last token: that one must be computed, for its logits. So a fully cached prompt of whole
        blocks recomputes its last block, into a block of its own.
        """
        block_ids: list[int] = []
        if self.enable_prefix_caching:
            for block_hash in hashes[: self._max_shared(num_tokens)]:
                block_id = self.pool.find(block_hash)
                if block_id is None:
                    break
                block_ids.append(block_id)
        return PrefixMatch(block_ids, sum(self.pool.num_references(b) == 0 for b in block_ids))

    def computing(self, hashes: list[bytes], match: PrefixMatch, num_tokens: int) -> str | None:
        """The running request that is computing the block after `match`, which would lengthen it."""
        position = len(match.block_ids)
        if not self.enable_prefix_caching or position >= min(len(hashes), self._max_shared(num_tokens)):
            return None
        return self._claims.get(hashes[position])

    def can_admit(self, match: PrefixMatch, num_tokens: int) -> bool:
        """Whether the whole sequence of `num_tokens` fits beside what admitted prefills are still owed."""
        num_needed = self.num_blocks_for(num_tokens) - len(match.block_ids) + match.num_idle
        return num_needed + self.num_owed_blocks <= self.pool.num_free_blocks

    def admit(
        self, request_id: str, hashes: list[bytes], match: PrefixMatch, *, num_tokens: int, num_planned: int
    ) -> None:
        """Gives a request the matched blocks and new ones for its first `num_planned` tokens (matched ones included);
        the rest up to `num_tokens` is owed. `can_admit` was true."""
        assert request_id not in self._holdings
        num_now = self.num_blocks_for(num_planned)
        self.pool.share(match.block_ids)  # before anything is taken, so that no match is evicted
        block_ids = match.block_ids + self.pool.take(num_now - len(match.block_ids))
        num_owed = self.num_blocks_for(num_tokens) - num_now
        num_claimed = num_tokens // self.block_size if self.enable_prefix_caching else 0
        holding = _Holding(block_ids, hashes, len(match.block_ids), num_claimed, num_owed)
        self._holdings[request_id] = holding
        self.num_owed_blocks += num_owed
        for block_hash in hashes[holding.num_registered : num_claimed]:
            self._claims.setdefault(block_hash, request_id)

    def extend(self, request_id: str, num_planned: int) -> tuple[int, ...] | None:
        """Takes what the request's first `num_planned` tokens lack: the new blocks, or None if too few are free."""
        holding = self._holdings[request_id]
        num_new = self.num_blocks_for(num_planned) - len(holding.block_ids)
        if num_new <= 0:
            return ()
        if num_new > self.pool.num_free_blocks:
            return None
        block_ids = self.pool.take(num_new)
        holding.block_ids += block_ids
        num_paid = min(num_new, holding.num_owed)
        holding.num_owed -= num_paid
        self.num_owed_blocks -= num_paid
        return tuple(block_ids)

    def register_computed(self, request_id: str, num_computed: int) -> None:
        """Makes every full block among the first `num_computed` tokens findable: their KV has been executed.

        The request's hashes reach that far. Claims on them end.
        """
        if not self.enable_prefix_caching:
            return
        holding = self._holdings[request_id]
        num_full = num_computed // self.block_size
        for position in range(holding.num_registered, num_full):
            self.pool.register(holding.block_ids[position], holding.hashes[position])
            self._end_claim(request_id, holding.hashes[position])
        holding.num_registered = max(holding.num_registered, num_full)

    def release(self, request_id: str) -> None:
        """Takes everything back, last block first. The only way in which a request loses its blocks."""
        holding = self._holdings.pop(request_id)
        self.pool.release(reversed(holding.block_ids))
        self.num_owed_blocks -= holding.num_owed
        for block_hash in holding.hashes[holding.num_registered : holding.num_claimed]:
            self._end_claim(request_id, block_hash)

    def reset_prefix_cache(self) -> None:
        """Makes all content unfindable, that of running requests included."""
        self.pool.forget_all()

    def _max_shared(self, num_tokens: int) -> int:
        return (num_tokens - 1) // self.block_size

    def _end_claim(self, request_id: str, block_hash: bytes) -> None:
        if self._claims.get(block_hash) == request_id:
            del self._claims[block_hash]

    def check(self) -> None:
        """Asserts that blocks, promises and claims add up."""
        self.pool.check(h.block_ids for h in self._holdings.values())
        assert self.num_owed_blocks == sum(h.num_owed for h in self._holdings.values())
        assert all(h.num_owed >= 0 for h in self._holdings.values())
        for block_hash, request_id in self._claims.items():
            holding = self._holdings[request_id]
            assert block_hash in holding.hashes[holding.num_registered : holding.num_claimed], "a claim nobody works on"
