"""A short training of a language model by the trainer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.accelerator_check.devices import Machine
from tests.accelerator_check.report import Recorder


def training_part(recorder: Recorder, machine: Machine, folder: Path) -> None:
    """Trains a language model by the trainer, whose loss has to fall."""
    num_steps = 40 if machine.kind == "CPU" else 100
    settings: dict[str, int | str] = {
        "training.num_steps": num_steps,
        "training.log_every": 5,
    }
    name, flags = "lm.Small", []
    if machine.kind == "CPU":
        name = "lm.Tiny"
        recorder.left_out("lm.Small: it needs accelerators; this is lm.Tiny")
    elif machine.kind == "GPU":
        num_stages = min(4, machine.num_physical)
        settings |= {"pipelining.num_stages": num_stages}
        if num_stages < 4:  # Its stages are larger than those it was made for.
            settings |= {"pipelining.remat": "layer"}
    else:
        flags = ["--tpu=local"]
        settings |= {"pipelining.num_stages": min(4, machine.num_physical)}
    logdir = folder / "run"
    command = [sys.executable, "-m", "trainer", f"--params={name}"]
    command += [f"--logdir={logdir}", *flags]
    command += [f"--set={key}={value}" for key, value in settings.items()]
    recorder.text(f"`{' '.join(['python', *command[1:5]])} ...`, {settings}")
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=(folder / "trainer.log").open("w"), stderr=subprocess.STDOUT
    )
    try:
        status = process.wait(max(10.0, recorder.seconds_left))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        status = None
    seconds = time.perf_counter() - started
    path = logdir / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    found = [x for x in map(json.loads, lines) if "loss" in x and not x.get("final")]
    if len(found) > 1:
        first, last = found[0], found[-1]
        recorder.row(
            f"{name}, nats a byte",
            **{
                f"loss at {first['step']}": float(first["loss"]),
                f"loss at {last['step']}": float(last["loss"]),
                "seconds with start-up": seconds,
            },
        )
        if not last["loss"] < first["loss"]:
            recorder.failed("The loss does not fall")
    if status != 0:
        how = "took too long" if status is None else f"ended with {status}"
        text = (folder / "trainer.log").read_text("utf-8", "replace").splitlines()
        tail = " / ".join(text[-5:])[:600]
        recorder.failed(f"The trainer {how} after {len(found)} log lines: {tail}")
    elif len(found) < 2:
        recorder.failed(f"The trainer wrote {len(found)} losses to {path}")
    shutil.rmtree(logdir / "checkpoints", ignore_errors=True)
