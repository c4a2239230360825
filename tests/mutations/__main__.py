"""Plants one fault after another in a copy of the checkout, and runs tests there.

    fault ──▶ the tests it names ──pass──▶ all of `make test` ──pass──▶ nothing finds it
                     │ fail                        │ fail
                     ╰─────────── found ───────────╯

Exit status 1 if nothing finds some fault. TensorFlow is imported once, before anything
of the copy is, and every run of tests is a fork: see `tests.helpers.subprocesses`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.helpers import subprocesses
from tests.mutations.faults import FAULTS, Fault

PACKAGES = (
    *("tfgpipe", "tfgpipe_trainer", "tfgpipe_params", "trainer", "params"),
    *("tests", "docs", "benchmarks"),
)
# A step that hangs is found, but by the clock.
NAMED_SECONDS = 240.0
GATE_SECONDS = 1800.0
# Of Hypothesis, for tests in the very process that is forked.
PROFILE = "mutations"
QUICK = (f"--hypothesis-profile={PROFILE}",)
# All that `make test` runs.
GATE = ("tests", "--dist=loadfile")

_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
# Of pytest: all passed; some failed; some could not be collected.
_PASSED, _FINDS = 0, (1, 2)
_POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What has become of a fault, or of the checkout without one.

    Attributes:
        found_by: The test that failed, or in words what else ended; None if all passed.
        seconds: What that took.
    """

    found_by: str | None
    seconds: float


class Copy:
    """A copy of the checkout, of all that git would not ignore."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
        listed = subprocess.check_output(command, cwd=subprocesses.ROOT, text=True)
        for name in filter(None, listed.split("\0")):
            source, target = subprocesses.ROOT / name, folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink() or source.is_file():
                shutil.copy2(source, target, follow_symlinks=False)

    @contextlib.contextmanager
    def planted(self, fault: Fault | None) -> Iterator[None]:
        """Has the copy hold a fault, or none."""
        if fault is None:
            yield
            return
        path = self.folder / fault.file
        before = path.read_text("utf-8")
        path.write_text(fault.planted(before), "utf-8")
        try:
            yield
        finally:
            path.write_text(before, "utf-8")
            # What Hypothesis remembers of it.
            shutil.rmtree(self.folder / ".hypothesis", ignore_errors=True)


class Run:
    """A pytest in a copy, in a process of its own.

    Args:
        copy: Where.
        arguments: Of pytest, beside those that every run has.
        limit: Seconds that it may take.
    """

    def __init__(self, copy: Copy, arguments: Sequence[str], limit: float) -> None:
        self._folder, self._limit = copy.folder, limit
        self._arguments = [*arguments, "-x", "-q", "-rfE", "--tb=short"]
        self._arguments += ["-p", "no:cacheprovider", "--hypothesis-seed=0"]
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 It lives as long.
        self._started = time.monotonic()
        self._child = subprocesses.fork(self._live)

    def outcome(self) -> Outcome | None:
        """Returns how it has ended, or None while it runs.

        Raises:
            RuntimeError: If it ended by what is no test's failure.
        """
        child, status = os.waitpid(self._child, os.WNOHANG)
        seconds = time.monotonic() - self._started
        if not child:
            if seconds < self._limit:
                return None
            self.end()
            return Outcome(f"nothing came in {self._limit:.0f} s", seconds)
        self._end_group()  # What its tests may have left.
        return Outcome(self._found_by(os.waitstatus_to_exitcode(status)), seconds)

    def end(self) -> None:
        """Ends it at once."""
        self._end_group()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._child, 0)

    def _end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child, signal.SIGKILL)

    def _found_by(self, status: int) -> str | None:
        if status == _PASSED:
            return None
        if status < 0:
            return f"the process ended by {signal.Signals(-status).name}"
        self._printed.seek(0)
        printed = self._printed.read().decode(errors="replace")
        failed = _FAILED.search(printed)
        if status not in _FINDS or failed is None:
            raise RuntimeError(
                f"pytest ended with status {status} and no test that failed:\n{printed}"
            )
        return failed[1]

    def _live(self) -> int:
        """Runs pytest in a fork, of this process' modules those of others alone."""
        os.setsid()
        for descriptor in (1, 2):
            os.dup2(self._printed.fileno(), descriptor)
        for name in list(sys.modules):
            if name.partition(".")[0] in PACKAGES:
                del sys.modules[name]
        os.chdir(self._folder)
        sys.path[0] = str(self._folder)
        os.environ["PYTHONPATH"] = str(self._folder)
        for name in ("tfgpipe", "tfgpipe_trainer", "tfgpipe_params", "tests"):
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            assert Path(spec.origin).is_relative_to(self._folder), spec.origin
        import hypothesis
        import pytest

        # A test that fails is enough: no time is taken to find its smallest example.
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile(PROFILE, deadline=None, phases=phases)
        return int(pytest.main(self._arguments))


@dataclasses.dataclass(frozen=True)
class Task:
    """What is run in a copy.

    Attributes:
        fault: The fault that the copy holds, or None.
        arguments: Of pytest.
        limit: Seconds that it may take.
    """

    fault: Fault | None
    arguments: Sequence[str]
    limit: float


class Worker:
    """A copy in which one task after another runs."""

    def __init__(self, folder: Path) -> None:
        self._copy = Copy(folder)
        self._task: Task | None = None
        self._run: Run | None = None
        self._planted = contextlib.ExitStack()

    @property
    def is_free(self) -> bool:
        """Whether nothing runs."""
        return self._task is None

    def begin(self, task: Task) -> None:
        """Begins a task."""
        self._task = task
        self._planted.enter_context(self._copy.planted(task.fault))
        self._run = Run(self._copy, task.arguments, task.limit)

    def poll(self) -> tuple[Task, Outcome] | None:
        """Returns a task that has ended, and how."""
        outcome = self._run.outcome() if self._run else None
        if self._task is None or outcome is None:
            return None
        task, self._task, self._run = self._task, None, None
        self._planted.close()
        return task, outcome

    def end(self) -> None:
        """Ends what runs."""
        if self._run is not None:
            self._run.end()


def run(
    tasks: Sequence[Task], workers: Sequence[Worker]
) -> Iterator[tuple[Task, Outcome]]:
    """Yields tasks with their outcomes, in the order in which they end."""
    waiting = list(tasks)
    while waiting or not all(worker.is_free for worker in workers):
        for worker in workers:
            if worker.is_free and waiting:
                worker.begin(waiting.pop(0))
            ended = worker.poll()
            if ended:
                yield ended
        time.sleep(_POLL_SECONDS)


def named(faults: Sequence[Fault], num: int) -> list[Task]:
    """Returns tasks that together run all tests that faults name, each once."""
    files: dict[str, dict[str, None]] = {}
    for test in (test for fault in faults for test in fault.tests):
        files.setdefault(test.partition("::")[0], {})[test] = None
    parts: list[list[str]] = [[] for _ in range(min(num, len(files)))]
    for tests in sorted(files.values(), key=len, reverse=True):
        min(parts, key=len).extend(tests)
    return [Task(None, [*part, *QUICK], GATE_SECONDS) for part in parts]


def outcomes_of(
    faults: Sequence[Fault], workers: Sequence[Worker], *, named_only: bool
) -> dict[str, Outcome]:
    """Returns by the name of each fault what has become of it, telling it on the way.

    Args:
        faults: The faults.
        workers: Where to plant them.
        named_only: Whether no other tests are run than those that a fault names.
    """
    outcomes: dict[str, Outcome] = {}
    check_unchanged(named(faults, len(workers)), workers)
    tasks = [Task(f, (*f.tests, *QUICK), NAMED_SECONDS) for f in faults]
    for task, outcome in run(tasks, workers):
        assert task.fault is not None
        outcomes[task.fault.name] = outcome
        count = f"{len(outcomes)}/{len(faults)}"
        tell(f"{count} {outcome.seconds:4.0f} s  {task.fault.name}", outcome)
    missed = [fault for fault in faults if outcomes[fault.name].found_by is None]
    if missed and not named_only:
        # One at a time, each with all processors.
        first, *_ = workers
        gate = [*GATE, f"-n{max(2, len(workers))}"]
        check_unchanged([Task(None, gate, GATE_SECONDS)], [first])
        tasks = [Task(fault, gate, GATE_SECONDS) for fault in missed]
        for task, outcome in run(tasks, [first]):
            assert task.fault is not None
            outcomes[task.fault.name] = outcome
            tell(f"{outcome.seconds:4.0f} s  {task.fault.name}", outcome)
    return outcomes


def check_unchanged(tasks: Sequence[Task], workers: Sequence[Worker]) -> None:
    """Ends the command with status 2 unless tests pass where there is no fault."""
    for _, outcome in run(tasks, workers):
        if outcome.found_by is not None:
            say(f"Without any fault this fails: {outcome.found_by}")
            sys.exit(2)
        say(f"Without any fault all pass, {outcome.seconds:.0f} s.")


def table(faults: Sequence[Fault], outcomes: dict[str, Outcome]) -> str:
    """Returns the outcomes as Markdown."""
    lines = ["| fault | test that found it | seconds |", "|---|---|---:|"]
    for fault in faults:
        outcome = outcomes[fault.name]
        found = outcome.found_by
        code = f"`{found}`" if found and "::" in found else found or "**nothing**"
        code = code.replace("|", "\\|")
        lines.append(f"| {fault.name} | {code} | {outcome.seconds:.0f} |")
    return "\n".join(lines)


def main() -> int:
    """Runs the command, and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--only", metavar="REGEX", help="faults whose names match")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time")
    parser.add_argument(
        "--named-only", action="store_true", help="leave out the whole of `make test`"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="for the table")
    given = parser.parse_args()
    faults = [f for f in FAULTS if re.search(given.only or "", f.name)]
    if not faults:
        parser.error(f"no fault's name matches {given.only!r}")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import hypothesis  # noqa: F401
    import keras  # noqa: F401
    import pytest  # noqa: F401
    import tensorflow as tf  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        workers = [Worker(Path(folder) / str(n)) for n in range(given.jobs)]
        try:
            outcomes = outcomes_of(faults, workers, named_only=given.named_only)
        except RuntimeError as error:
            say(str(error))
            return 2
        finally:
            for worker in workers:
                worker.end()
    text = table(faults, outcomes)
    say(f"\n{text}")
    if given.markdown is not None:
        given.markdown.write_text(f"{text}\n", "utf-8")
    missed = [name for name, outcome in outcomes.items() if outcome.found_by is None]
    say(f"\n{len(faults) - len(missed)} of {len(faults)} faults were found.")
    return 1 if missed else 0


def tell(what: str, outcome: Outcome) -> None:
    """Tells what has become of a fault."""
    say(f"{what}: {outcome.found_by or 'NOTHING FINDS IT'}")


def say(text: str) -> None:
    """Writes a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
