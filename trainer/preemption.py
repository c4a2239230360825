"""How a process ends: by a signal, and with its exit status.

Signals that ask for the end are SIGTERM, Ctrl-C, and SIGHUP, of a terminal that is
closed, unless it is ignored, as under `nohup`.

The first signal is answered after the step that is running, with a checkpoint; the
second at once; any after the run has ended is ignored. Python calls its signal handlers
between two of its own instructions, so not while TensorFlow computes. Signals are
therefore counted by a thread, which hears of them at once.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator

from tfgpipe._compat import restore_stderr
from tfgpipe_trainer.progress import report

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_QUIT = b"\0"


class Stopping:
    """Requests to end the run.

    Attributes:
        asked: True if a signal has asked for the end here.
        all_hosts_stop: True if all hosts know of such a signal.
        stepping: True while there are steps to be finished and saved. Otherwise all
            that is done is saved already, and the first signal ends the process, too.
        over: True if the run has ended and its exit status is settled: a signal
            changes nothing any more.
        installed: True while signals are caught.
    """

    def __init__(self, *, status: int) -> None:
        self.asked = self.all_hosts_stop = False
        self.stepping = self.over = self.installed = False
        self._status = status

    def ask(self, number: int) -> None:
        """Asks for the end, as a signal does."""
        if number == signal.SIGHUP:
            _leave_closed_terminal()
        if self.over:
            return
        if self.asked:
            _end(f"Stopped at once, by {signal.Signals(number).name}.", 128 + number)
        self.asked = True
        if not self.stepping:
            _end("Stopped. The same command goes on.", self._status)
        report("Stopping after this step, and a checkpoint. Once more stops at once.")

    def settle(self) -> None:
        """Records that the run has ended."""
        self.over = True

    def take_signals(self) -> None:
        """Catches signals.

        Where several processes train, TensorFlow takes SIGTERM for itself once they
        are connected, so this is to be called anew then.
        """
        if self.installed:
            # The thread does what is to be done; without handlers the process ends.
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, lambda *_: None)


@contextlib.contextmanager
def on_signals(*, status: int) -> Iterator[Stopping]:
    """Yields the requests of signals to end a run.

    Args:
        status: The exit status of a run that has ended so, with all saved.
    """
    stopping = Stopping(status=status)
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def listen() -> None:
        while (byte := os.read(reading, 1)) not in (b"", _QUIT):
            if byte[0] in _SIGNALS:
                stopping.ask(byte[0])

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    stopping.installed = True
    stopping.take_signals()
    previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield stopping
    finally:
        stopping.installed = False
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.write(writing, _QUIT)
        listener.join()
        os.close(reading)
        os.close(writing)


class ExitGuard:
    """Ends this process with a status, whatever threads of TensorFlow still do.

    Python's own end can wait for ever: it destroys the iterators of datasets after
    threads can no longer run Python, and an iterator waits for its calls of
    `tf.numpy_function`, which need it. So the process ends before that, and after all
    else that Python does at its end: it waits for threads and calls the functions that
    are registered with `atexit`. The last of these, which is the first registered,
    ends the process.

    This is to be made before TensorFlow is imported, which registers some.

    Attributes:
        status: The exit status, that of a crash until it is set.
        signals: Entered contexts of signals, never left: to the last moment a signal
            does not become another status.
    """

    def __init__(self) -> None:
        self.status = 1
        self.signals = contextlib.ExitStack()
        atexit.register(self._end)

    def settle(self, status: int) -> None:
        """Settles the status: signals change nothing from here on."""
        self.status = status
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _end(self) -> None:
        # Registered by an import before this was made, so it is called here.
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(self.status)


def _leave_closed_terminal() -> None:
    """Discards later output of a terminal, where writing would be an error."""
    with open(os.devnull, "wb") as nowhere:
        for descriptor in (1, 2):
            is_device = stat.S_ISCHR(os.fstat(descriptor).st_mode)
            if is_device and not os.isatty(descriptor):
                os.dup2(nowhere.fileno(), descriptor)


def _end(text: str, status: int) -> None:
    restore_stderr()  # TensorFlow may be starting.
    report(text)
    os._exit(status)
