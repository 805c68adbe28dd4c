"""The block pool against a naive model, over random histories."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from noria.kv.block_pool import BlockPool

NUM_BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """The model: who holds what, each block's content, and the order of reuse as plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.blank = list(range(1, NUM_BLOCKS + 1))
        self.idle: list[int] = []
        self.num_contents = 0

    @property
    def free(self) -> list[int]:
        return self.blank + self.idle

    @rule(num_blocks=st.integers(0, NUM_BLOCKS))
    def take(self, num_blocks: int) -> None:
        if num_blocks > len(self.free):
            return
        expected = self.free[:num_blocks]
        assert self.pool.take(num_blocks) == expected
        for block_id in expected:
            (self.blank if block_id in self.blank else self.idle).remove(block_id)
            self.content.pop(block_id, None)
        self.tables.append(expected)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        blocks = [b for b in table if b not in self.content]
        if not blocks:
            return
        block_id = data.draw(st.sampled_from(blocks))
        old = sorted(self.content.values())
        if old and data.draw(st.booleans()):
            content = data.draw(st.sampled_from(old))
            kept = self.pool.find(content)
            assert kept is not None
            assert not self.pool.register(block_id, content)
            if kept in self.idle:  # then the held one keeps it, else nothing changes
                self.idle.remove(kept)
                self.blank.insert(0, kept)
                self.content[block_id] = self.content.pop(kept)
            return
        self.num_contents += 1
        self.content[block_id] = b"content %d" % self.num_contents
        self.pool.register(block_id, self.content[block_id])

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.content)), unique=True))
        assert [self.pool.find(self.content[b]) for b in blocks] == blocks
        self.pool.share(blocks)
        for block_id in blocks:
            if block_id in self.idle:
                self.idle.remove(block_id)
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(reversed(table))
        for block_id in reversed(table):
            if not any(block_id in other for other in self.tables):
                if block_id in self.content:
                    self.idle.append(block_id)
                else:
                    self.blank.insert(0, block_id)

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.content.clear()
        # Idle blocks keep their places in the order of reuse, behind the blank ones.
        self.blank += self.idle
        self.idle = []

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.num_free_blocks == len(self.free)
        assert self.pool.num_idle_blocks == len(self.idle)
        for block_id in range(1, NUM_BLOCKS + 1):
            assert self.pool.num_references(block_id) == sum(block_id in table for table in self.tables)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_the_check_sees_a_leaked_reference():
    pool = BlockPool(4)
    table = pool.take(2)
    pool.check([table])
    with pytest.raises(AssertionError, match="references differ"):
        pool.check([])


def test_a_block_keeps_its_content_until_it_is_reused():
    pool = BlockPool(2)
    [block_id] = pool.take(1)
    pool.register(block_id, b"x")
    pool.release([block_id])
    assert pool.find(b"x") == block_id
    assert pool.take(1) != [block_id], "blank blocks are used first"
    assert pool.take(1) == [block_id]
    assert pool.find(b"x") is None


def test_content_that_is_computed_again_lives_as_long_as_its_latest_block():
    pool = BlockPool(3)
    [old] = pool.take(1)
    pool.register(old, b"x")
    pool.release([old])
    [new] = pool.take(1)
    assert not pool.register(new, b"x"), "it was there"
    assert (pool.find(b"x"), pool.num_idle_blocks, pool.num_free_blocks) == (new, 0, 2)
    assert old in pool.take(1), "the old block is blank"
    pool.release([new])
    pool.take(1)
    assert pool.find(b"x") == new, "blank blocks are used first"
