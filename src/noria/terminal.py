"""What a run in the foreground needs of the terminal: a progress bar, and Ctrl-C at the right moment.

Used by `noria.llm` and `noria.cli`. Everything here goes to stderr; stdout is for results.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.progress import Progress


class ProgressBar:
    """Sequences finished and tokens per second. `show` None means: if stderr is a terminal."""

    def __init__(self, num_sequences: int, show: bool | None) -> None:
        self._num_sequences = num_sequences
        self._num_tokens = 0
        self._progress: Progress | None = None
        if sys.stderr.isatty() if show is None else show:
            self._progress = _new_progress()

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
            self._task = self._progress.add_task("Generating", total=self._num_sequences, tokens=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def add(self, *, num_tokens: int, num_sequences: int) -> None:
        """Counts new tokens, and sequences that ended."""
        self._num_tokens += num_tokens
        if self._progress is not None:
            self._progress.update(self._task, advance=num_sequences, tokens=self._num_tokens)


def _new_progress() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.text import Text

    class TokenRate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.fields['tokens'] / max(task.elapsed or 0.0, 1e-9):,.1f} tokens/s")

    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TokenRate()]
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Holds Ctrl-C back until the end of the block, so that an engine step is never cut in half.

    A second Ctrl-C gets through at once. Does nothing outside the main thread or where somebody else handles SIGINT.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    was_interrupted = False

    def remember(signum: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        if was_interrupted:
            signal.default_int_handler(signum, frame)
        was_interrupted = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if was_interrupted:
        raise KeyboardInterrupt
