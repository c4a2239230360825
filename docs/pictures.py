"""The pictures of `README.md`, of the home page and of how-it-works.md.

    python -m docs.pictures

All but `how-mesh.png` are of simulated steps. One forward takes 10 ms, one backward 20,
and the next device has a result 1 ms after it is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import tfgpipe
from tfgpipe import Costs, Schedule, Timeline, schedules, simulate

FOLDER = Path(__file__).parent

K, M = 4, 8
COSTS = Costs(forward=0.010, backward=0.020, latency=0.001)
HALF = dataclasses.replace(COSTS, forward=0.005, backward=0.010)
MIB = 2**20


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


def _home(path: Path) -> None:
    """Two schedules, the first and the one with the smallest bubble."""
    tfgpipe.plot_timelines(
        [
            _timeline(schedules.gpipe(K, M), COSTS, "gpipe"),
            _timeline(schedules.zero_bubble(K, M), COSTS, "zero_bubble"),
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
            _timeline(schedules.zero_bubble(K, M), COSTS, "zero_bubble"),
        ],
        path=path,
    )


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


def _mesh(path: Path) -> None:
    """Which device holds what, of the model in `how_it_works.md` on two replicas."""
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
            keras.Model(x, f), num_microbatches=4, balance=[2, 2, 2]
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


PICTURES: dict[str, Callable[[Path], None]] = {
    "pipeline.png": _pipeline,
    "home-schedules.png": _home,
    "how-schedules.png": _schedules,
    "how-remat.png": _remat,
    "how-memory-gpipe.png": _memory(schedules.gpipe(K, M)),
    "how-memory-1f1b.png": _memory(schedules.one_f_one_b(K, M)),
    "how-mesh.png": _mesh,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        draw(FOLDER / name)
        _shrink(FOLDER / name)
