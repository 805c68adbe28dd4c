"""Models with sliding windows: what is freed while a request runs, and what a request may hold at most."""

import pytest
from histories import assert_nothing_is_held, assert_said_as_alone, guess_rubbish
from worlds import World

from noria.config import SchedulerConfig
from noria.errors import ContextLengthError, OptionError
from noria.kv.groups import SlidingGroup
from noria.kv_layout import KVLayout, group_layers

PROMPT = list(range(50, 150))


def held(world: World, request_id: str) -> list[int]:
    """How many blocks a request holds in each group."""
    block_ids, num_groups = world.scheduler.kv.block_ids(request_id), len(world.config.kv_windows)
    return [sum(block_id > 0 for block_id in block_ids[group::num_groups]) for group in range(num_groups)]


def test_trap_7_windows_are_freed_by_what_has_been_executed_and_not_by_what_is_planned():
    """A plan is optimistic: its drafts may be rejected, and it may fail. Until it has been executed, its tokens still
    read what their windows reach back to from the first of them. (The scripted runner refuses a step that finds it
    gone.)"""
    world = World(num_blocks=64, kv_windows=(None, 8), drafter=guess_rubbish, max_num_batched_tokens=16)
    world.add("a", PROMPT[:30], max_tokens=20)
    while world.scheduler.has_unfinished:
        request = world.requests["a"]
        executed = request.num_computed
        plan = world.schedule()
        if "a" in world.scheduler.running:
            first_read = max(0, executed - 8 + 1) // 4
            in_window = world.scheduler.kv.block_ids("a")[1::2]
            assert all(in_window[first_read:]), "freed although this step reads it"
        world.update(plan)
    assert_said_as_alone(world)
    assert_nothing_is_held(world.scheduler)


@pytest.mark.parametrize("caching", [True, False])
def test_what_a_request_holds_in_a_window_stays_bounded_while_it_goes_on(caching):
    world = World(num_blocks=128, kv_windows=(None, 10), max_num_batched_tokens=16, enable_prefix_caching=caching)
    world.add("a", PROMPT, max_tokens=100)
    most = 0
    for _ in range(80):
        world.step()
        full, sliding = held(world, "a")
        assert full == -(-world.requests["a"].num_computed // 4)
        most = max(most, sliding)
    assert 4 <= held(world, "a")[1] <= 5, "a window of 10 tokens touches 4 blocks of 4"
    assert most <= world.config.kv_layout.most_blocks_of(10, 200)


@pytest.mark.parametrize("windows", [(None,), (None, 10), (7,), (None, 5, 5), (16, None, 3)])
@pytest.mark.parametrize("block_size", [1, 4])
def test_trap_13_admission_promises_and_sizing_count_with_one_formula(windows, block_size):
    """The longest sequence that the pool's size allows is accepted, admitted alone, and comes to its end without being
    preempted; one that is a token longer is refused at the door."""
    options = {"block_size": block_size, "kv_windows": windows, "max_num_batched_tokens": 6}
    layout = KVLayout(block_size, windows, 6)
    num_blocks = layout.most_blocks(60)
    longest = layout.longest(num_blocks, 1000)
    assert longest >= 60
    assert layout.most_blocks(longest) <= num_blocks
    if None in windows:
        assert layout.most_blocks(longest + 1) > num_blocks
        with pytest.raises(OptionError, match=f"lower it to {longest}"):
            SchedulerConfig(max_model_len=longest + 1, num_blocks=num_blocks, **options)
    for num_prompt in (longest - 1, 1):
        world = World(num_blocks=num_blocks, max_model_len=longest, **options)
        with pytest.raises(ContextLengthError):
            world.add("too long", num_prompt, max_tokens=longest - num_prompt + 1)
        world.add("a", num_prompt, max_tokens=longest - num_prompt)
        most = 0
        while world.scheduler.has_unfinished:
            plan = world.step()
            assert plan.num_tokens, "it stands still: there is less memory than was said"
            assert not plan.preemptions
            most = max(most, world.scheduler.records[-1].kv.num_held)
        assert most <= num_blocks
        assert_said_as_alone(world)


def test_what_was_promised_to_a_prompt_is_there_when_its_windows_move_on():
    """Newcomers are admitted beside the most that a prompt may come to hold, not beside what it holds."""
    world = World(num_blocks=40, kv_windows=(None, 8), max_num_batched_tokens=8, adaptive_watermark=False)
    for name in "abcd":
        world.add(name, 60, max_tokens=1)
    while world.scheduler.has_unfinished:
        assert not world.step().preemptions
    assert_said_as_alone(world)


def test_a_hit_needs_the_window_before_its_end_and_every_earlier_block_of_full_layers():
    world = World(num_blocks=64, kv_windows=(None, 8), max_num_batched_tokens=64)
    world.add("a", PROMPT[:42], max_tokens=8)
    world.run()
    world.add("same", PROMPT[:42], max_tokens=8)
    world.run()
    assert world.requests["same"].num_cached_tokens == 40
    assert world.outputs["same"] == world.outputs["a"]
    pool, hashes = world.scheduler.kv.pool, world.requests["a"].block_hashes
    match = world.scheduler.kv.match(hashes, 42)
    assert [block > 0 for block in match.block_ids[1::2]] == [False] * 8 + [True] * 2
    gone = pool.find(hashes[9] + b"\0\1")  # the last of the window: the rest needs one more in front of it
    assert gone is not None
    pool._forget(gone)
    assert world.scheduler.kv.match(hashes, 42).num_tokens == 36
    gone = pool.find(hashes[3])  # of the full group: everything behind it is lost
    assert gone is not None
    pool._forget(gone)
    assert world.scheduler.kv.match(hashes, 42).num_tokens == 12


def test_groups_shorten_each_others_hits_until_all_agree():
    world = World(num_blocks=128, kv_windows=(None, 8, 12), max_num_batched_tokens=64)
    world.add("a", PROMPT[:62], max_tokens=1)
    world.run()
    kv, hashes = world.scheduler.kv, world.requests["a"].block_hashes
    assert kv.match(hashes, 62).num_columns == 15
    for column, suffix in ((13, b"\0\1"), (11, b"\0\2"), (10, b"\0\1")):
        gone = kv.pool.find(hashes[column] + suffix)
        assert gone is not None
        kv.pool._forget(gone)
    # 15 lacks 13 of the first window (8 tokens: 2 columns), 13 lacks 11 of the second (12: 3), and 11 lacks 10 of the
    # first again.
    assert kv.match(hashes, 62).num_columns == 10


def test_what_nobody_is_likely_to_go_on_from_is_reused_first():
    world = World(num_blocks=120, kv_windows=(None, 8), max_num_batched_tokens=64)
    world.add("older", 40, max_tokens=4)
    world.run()
    world.add("long", PROMPT[:82], max_tokens=30)
    world.run()
    pool, kv = world.scheduler.kv.pool, world.scheduler.kv
    num_blank = pool.num_free_blocks - pool.num_idle_blocks
    pool.take(num_blank + 15)  # far less than what the windows of the long one left behind
    older = world.requests["older"]
    assert kv.match(older.block_hashes, 40).num_tokens == 36
    assert kv.match(world.requests["long"].block_hashes, 82).num_tokens == 80, "its prompt may well come again"
    assert kv.match(world.requests["long"].block_hashes, 42).num_tokens < 40, "a part of it less likely"


def test_a_prefix_that_was_asked_for_once_is_kept_the_second_time():
    """A system prompt: nothing says where it ends until a second request shares it."""
    world = World(num_blocks=400, kv_windows=(None, 8), max_num_batched_tokens=64)
    shared = PROMPT[:40]
    for name, first in (("a", 1000), ("b", 2000)):
        world.add(name, [*shared, *range(first, first + 50)], max_tokens=2)
        world.run()
    assert world.requests["b"].num_cached_tokens == 40
    kv = world.scheduler.kv
    pool = kv.pool
    pool.take(pool.num_free_blocks - pool.num_idle_blocks + len(pool._cold))  # all that is cold is reused
    world.scheduler.kv.check = lambda: None  # the test itself holds blocks now
    assert kv.match(world.requests["b"].block_hashes, 60).num_tokens == 40


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([None] * 5, ((None,), [0] * 5, list(range(5)), 5)),
        ([8] * 4, ((8,), [0] * 4, list(range(4)), 4)),
        ([8, 8, None, 8, 8, None], ((8, 8, None), [0, 0, 2, 1, 1, 2], [0, 1, 0, 0, 1, 1], 2)),
        ([8, 8, 8, None, None], ((8, None), [0, 0, 0, 1, 1], [0, 1, 2, 0, 1], 3)),
    ],
)
def test_layers_are_dealt_into_groups_of_one_size(windows, expected):
    groups = group_layers(windows)
    got = (groups.windows, list(groups.group_of), list(groups.array_of), groups.layers_per_group)
    assert got == expected


def test_gemmas_layers_make_six_groups_of_three():
    groups = group_layers([None if layer % 6 == 5 else 512 for layer in range(18)])
    assert (groups.windows.count(512), groups.windows.count(None), groups.layers_per_group) == (5, 1, 3)


@pytest.mark.parametrize("layers", [26, 34, 48])
def test_few_layers_are_missing_in_groups_that_do_not_come_out_even(layers):
    groups = group_layers([None if layer % 6 == 5 else 512 for layer in range(layers)])
    assert groups.layers_per_group * len(groups.windows) - layers <= layers // 8
    places = set(zip(groups.group_of, groups.array_of, strict=True))
    assert len(places) == layers, "two layers share a place"


def test_a_window_reads_back_from_the_beginning_of_a_block():
    columns = [SlidingGroup(1, KVLayout(4, (None, window), 8), window).num_columns_read for window in (1, 2, 5, 6, 9)]
    assert columns == [0, 1, 1, 2, 2]
