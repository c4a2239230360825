"""The other processes that this one needs: how each ends, and what the others then do.

A process that exits cleanly says so, and the others go on. One that ends in any other
way leaves collectives that the others would wait for without end, so they end as well.
Its others are other clients of the same workers (`clients`) or the processes of
`TF_CONFIG` (`rendezvous`).
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import faulthandler
import math
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import ClassVar, NoReturn

from tfgpipe.cluster.errors import WorkerLost, end_process
from tfgpipe.cluster.health import SILENCE_SECONDS

_POLL_SECONDS = 0.2
# How long an error may precede the news of the lost process that caused it.
_LOSS_SECONDS = 3.0


class Peers(abc.ABC):
    """The other processes that this one needs, and they it.

    Attributes:
        current: The objects of this process, if it has any.
        waits_since: The time at which this one began something that needs them, or
            None.
        is_closed: True once this process has announced its end to them.
    """

    current: ClassVar[Peers | None] = None

    def __init__(self, *, step_seconds: float = math.inf) -> None:
        self.waits_since: float | None = None
        self.is_closed = False
        self._step_seconds = step_seconds

    def close(self, *, clean: bool) -> None:
        """Says good-bye if this process exits cleanly, and else breaks off."""
        if not self.is_closed:
            self.is_closed = True
            self.close_sessions(clean=clean)

    @abc.abstractmethod
    def close_sessions(self, *, clean: bool) -> None:
        """Ends the sessions with them, with a good-bye or without."""

    @abc.abstractmethod
    def lost(self) -> WorkerLost | None:
        """Returns an error that names one that is gone without a good-bye, or None."""

    @abc.abstractmethod
    def ended(self) -> WorkerLost | None:
        """Returns an error that names one that has exited cleanly, or None."""

    def watch(self) -> None:
        """Ends this process when one is lost, or does not come to a step.

        A collective waits for it without end.
        """
        left_at: float | None = None
        while not self.is_closed:
            time.sleep(_POLL_SECONDS)
            lost = self.lost()
            if lost and not self.is_closed:
                end_process(lost)
            ended, waits_since, now = self.ended(), self.waits_since, time.monotonic()
            left_at = left_at or (now if ended else None)
            if waits_since is None:
                continue
            if ended and left_at and now - max(left_at, waits_since) > SILENCE_SECONDS:
                end_process(ended)
            if now - waits_since > self._step_seconds:
                self._give_up()

    def _give_up(self) -> NoReturn:
        with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
            faulthandler.dump_traceback()
        end_process(
            WorkerLost(
                "A step of all replicas has not ended within "
                f"{self._step_seconds:g} s, though the other clients are connected. "
                "One does not take part, or needs longer. In the latter case pass a "
                "larger step_seconds to tfgpipe.cluster.connect(...). Above is where "
                "this process waits."
            )
        )


def join(peers: Peers) -> None:
    """Tells the other processes how this one ends, and this one how they do.

    It exits cleanly unless an error is not caught.
    """
    Peers.current = peers
    threading.Thread(target=peers.watch, daemon=True, name="other processes").start()
    atexit.register(peers.close, clean=True)
    show = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        show(kind, error, trace)
        await_loss(error)
        peers.close(clean=False)

    sys.excepthook = hook


@contextlib.contextmanager
def report_exit(accepted: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Tells the other processes, if any, whether they can go on without this one.

    They can if what is inside ends without an error, by `sys.exit()` or one of the
    accepted errors; otherwise they end with status 75.

    Example:

    ```python
    with tfgpipe.cluster.report_exit():
        sys.exit(main())
    ```

    Args:
        accepted: Errors that all processes run into by themselves.
    """
    clean = False
    try:
        yield
        clean = True
    except SystemExit as error:
        clean = error.code in (None, 0)
        raise
    except accepted:
        clean = True
        raise
    except Exception as error:
        await_loss(error)
        raise
    finally:
        if Peers.current is not None:
            Peers.current.close(clean=clean)


@contextlib.contextmanager
def collective_step() -> Iterator[None]:
    """A context for a step of all replicas, for clients of the same workers.

    Should another client have ended, this process would wait for it without end, and
    ends after 30 seconds; should one not take part in the step, after the
    `step_seconds` of `connect`. Steps of a `tfgpipe.PipelinedModel` do this by
    themselves.
    """
    if (peers := Peers.current) is None:
        yield
        return
    peers.waits_since = time.monotonic()
    try:
        yield
    finally:
        peers.waits_since = None


def await_loss(error: BaseException) -> None:
    """Waits for seconds, and ends this process with status 75 if another is gone.

    Args:
        error: Nothing is waited for unless it is TensorFlow's, which raises whatever it
            runs into when another process is gone.
    """
    peers = Peers.current
    if peers is None or not type(error).__module__.startswith("tensorflow."):
        return
    time.sleep(_LOSS_SECONDS)
    if ended := peers.ended():
        end_process(ended)
