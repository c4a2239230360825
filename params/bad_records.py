"""Records that cannot be used: counted, named, and too many of them refused."""

from __future__ import annotations

import re
import sys
import threading

from trainer.hyperparams import HyperparameterError

_NAMED = 10


class BadRecordError(ValueError):
    """A record cannot be used; the message says why, without naming the record."""


class BadRecords:
    """The bad records that a process has come across, each counted once.

    The first ten are named on stderr as they are found. All of them are only known once
    all records have been read, so a run that is taken up counts from the start again.

    Args:
        limit: How many there may be.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()  # Batches are read side by side.
        self._found: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._found)

    @property
    def first(self) -> list[str]:
        """The first ten, as `"FILE record NUMBER: reason"`."""
        named = list(self._found.items())[:_NAMED]
        return [f"{name}: {reason}" for name, reason in named]

    def add(self, name: str, reason: str) -> None:
        """Counts a record, if it is a new one.

        Raises:
            HyperparameterError: If there are more than the limit.
        """
        with self._lock:
            if name not in self._found:
                self._found[name] = reason
                if len(self._found) <= _NAMED:
                    print(  # noqa: T201 (the run goes on, and its reader should know)
                        f"Bad record, not used: {name}: {reason}.",
                        file=sys.stderr,
                        flush=True,
                    )
            if len(self._found) > self._limit:
                raise HyperparameterError(
                    f"data.max_bad_records: expected at most {self._limit} bad "
                    f"records; received {len(self._found)}, of which the first are\n"
                    + "".join(f"  {line}\n" for line in self.first)
                    + "Mend or remove them, or raise data.max_bad_records."
                )


def told_by(error: Exception) -> HyperparameterError | None:
    """Returns the error about records that an error of TensorFlow repeats, if any.

    What a dataset's function raises comes out of `fit` as an error of TensorFlow, which
    has the words and a traceback in its message.
    """
    pattern = r"HyperparameterError: (data\.\w+: .*?)\n*Traceback"
    found = re.search(pattern, str(error), re.DOTALL)
    return HyperparameterError(found[1]) if found else None
