"""How fast requests end: an estimate that follows the last endings and forgets what came before a pause."""

from worlds import World

from noria.core.events import FinishReason
from noria.observe.pace import WINDOW, Pace
from noria.observe.stats import EngineStats


def test_nothing_to_do_takes_no_time():
    assert Pace().seconds_for(10, 5.0) == 0.0


def test_before_the_first_ending_it_is_as_long_as_it_has_been():
    pace = Pace()
    pace.note_busy(10.0)
    pace.note_busy(12.0)
    assert pace.seconds_for(3, 14.0) == 12.0


def test_endings_come_one_in_so_many_seconds():
    pace = Pace()
    pace.note_busy(0.0)
    for at_s in (2.0, 4.0, 6.0, 8.0):
        pace.note_ending(at_s)
    assert pace.seconds_for(5, 8.0) == 10.0
    assert pace.seconds_for(5, 16.0) == 20.0, "it slows down while nothing ends"


def test_only_the_last_endings_count():
    pace = Pace()
    pace.note_busy(0.0)
    for number in range(1, WINDOW + 1):
        pace.note_ending(100.0 * number)
    for number in range(1, WINDOW + 1):
        pace.note_ending(100.0 * WINDOW + number)
    assert pace.seconds_for(7, 100.0 * WINDOW + WINDOW) == 7.0


def test_a_pause_is_forgotten():
    pace = Pace()
    pace.note_busy(0.0)
    pace.note_ending(50.0)
    pace.note_idle()
    pace.note_busy(1000.0)
    pace.note_ending(1001.0)
    assert pace.seconds_for(4, 1001.0) == 4.0


def test_the_pace_of_an_engine_follows_from_its_records():
    """One slot, three tokens each, a second per token; those that were aborted have not been served."""
    world = World(max_num_seqs=1)
    for name in ("a", "b", "c", "d", "e"):
        world.add(name, 4, max_tokens=3)
    stats = EngineStats(world.config.num_blocks)
    for _ in range(6):
        world.step()
        stats.add(world.scheduler.records[-1])
    assert stats.num_finished[FinishReason.LENGTH] == 2
    now_s = world.scheduler.records[-1].updated_s
    assert stats.pace.seconds_for(1, now_s) == 3.0
    world.finish("e")
    world.finish("d")
    world.step()
    stats.add(world.scheduler.records[-1])
    assert stats.num_finished[FinishReason.ABORT] == 2
    assert stats.pace.seconds_for(1, now_s) == 3.0
