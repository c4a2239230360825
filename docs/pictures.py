"""The pictures in the documents, all in one style: `make pictures`.

    python -m docs.pictures [NAME ...]

Steps are simulated unless the name begins with `step-`: one forward takes 10 ms, one
backward 20, and the next device has a result 1 ms after it is made. Those with `step-`
are measured here, on a core a device; `growth.png` is drawn from the measurements in
`benchmarks/studies/growth.json`, `speed.png` from the newest in `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import tfgpipe
from tfgpipe import Costs, Schedule, Timeline, schedules, simulate

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "assets"

K, M = 4, 8
COSTS = Costs(forward=0.010, backward=0.020, latency=0.001)
HALF = dataclasses.replace(COSTS, forward=0.005, backward=0.010)
MIB = 2**20
PLAN = (
    "--params=lm.OneBillion --device=h100-80g --devices=64 --best=1 "
    "--set=training.batch_size=1024 --set=precision.policy=mixed_bfloat16 "
    "--set=model.num_heads=16"
)


def _timeline(schedule: Schedule, costs: Costs, title: str) -> Timeline:
    return dataclasses.replace(simulate(schedule, costs).timeline, title=title)


def _pipeline(path: Path) -> None:
    """The same step without microbatches, and with eight of them."""
    whole = dataclasses.replace(COSTS, forward=M * 0.010, backward=M * 0.020)
    tfgpipe.plot_timelines(
        [
            _timeline(schedules.gpipe(K, 1), whole, "four stages, whole mini-batch"),
            _timeline(
                schedules.one_f_one_b(K, M), COSTS, "four stages, eight microbatches"
            ),
        ],
        path=path,
    )


def _schedules(path: Path) -> None:
    """The four schedules with a name, on one axis of time."""
    P = K
    interleaved = schedules.interleaved(2 * P, M, num_devices=P)
    tfgpipe.plot_timelines(
        [
            _timeline(schedules.gpipe(K, M), COSTS, "gpipe"),
            _timeline(schedules.one_f_one_b(K, M), COSTS, "1f1b"),
            _timeline(interleaved, HALF, "interleaved, two stages a device"),
            _timeline(
                schedules.make("zero_bubble", num_stages=K, num_microbatches=M),
                COSTS,
                "zero_bubble",
            ),
        ],
        path=path,
    )


def _bubbles(path: Path) -> None:
    """The bubble of the four schedules over the number of microbatches."""
    tfgpipe.plot_bubbles(K, path=path)


def _remat(path: Path) -> None:
    """What rematerialisation adds to a step."""
    order = schedules.one_f_one_b(K, M)
    recomputing = dataclasses.replace(COSTS, recompute=COSTS.forward)
    tfgpipe.plot_timelines(
        [
            _timeline(order, COSTS, '1f1b, remat="none"'),
            _timeline(order, recomputing, '1f1b, remat="stage"'),
        ],
        path=path,
    )


def _memory(schedule: Schedule) -> Callable[[Path], None]:
    """What devices hold in a step: 20 MiB a microbatch in flight, and 60 of weights."""
    costs = dataclasses.replace(COSTS, kept_bytes=20 * MIB, fixed_bytes=60 * MIB)

    def draw(path: Path) -> None:
        tfgpipe.plot_memory(simulate(schedule, costs), path=path)

    return draw


def _step(name: schedules.Name) -> Callable[[Path], None]:
    """A step of eight transformer blocks on two devices, simulated and measured."""

    def draw(path: Path) -> None:
        from benchmarks.schedules import make_sides, timelines

        P = 2
        cores = sorted(os.sched_getaffinity(0))[:P]
        side = make_sides("transformer", cores=cores, num_microbatches=M)[name]
        ((theory, measured),) = timelines({name: side}).values()
        tfgpipe.plot_timelines(
            [
                dataclasses.replace(theory, title=f"{name}, simulated"),
                dataclasses.replace(measured, title=f"{name}, measured"),
            ],
            path=path,
        )

    return draw


def _growth(path: Path) -> None:
    """Step time, start-up, memory and graph over M, K and depth, as measured."""
    from benchmarks.studies import growth

    measured = ROOT / "benchmarks" / "studies" / "growth.json"
    growth.draw(json.loads(measured.read_text("utf-8")), path)


def _speed(path: Path) -> None:
    """Steps beside plain Keras, torch and JAX, as measured."""
    from benchmarks.__main__ import draw

    draw(path)


def _planner(path: Path) -> None:
    """What each device holds, of the best plan in docs/how-to/planner.md."""
    command = [sys.executable, "-m", "trainer.plan", *PLAN.split()]
    subprocess.run([*command, f"--picture={path}"], cwd=ROOT, check=True)


def _mesh(path: Path) -> None:
    """Which device holds what, of the model in `how-it-works.md` on two replicas."""
    import keras

    from tfgpipe.report import device_memory

    tfgpipe.make_logical_cpus(6)
    strategy = tfgpipe.PipelineStrategy(num_stages=3, num_replicas=2)
    with strategy.scope():
        x = keras.Input((64,), name="x")
        a = keras.layers.Dense(64, activation="relu", name="a")(x)
        b = keras.layers.Dense(64, activation="relu", name="b")(a)
        c = keras.layers.Dropout(0.1, name="c")(b)
        d = keras.layers.Dense(64, activation="relu", name="d")(c)
        e = keras.layers.Add(name="e")([d, a])
        f = keras.layers.Dense(1, name="f")(e)
        model = tfgpipe.pipeline(
            keras.Model(x, f), num_microbatches=4, partition=[2, 2, 2]
        )
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        tfgpipe.plot_mesh(device_memory(model), path=path)


def _shrink(path: Path) -> None:
    """Leaves a picture as many colours as can be told apart in it."""
    from PIL import Image

    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


# By `python -m tests.accelerator_check`, on a device that is not here, and by
# `python -m benchmarks.studies.rematerialization --picture=FILE`.
MEASURED = ("step-h200", "remat-curve")
PICTURES: dict[str, Callable[[Path], None]] = {
    "pipeline": _pipeline,
    "schedules": _schedules,
    "bubbles": _bubbles,
    "remat": _remat,
    "memory-gpipe": _memory(schedules.gpipe(K, M)),
    "memory-1f1b": _memory(schedules.one_f_one_b(K, M)),
    "step-1f1b": _step("1f1b"),
    "step-interleaved": _step("interleaved"),
    "growth": _growth,
    "speed": _speed,
    "planner-memory": _planner,
    "mesh": _mesh,
}


def main() -> None:
    """Draws the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description="Draws the pictures of the documents.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    for name in parser.parse_args().names or PICTURES:
        path = FOLDER / f"{name}.png"
        PICTURES[name](path)
        _shrink(path)


if __name__ == "__main__":
    main()
