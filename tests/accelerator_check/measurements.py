"""Memory and time of a step, its timeline, and copies while kernels run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tensorflow as tf

import tfgpipe
from tests.accelerator_check import intervals, models
from tests.accelerator_check.devices import Machine
from tests.accelerator_check.prediction import read_prediction
from tests.accelerator_check.report import Recorder
from tfgpipe._compat import executed

_MIB = 2**20


def memory_part(recorder: Recorder, machine: Machine, folder: Path) -> None:
    """Measures peak memory and time of a step, beside the planner's and plain Keras."""
    models.need(machine, 2)
    predicted = read_prediction(folder)
    if machine.kind == "CPU":
        recorder.left_out("memory: TensorFlow counts that of GPUs alone")
    if machine.platform is None:
        what = machine.name or "a CPU"
        recorder.left_out(f"the planner's time: no platform is known for {what}")
    for dtype in models.dtypes(machine):
        if dtype not in predicted or recorder.seconds_left < 40:
            recorder.left_out(f"{dtype}: time, here or where it is predicted")
            continue
        model, batch = models.language_model(machine, dtype=dtype)
        if machine.kind == "GPU":
            for device in machine.devices:
                tf.config.experimental.reset_memory_stats(device)
        seconds = models.time_steps(model, *batch, 3 if machine.quick else 10)
        time_cells = {"measured ms": 1e3 * seconds}
        if machine.platform is not None and not machine.is_divided:
            time_cells["planned ms"] = planned = 1e3 * predicted[dtype]["seconds"]
            time_cells["measured of planned"] = 1e3 * seconds / planned
        recorder.row("Time of a step", dtype=dtype, **time_cells)
        for i, device in enumerate(machine.devices):
            if machine.kind != "GPU":
                break
            peak = tf.config.experimental.get_memory_info(device)["peak"] / _MIB
            planned = predicted[dtype]["bytes"][i] / _MIB
            recorder.row(
                "Peak memory, without what TensorFlow's libraries take",
                dtype=dtype,
                device=device,
                **{"measured MiB": peak, "planned MiB": planned},
                ratio=peak / planned,
            )
        del model
        recorder.row(
            "The same step of plain Keras on one device",
            dtype=dtype,
            **_plain_step(machine, dtype=dtype),
        )


def _plain_step(machine: Machine, *, dtype: str) -> dict[str, float | str]:
    """Measures a step without a pipeline, which may need too much memory."""
    device = machine.devices[0]
    model, batch = models.plain_language_model(machine, dtype=dtype, device=device)
    if machine.kind == "GPU":
        tf.config.experimental.reset_memory_stats(device)
    try:
        seconds = models.time_steps(model, *batch, 3 if machine.quick else 10)
    except tf.errors.ResourceExhaustedError:
        return {"measured ms": "out of memory"}
    found: dict[str, float | str] = {"measured ms": 1e3 * seconds}
    if machine.kind == "GPU":
        peak = tf.config.experimental.get_memory_info(device)["peak"] / _MIB
        found["peak MiB"] = peak
    return found


def overlap_part(recorder: Recorder, machine: Machine, folder: Path) -> None:
    """Draws a measured step, and measures copies that happen during computation."""
    models.need(machine, 2)
    model = models.block_model(machine, remat="none")
    x, y = models.block_data(machine)
    callback = tfgpipe.TimelineCallback(folder / "timeline", steps=(3, 5))
    data = tf.data.Dataset.from_tensors((x, y)).repeat(6)
    model.fit(data, callbacks=[callback], verbose=0)
    shutil.copy(folder / "timeline/pipeline.png", folder.parent / "timeline.png")
    metrics = json.loads((folder / "timeline/report.json").read_text("utf-8"))
    for which in ("theory", "measured"):
        found = {k: v for k, v in metrics[which].items() if np.isscalar(v)}
        recorder.row("A step of encoder blocks, 1F1B", of=which, **found)
    recorder.text("![The measured step below the simulated one](timeline.png)")
    if machine.kind != "GPU":
        recorder.left_out("overlap of copies and computation: no GPU")
        return
    tf.profiler.experimental.start(str(folder / "profile"))
    for _ in range(3):
        model.train_on_batch(x, y)
    tf.profiler.experimental.stop()
    events = [
        event
        for event in executed.profiled_events(folder / "profile")
        if "GPU:" in event.device and event.line.startswith("Stream")
    ]
    if not events:
        recorder.left_out(
            "overlap of copies and computation: the profiler has no events of GPUs, "
            "which often means that users may not read NVIDIA's performance counters"
        )
    for device in sorted({event.device for event in events}):
        copies, kernels = _split(event for event in events if event.device == device)
        both, copied = intervals.overlap(copies, kernels), intervals.total(copies)
        recorder.row(
            "Copies and kernels of three steps",
            device=device,
            **{
                "kernels ms": 1e3 * intervals.total(kernels),
                "copies ms": 1e3 * copied,
                "at the same time": both / copied if copied else 0.0,
            },
        )


def _split(
    events: Iterable[executed.ProfiledEvent],
) -> tuple[list[intervals.Interval], list[intervals.Interval]]:
    """Returns when a device copies, and when it computes."""
    copies: list[intervals.Interval] = []
    kernels: list[intervals.Interval] = []
    for event in events:
        is_copy = event.name.lower().startswith("memcpy")
        (copies if is_copy else kernels).append((event.start, event.end))
    return copies, kernels
