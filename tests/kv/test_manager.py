"""The KV manager's promises, one by one."""

import pytest

from noria.kv.manager import KVManager
from noria.kv.prefix import PrefixKey, extend_block_hashes

BLOCK_SIZE = 4


def hashes_of(num_tokens: int, start: int = 0) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, PrefixKey().root(), range(start, start + num_tokens), BLOCK_SIZE)
    return hashes


def admit(kv: KVManager, request_id: str, num_tokens: int, num_planned: int, start: int = 0) -> None:
    hashes = hashes_of(num_tokens, start)
    match = kv.match(hashes, num_tokens)
    assert kv.num_spare_blocks(match, num_tokens) >= 0
    assert kv.admit(request_id, hashes, match, num_tokens=num_tokens, num_planned=num_planned)
    kv.check()


def test_what_an_admitted_prefill_is_owed_counts_as_taken():
    kv = KVManager(10, BLOCK_SIZE)
    admit(kv, "a", num_tokens=28, num_planned=12)  # holds 3 blocks and is owed 4
    assert kv.num_owed_blocks == 4
    assert kv.pool.num_free_blocks == 7
    other = hashes_of(16, start=1000)
    assert kv.num_spare_blocks(kv.match(other, 16), 16) == -1, "7 are free, but 4 of them are a's"
    assert kv.num_spare_blocks(kv.match(other, 12), 12) == 0
    assert kv.extend("a", 24) is not None
    assert kv.num_owed_blocks == 1
    kv.release("a")
    assert kv.num_owed_blocks == 0
    kv.check()


def test_growth_beyond_the_known_sequence_is_not_paid_from_what_is_owed():
    kv = KVManager(10, BLOCK_SIZE)
    admit(kv, "a", num_tokens=8, num_planned=8)
    assert kv.extend("a", 9) is not None
    assert kv.num_owed_blocks == 0
    kv.check()


def test_idle_hits_cost_free_blocks_and_held_ones_do_not():
    kv = KVManager(4, BLOCK_SIZE)
    admit(kv, "a", num_tokens=9, num_planned=9)
    kv.register_computed("a", 9, range(9))
    held = kv.match(hashes_of(9), 9)
    assert len(held.block_ids) == 2
    assert kv.num_spare_blocks(held, 9) == 0, "two shared, one new, and one is free"
    kv.release("a")
    idle = kv.match(hashes_of(13), 13)
    assert len(idle.block_ids) == 2
    assert kv.num_spare_blocks(idle, 16) == 0
    assert kv.num_spare_blocks(idle, 17) < 0


def test_only_whole_executed_blocks_are_found():
    kv = KVManager(10, BLOCK_SIZE)
    admit(kv, "a", num_tokens=20, num_planned=14)
    assert kv.match(hashes_of(20), 20).block_ids == [], "planned is not computed"
    kv.register_computed("a", 14, range(14))
    kv.check()
    kv.release("a")
    assert len(kv.match(hashes_of(20), 20).block_ids) == 3, "the fourth block holds two of its four tokens"


def test_the_claim_on_a_block_names_who_computes_it_until_it_is_done():
    kv = KVManager(10, BLOCK_SIZE)
    admit(kv, "a", num_tokens=12, num_planned=8)
    hashes = hashes_of(12)

    def who(num_tokens: int) -> str | None:
        return kv.computing(hashes, kv.match(hashes, num_tokens), num_tokens)

    assert who(12) == "a"
    kv.register_computed("a", 8, range(8))
    assert who(9) is None, "all that 9 tokens could share is there"
    assert who(13) == "a", "the third block is still being computed"
    kv.release("a")
    assert who(13) is None
    kv.check()


def test_a_duplicate_block_stays_private():
    kv = KVManager(10, BLOCK_SIZE)
    admit(kv, "a", num_tokens=8, num_planned=8)
    admit(kv, "b", num_tokens=8, num_planned=8)
    kv.register_computed("a", 8, range(8))
    kv.register_computed("b", 8, range(8))
    kv.check()
    assert kv.match(hashes_of(9), 9).block_ids == list(kv.block_ids("a"))


def test_nothing_is_taken_when_too_little_is_free():
    kv = KVManager(3, BLOCK_SIZE)
    admit(kv, "a", num_tokens=4, num_planned=4)
    admit(kv, "b", num_tokens=8, num_planned=8, start=1000)
    assert kv.extend("a", 5) is None
    assert kv.extend("b", 7) == ()
    kv.check()


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 8, 11])
def test_hashes_grow_the_same_in_any_bunching(num_tokens):
    at_once = hashes_of(num_tokens)
    grown: list[bytes] = []
    for length in range(num_tokens + 1):
        extend_block_hashes(grown, PrefixKey().root(), range(length), BLOCK_SIZE)
    assert grown == at_once
    assert len(grown) == num_tokens // BLOCK_SIZE


def test_a_hash_depends_on_everything_before_it():
    assert hashes_of(8)[1] != hashes_of(8, start=4)[0]
    assert hashes_of(8)[0] == hashes_of(4)[0]


def test_a_subscriber_that_raises_is_told_nothing_more():
    kv, calls = KVManager(10, BLOCK_SIZE), []

    def away(events) -> None:
        calls.append(events)
        raise ConnectionError

    kv.subscribe(away)
    admit(kv, "a", num_tokens=8, num_planned=8)
    kv.register_computed("a", 4, range(8))
    kv.publish()
    kv.register_computed("a", 8, range(8))
    kv.publish()
    assert len(calls) == 1
    kv.check()
