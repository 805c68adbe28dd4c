"""Python's cyclic garbage collector, tuned for a process that serves: called once each by the front and the engine
process when everything is loaded. A program that uses the library keeps its own settings.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000
"""New objects before the collector looks at them: some hundred steps' worth. By default it is 700, and it looks several
times in every step at messages that reference counts will free anyway."""


def settle_garbage_collector() -> None:
    """What exists now stays for good and is never looked at again; what comes is looked at less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
