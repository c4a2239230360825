"""The first hour on accelerators: what holds on the devices that are here, in a report.

    make accelerator-check
    python -m tests.accelerator_check [--quick] [--parts=identity,xla]

Writes `report.md`, and `timeline.png` beside it, into `runs/accelerator-check/`, to be
attached to an issue. Each part is a process of its own, so that one that fails, crashes
or hangs leaves the others, and none finds memory that another has taken. `PARTS` lists
them; `part.py` is the process of one.

It takes at most `--minutes`; a part that is not reached by then is "not run". The exit
status is 0 if no part failed, "not run" being no failure, and 1 otherwise.

A machine with one GPU has its memory divided among four logical ones; one without any
runs all that CPUs can, in the sizes of `--quick`, on four logical CPUs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers.report import commit
from tests.accelerator_check.report import PARTS, Outcome, Part, report

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("runs/accelerator-check")


def run_part(
    part: Part,
    *,
    seconds: float,
    folder: Path,
    options: Sequence[str] = (),
    command: Sequence[str] | None = None,
) -> Outcome:
    """Runs a part in a process of its own.

    Args:
        part: The part.
        seconds: When the process is ended.
        folder: Where it writes.
        options: More of its command line.
        command: What is run instead, for tests.
    """
    outcome = Outcome(part)
    found, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
    module = "tests.accelerator_check.part"
    flags = [f"--folder={folder}", f"--seconds={0.9 * seconds:.0f}", *options]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "PYTHONUNBUFFERED": "1"}
    if part.on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    found.write_text("", "utf-8")
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command or [sys.executable, "-m", module, part.name, *flags],
            cwd=ROOT,
            env=environment,
            stderr=errors,
            start_new_session=True,  # It has processes as well.
        )
        timer = threading.Timer(seconds, _end, [process])
        timer.start()
        try:
            status = process.wait()
        finally:
            timer.cancel()
            _end(process)
    outcome.seconds = time.monotonic() - started
    entries = [json.loads(line) for line in found.read_text("utf-8").splitlines()]
    for entry in entries:
        if entry["kind"] != "end":
            outcome.add(entry)
    if not entries or entries[-1]["kind"] != "end":
        late = outcome.seconds >= seconds
        why = f"no end within {seconds:.0f} s" if late else f"ended with {status}"
        outcome.add({"kind": "failed", "value": f"The process: {why}. See {log}."})
    return outcome


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, with those that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def check(
    parts: Sequence[Part],
    *,
    folder: Path,
    minutes: float,
    options: Sequence[str] = (),
    run: Callable[..., Outcome] = run_part,
) -> list[Outcome]:
    """Runs parts one after the other, and writes the report after each.

    Args:
        parts: The parts.
        folder: Where the report is written.
        minutes: How long all may take together.
        options: More of each part's command line.
        run: Runs one.
    """
    work = folder / "parts"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    about = f"{date}, commit {commit()}. {' '.join(options)}".strip()
    end = time.monotonic() + 60 * minutes
    outcomes: list[Outcome] = []
    for i, part in enumerate(parts, 1):
        print(f"[{i}/{len(parts)}] {part.title}", flush=True)
        left = end - time.monotonic()
        if left < 1:
            reason = f"time: {minutes:g} minutes were over"
            outcome = Outcome(part, "not run", [reason])
        else:
            seconds = min(60 * part.minutes, left)
            outcome = run(part, seconds=seconds, folder=work, options=options)
        outcomes.append(outcome)
        print(f"    {outcome.status}, {outcome.seconds:.0f} s", flush=True)
        (folder / "report.md").write_text(report(outcomes, about=about), "utf-8")
    return outcomes


def main() -> None:
    """Runs the check and exits with 1 if a part failed."""
    flags = _parse()
    if flags.export:
        # Here, since the other parts leave TensorFlow to processes of their own.
        from tests.accelerator_check.export import export

        export(flags.export, quick=flags.quick)
        return
    names = flags.parts or [part.name for part in PARTS]
    # The others read what the first has found.
    parts = [part for part in PARTS if part.name in ("machine", *names)]
    options = ["--quick"] if flags.quick else []
    folder = flags.folder.resolve()
    outcomes = check(parts, folder=folder, minutes=flags.minutes, options=options)
    print(f"\n{folder / 'report.md'}")
    raise SystemExit(any(each.status == "failed" for each in outcomes))


def _parse() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        known = [part.name for part in PARTS]
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(
                f"expected some of {', '.join(known)}; received {', '.join(unknown)}"
            )
        return text.split(",")

    parser = argparse.ArgumentParser(
        description="Checks the accelerators of a machine."
    )
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--minutes", type=float, default=20, help="for all parts")
    parser.add_argument("--parts", type=names, help="with commas; all by default")
    parser.add_argument(
        "--export", type=Path, metavar="DIR", help="write functions for JAX, and end"
    )
    parser.add_argument("--quick", action="store_true", help="small models, few cases")
    return parser.parse_args()


if __name__ == "__main__":
    main()
