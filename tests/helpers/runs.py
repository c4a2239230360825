"""Small runs of the trainer, and what they leave."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_SMALL = {
    "pipelining.num_microbatches": 2,
    "training.batch_size": 4,
    "training.num_steps": 8,
    "training.log_every": 1,
    "training.log_seconds": 0,
    "checkpoint.every_steps": 2,
    "evaluation.max_batches": 2,
}


def small_flags() -> list[str]:
    """Returns flags that make any run short."""
    return [f"--set={name}={value}" for name, value in _SMALL.items()]


def flags(**changes: Any) -> list[str]:
    """Returns flags that make parallelism.Pipelined very small, and quick to trace.

    Args:
        changes: Hyperparameters, `__` in place of dots.
    """
    sizes = {"model.num_blocks": 1, "model.width": 8, "model.hidden": 8}
    return _flags("parallelism.Pipelined", sizes, changes)


def text_flags(corpus: Path, **changes: Any) -> list[str]:
    """Returns flags that make lm.Tiny very small.

    Args:
        corpus: The text, which is made up.
        changes: Hyperparameters, `__` in place of dots.
    """
    lines = (b"%d squared is %d\n" % (i, i * i) for i in range(500))
    corpus.write_bytes(b"".join(lines))
    values = {
        "data.files": corpus,
        "model.num_layers": 1,
        "model.width": 8,
        "model.mlp_width": 16,
        "model.num_heads": 2,
        "model.context": 8,
        "sampling.num_bytes": 5,
    }
    return _flags("lm.Tiny", values, changes)


def _flags(
    experiment: str, sizes: dict[str, Any], changes: dict[str, Any]
) -> list[str]:
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    values = {**sizes, **_SMALL, **changed}
    return [f"--params={experiment}", *(f"--set={n}={v}" for n, v in values.items())]


def records(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    """Returns what a run has measured."""
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(folder: Path) -> list[tuple[int, float]]:
    """Returns the loss of each step that was written down."""
    return [(r["step"], r["loss"]) for r in records(folder) if "loss" in r]


def wait_for_step(
    folder: Path, step: int, *, seconds: float = 300, check: Callable[[], Any] = bool
) -> None:
    """Waits until a run has written a step down.

    Args:
        folder: The run's folder.
        step: The step.
        seconds: Longest wait.
        check: Called meanwhile.
    """
    deadline = time.monotonic() + seconds
    while not (folder / "metrics.jsonl").exists() or (
        max((step for step, _ in losses(folder)), default=0) < step
    ):
        assert time.monotonic() < deadline, folder
        check()
        time.sleep(0.05)


@contextlib.contextmanager
def timing_recovery(folder: Path, what: str) -> Iterator[None]:
    """Prints the longest pause between new steps, under `-rP`: until four are done.

    Args:
        folder: The run's folder.
        what: The fault that happens inside.
    """
    reached = max(step for step, _ in losses(folder))
    pauses: list[float] = []

    def watch() -> None:
        for step in range(reached + 1, reached + 5):
            before = time.monotonic()
            wait_for_step(folder, step)
            pauses.append(time.monotonic() - before)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield
    watcher.join()
    print(f"{what}: {max(pauses):.1f} s to the next step")


OF_THE_MACHINE = {"throughput", "flops_per_second", "mfu", "memory"}


def timeless(folder: Path) -> list[dict[str, Any]]:
    """Returns all measurements but those of time and of the machine."""
    return timeless_records((folder / "metrics.jsonl").read_text())


def timeless_records(text: str) -> list[dict[str, Any]]:
    """Returns the same of the text of `metrics.jsonl`."""
    return [
        {n: value for n, value in json.loads(line).items() if n not in OF_THE_MACHINE}
        for line in text.splitlines()
    ]
