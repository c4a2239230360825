"""A run goes on 11 to 13 s after a worker, its server or the trainer is killed.

Seconds from a kill to the next step, of a run on workers under the supervisor.

    python -m benchmarks.studies.recovery --workers=2 --repeats=3

Kills, while `lm.Tiny` trains on workers of this host, a worker, TensorFlow's server in
one, and the trainer, one after the other. Columns: what was killed; seconds until the
trainer has ended, until all workers are ready and it builds its model, and until its
first step after the last checkpoint; how many steps it repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import tables

_KILLED = {
    "worker": "tfgpipe.cluster worker",
    "server": "tfgpipe.cluster server",
    "trainer": "-m trainer",
}


class _Run:
    """A run under the supervisor, and what it says."""

    def __init__(self, workers: int, folder: str) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tfgpipe.cluster", "launch"),
                *(f"--workers={workers}", f"--log_dir={folder}/logs"),
                *("--max_restarts=100", "--", sys.executable, "-u", "-m", "trainer"),
                *("--params=lm.Tiny", f"--logdir={folder}/run"),
                *(
                    "--set=training.num_steps=100000",
                    "--set=checkpoint.every_steps=20",
                ),
                *("--set=training.log_every=1",),
                f"--set=pipelining.num_stages={workers}",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: queue.Queue[tuple[float, str]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for(self, pattern: str) -> tuple[float, re.Match[str]]:
        """Returns when a line that matches came, and the match."""
        while True:
            when, line = self._lines.get(timeout=300)
            found = re.search(pattern, line)
            if found:
                return when, found

    def kill(self, what: str) -> float:
        """Kills one of the processes, and returns when."""
        for pid in _descendants(self._process.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if _KILLED[what] in " ".join(words):
                    os.kill(pid, signal.SIGKILL)
                    return time.monotonic()
        raise RuntimeError(f"There is no {what} to kill.")

    def end(self) -> None:
        """Ends everything."""
        self._process.terminate()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put((time.monotonic(), line))


def _descendants(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (thread / "children").read_text().split()):
            yield child
            yield from _descendants(child)


def measure(run: _Run, what: str) -> tables.Row:
    """Kills something while the run trains, and returns what that took."""
    run.wait_for(r"^step +\d+/.*")
    # Somewhere between two checkpoints.
    _, reached = run.wait_for(r"^step +(\d*[1-9][05])/")
    killed = run.kill(what)
    ended, _ = run.wait_for(r"The command (ended|was ended)")
    built, _ = run.wait_for(r"^\w+: \d+ stages")
    stepped, step = run.wait_for(r"^step +(\d+)/")
    return {
        "killed": what,
        "trainer ended s": ended - killed,
        "connected s": built - killed,
        "next step s": stepped - killed,
        "steps again": int(reached[1]) + 1 - int(step[1]),
    }


def main() -> None:
    """Measures each kind of kill."""
    parser = argparse.ArgumentParser(
        description="Measures seconds from a kill to the next step."
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = _Run(flags.workers, folder)
        try:
            rows = [
                measure(run, what) for _ in range(flags.repeats) for what in _KILLED
            ]
        finally:
            run.end()
    print(tables.draw(rows))
    if flags.json:
        tables.write_json(flags.json, rows)


if __name__ == "__main__":
    main()
