"""Each named schedule has the bubble that is simulated, within a percentage point.

Named schedules by formula, by simulation and as measured, on passes that sleep.

    python -m benchmarks.studies.padded
    python -m benchmarks.studies.padded --sizes 2,4 --passes 1,1,1 --schedules zbv

A model of 2 P layers on P logical CPU devices, of which each pass sleeps: devices run
side by side on any number of cores, and what is measured is the schedule and the
executor. Schedules with one stage on each device have two layers a stage, others one.
Passes of a device wait for each other, as on an accelerator.

Columns: `F,B,W`, the lengths of the passes of a layer, in units of `--unit` seconds;
the bubble, by the formula of the schedule's docstring where there is one for these
lengths, by `tfgpipe.simulate`, and measured, from the first to the last action, the
mean of `--steps` steps; `held`, the most microbatches of P-th parts of the model in
flight on a device, by formula, by simulation and as measured; `exact`, the largest
difference of a trained weight from the plain model's.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import tfgpipe
from benchmarks import tables
from tfgpipe import Costs, schedules

Passes = tuple[float, float, float]

# Units that devices wait, by the formulas of the docstrings: of f, b, w, the passes of
# all layers of a device, P and v.
BUBBLES: dict[str, Callable[[float, float, float, int, int], float]] = {
    "gpipe": lambda f, b, w, P, v: (P - 1) * (f + b + w),
    "1f1b": lambda f, b, w, P, v: (P - 1) * (f + b + w),
    "eager_1f1b": lambda f, b, w, P, v: (P - 1) * (f + b + w),
    "zero_bubble": lambda f, b, w, P, v: (P - 1) * (f + b - min(f, b, w)),
    "interleaved": lambda f, b, w, P, v: (P - 1) * (f + b + w) / v,
    "looped_bfs": lambda f, b, w, P, v: (P - 1) * (f + b + w) / v,
}
# Those that wait for P - 1 passes of a stage, where passes are equal.
EQUAL = ("interleaved_zb", "zbv", "dualpipe_v")
# The most microbatches in flight on a device, by the docstrings.
HELD: dict[str, Callable[[int, int, int], float]] = {
    "gpipe": lambda P, v, M: M,
    "1f1b": lambda P, v, M: min(P, M),
    "eager_1f1b": lambda P, v, M: min(2 * P - 1, M),
    "zero_bubble": lambda P, v, M: min(P, M),
    "interleaved": lambda P, v, M: min(2 * (P - 1) + (v - 1) * P + 1, v * M) / v,
    "looped_bfs": lambda P, v, M: M,
    "interleaved_zb": lambda P, v, M: min(P, M),
    "zbv": lambda P, v, M: min(P, M),
    "v_half": lambda P, v, M: min(P // 2 + 1, M),
    "v_min": lambda P, v, M: min((P + 4) // 3, M),
    "dualpipe_v": lambda P, v, M: min(P + 1 / 2, M),
}


def row(name: str, P: int, M: int, passes: Passes, *, unit: float, steps: int) -> Any:
    """Returns what a schedule takes by formula, by simulation and as measured.

    Args:
        name: Of the schedule.
        P: Number of devices.
        M: Number of microbatches.
        passes: Units of the forward of a layer, and of its two gradients.
        unit: Seconds.
        steps: Number of timed steps.
    """
    policy = schedules.find(name)
    assert isinstance(policy, schedules.SchedulePolicy)
    v = min(policy.stages_per_device)
    schedule = policy(v * P, M, num_devices=P)
    f, b, w = (2 / v * x for x in passes)  # Of a stage.
    costs = Costs(forward=f, backward=b + w, backward_input=b, backward_weight=w)
    simulated = tfgpipe.simulate(schedule, costs).timeline
    work = 2 * M * sum(passes)
    waits = None
    if formula := BUBBLES.get(name):
        waits = formula(v * f, v * b, v * w, P, v)
    elif name in EQUAL and f == b == w:
        waits = (P - 1) * f
    layers = [2 * P // schedule.num_stages] * schedule.num_stages
    measured, exact = train(schedule, layers, passes, unit=unit, steps=steps)
    return {
        "schedule": name,
        "P": P,
        "M": M,
        "F,B,W": ",".join(f"{x:g}" for x in passes),
        "bubble": "" if waits is None else waits / (work + waits),
        "simulated": simulated.bubble,
        "measured": measured.bubble,
        "held": HELD[name](P, v, M),
        "simulated held": max(simulated.peak_in_flight) / v,
        "measured held": max(measured.peak_in_flight) / v,
        "exact": exact,
    }


def train(
    schedule: tfgpipe.Schedule,
    layers_per_stage: Sequence[int],
    passes: Passes,
    *,
    unit: float,
    steps: int,
    speeds: Sequence[float] | None = None,
    learning_rate: float = 0.1,
) -> tuple[tfgpipe.simulation.Timeline, float]:
    """Trains layers that sleep as a pipeline, and the same as the plain model.

    Args:
        schedule: The order of the actions.
        layers_per_stage: Number of layers of each stage.
        passes: Units of the forward of a layer, and of its two gradients.
        unit: Seconds, on a device of speed 1.
        steps: Number of timed steps.
        speeds: Relative speed of each device. None for equal ones.
        learning_rate: Of both models.

    Returns:
        The mean timeline, and the largest difference of a trained weight.
    """
    import keras

    P, M = schedule.num_devices, schedule.num_microbatches
    devices = [
        d
        for d, n in zip(schedule.placement, layers_per_stage, strict=True)
        for _ in range(n)
    ]
    units = [unit / speed for speed in speeds or [1.0] * P]
    x = np.random.default_rng(0).normal(size=(2 * M, 8)).astype("float32")
    models = []
    for sleeps in (True, False):
        keras.utils.set_random_seed(0)
        locks = [threading.Lock() for _ in range(P)]
        layers = [
            sleeping_layer([sleeps * units[p] * n for n in passes], locks[p])
            for p in devices
        ]
        # One before them, so that the first of them has an input gradient as well.
        first = keras.layers.Dense(8)
        model = keras.Sequential([keras.Input((8,)), first, *layers])
        if sleeps:
            model = tfgpipe.pipeline(
                model,
                partition=[1 + layers_per_stage[0], *layers_per_stage[1:]],
                num_microbatches=M,
                schedule=schedule,
                devices=[f"CPU:{p}" for p in range(P)],
                remat="none",
            )
        model.compile(keras.optimizers.SGD(learning_rate), "mse")
        models.append(model)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        timing = tfgpipe.TimelineCallback(folder, steps=(3, 2 + steps))
        for model, callbacks in zip(models, ([timing], []), strict=True):
            model.fit(
                *(x, np.cos(x)),
                batch_size=len(x),
                epochs=2 + steps,
                verbose=0,
                callbacks=callbacks,
            )
            found.append(model.get_weights())
    assert timing.timeline is not None
    return timing.timeline, max(
        float(np.max(np.abs(a - b))) for a, b in zip(*found, strict=True)
    )


def sleeping_layer(seconds: Sequence[float], lock: threading.Lock) -> Any:
    """Returns a dense layer whose passes take so many seconds of its device."""
    import keras
    import tensorflow as tf

    def after(n: float, x: Any, *others: Any) -> Any:
        """Returns x, after n seconds in which nothing else of the device runs."""

        def sleep(x: np.ndarray, *_: np.ndarray) -> np.ndarray:
            with lock:
                time.sleep(n)
            return x

        if not n:
            return x
        slept = tf.numpy_function(sleep, [x, *others], x.dtype, stateful=False)
        return tf.ensure_shape(slept, x.shape)

    class Sleeping(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

        def call(self, x: Any) -> Any:
            @tf.custom_gradient
            def product(x: Any, kernel: Any) -> Any:
                def gradient(dy: Any) -> Any:
                    dx = after(seconds[1], tf.matmul(dy, kernel, transpose_b=True))
                    # A device runs one after the other.
                    of_kernel = tf.matmul(x, dy, transpose_a=True)
                    return dx, after(seconds[2], of_kernel, dx)

                return after(seconds[0], tf.matmul(x, kernel)), gradient

            return product(x, tf.convert_to_tensor(self.kernel))

    return Sleeping()


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a row for each schedule, number of microbatches, and lengths of passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sizes",
        type=lambda text: tuple(map(int, text.split(","))),
        nargs="+",
        default=[(2, 8), (4, 8), (4, 16)],
        help="P and M, with a comma",
    )
    parser.add_argument(
        "--passes",
        type=lambda text: tuple(map(float, text.split(","))),
        nargs="+",
        default=[(1.0, 1.0, 1.0), (1.0, 1.5, 0.5)],
        help="units of F, B and W of a layer, with commas",
    )
    parser.add_argument("--schedules", nargs="+", default=schedules.NAMES)
    parser.add_argument("--unit", type=float, default=0.02, help="seconds")
    parser.add_argument("--steps", type=int, default=3)
    flags = parser.parse_args(arguments)
    import tensorflow as tf

    # Those that sleep hold a thread each.
    tf.config.threading.set_inter_op_parallelism_threads(64)
    tfgpipe.make_logical_cpus(max(P for P, _ in flags.sizes))
    for passes in flags.passes:
        for P, M in flags.sizes:
            times = {"unit": flags.unit, "steps": flags.steps}
            rows = [row(name, P, M, passes, **times) for name in flags.schedules]
            print(tables.draw_markdown(rows), flush=True)


if __name__ == "__main__":
    main()
