"""A progress line on stderr for work that takes longer than expected.

Nothing is written in the first two seconds. Then a terminal shows one line, which is
rewritten every second; a file or pipe gets a line every ten seconds. A thread of its
own writes, since the work is one long call. Where Keras logs instead of printing,
`keras.config.disable_interactive_logging()`, nothing is written at all.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

import keras

_DELAY = 2.0
_EVERY = {True: 1.0, False: 10.0}  # On a terminal, and else.


class ProgressLine:
    """A line on stderr that shows the progress of some work.

    Args:
        present_text: The work on one of them, as in "tracing stage".
        final_text: The work when it is done, as in "traced {total} stages".
        total: Their number.
        clock: Returns the time in seconds.
        stream: The stream to write to. Defaults to stderr.
    """

    def __init__(
        self,
        present_text: str,
        final_text: str,
        total: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        stream: TextIO | None = None,
    ) -> None:
        self._present_text = present_text
        self._final_text = final_text
        self._total = total
        self._clock = clock
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._start: float | None = None
        self._last: float | None = None
        self._index = 0
        self._one_at_a_time = threading.Lock()

    @property
    def is_started(self) -> bool:
        """True if any work has begun."""
        return self._start is not None

    def begin(self, index: int) -> None:
        """Records that the work on one of them begins, counted from one."""
        with self._one_at_a_time:
            self._index = index
            if self._start is None:
                self._start = self._clock()

    def tick(self) -> None:
        """Writes the line, if it is time to."""
        with self._one_at_a_time:
            if self._start is None:
                return
            now = self._clock()
            due = self._start + _DELAY
            if self._last is not None:
                due = self._last + _EVERY[self._is_terminal]
            if now >= due:
                self._last = now
                seconds = now - self._start
                self._write(
                    f"{self._present_text} {self._index} of {self._total} "
                    f"({seconds:.0f} s)"
                )

    def end(self, remark: str = "") -> None:
        """Writes how long it took, if anything was written before.

        Args:
            remark: A text that follows.
        """
        with self._one_at_a_time:
            if self._last is None or self._start is None:
                return
            seconds = self._clock() - self._start
            self._write(f"{self._final_text} in {seconds:.0f} s{remark}")
            if self._is_terminal:
                self._stream.write("\n")
                self._stream.flush()

    def _write(self, text: str) -> None:
        # On a terminal to its beginning, and what is left of the line before erased.
        ends = ("\r", "\x1b[K") if self._is_terminal else ("", "\n")
        self._stream.write(f"{ends[0]}tfgpipe: {text}{ends[1]}")
        self._stream.flush()


@contextlib.contextmanager
def show_progress(
    present_text: str, final_text: str, total: int, *, remark: str = ""
) -> Iterator[Callable[[int], None]]:
    """Shows the progress of the work inside, if it takes long.

    Args:
        present_text: The work on one of them, as in "tracing stage".
        final_text: The work when it is done, as in "traced {total} stages".
        total: Their number.
        remark: A text that follows at the end.

    Yields:
        What to call with its index, from one, when the work on one of them begins. No
        thread starts before the first such call.
    """
    if sys.stderr is None or not keras.config.is_interactive_logging_enabled():
        yield lambda index: None
        return
    progress = ProgressLine(present_text, final_text, total)
    stop = threading.Event()

    def report() -> None:
        while not stop.wait(0.5):
            progress.tick()

    thread = threading.Thread(target=report, name="tfgpipe-progress", daemon=True)

    def begin(index: int) -> None:
        if not progress.is_started:
            thread.start()
        progress.begin(index)

    try:
        yield begin
    finally:
        if progress.is_started:
            stop.set()
            thread.join()
            progress.end(remark)
