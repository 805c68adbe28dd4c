"""What a serving process tells Python's garbage collector."""

from __future__ import annotations

import gc

from noria.garbage import YOUNG_OBJECTS, settle_garbage_collector


def test_what_exists_is_never_looked_at_again_and_cycles_are_still_found() -> None:
    before = gc.get_threshold()
    try:
        settle_garbage_collector()
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold() == (YOUNG_OBJECTS, *before[1:])
        num_collections = gc.get_stats()[0]["collections"]
        kept = [[] for _ in range(2 * YOUNG_OBJECTS)]
        assert gc.get_stats()[0]["collections"] > num_collections, len(kept)
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
