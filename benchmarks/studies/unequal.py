"""A cut for the speeds of unequal devices makes steps 1.36 to 2.22 times as fast.

Devices of which some are slower: the gain of a cut for their speeds.

    python -m benchmarks.studies.unequal

Equal layers whose passes sleep, longer on a slower device, on logical CPU devices. The
first row of each speeds has as many layers on each device, the second those of
`tfgpipe.plan(..., device_speeds=...)`, the third the order that a search finds for
these as well. Columns: milliseconds of a step, from the first to the last action, by
`tfgpipe.simulate` and measured, the mean of `--steps` steps; both gains over the first
row; the largest difference of a trained weight from the plain model's.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import tfgpipe
from benchmarks import tables
from benchmarks.studies import padded
from tfgpipe import Costs

# Units of the forward of a layer, and of its two gradients.
PASSES = (1.0, 1.0, 1.0)


def rows(speeds: Sequence[float], flags: Any) -> list[tables.Row]:
    """Returns a row for each cut and order."""
    import keras

    P, M = len(speeds), flags.microbatches
    model = keras.Sequential([keras.Input((8,))])
    for _ in range(flags.layers):
        model.add(keras.layers.Dense(8))
    options: dict[str, Any] = {"num_stages": P, "num_microbatches": M, "remat": "none"}
    named = tfgpipe.schedules.make("1f1b", num_stages=P, num_microbatches=M)
    even = tfgpipe.plan(model, **options).calls_per_stage
    plan = tfgpipe.plan(model, device_speeds=speeds, **options).calls_per_stage
    first: tuple[float, float] | None = None
    results: list[tables.Row] = []
    for cut, order in ((even, named), (plan, named), (plan, None)):
        forward, into, of_weights = (
            [flags.unit * n * x / speed for x, speed in zip(cut, speeds, strict=True)]
            for n in PASSES
        )
        costs = Costs(
            forward=forward,
            backward=[a + b for a, b in zip(into, of_weights, strict=True)],
            backward_input=into,
            backward_weight=of_weights,
        )
        order = order or tfgpipe.best_schedule(costs, range(P), M).schedule
        predicted = tfgpipe.simulate(order, costs).timeline.step_time
        timeline, exact = padded.train(
            order,
            cut,
            PASSES,
            unit=flags.unit,
            steps=flags.steps,
            speeds=speeds,
            learning_rate=0.001,  # Many linear layers.
        )
        measured = timeline.step_time
        first = first or (predicted, measured)
        results.append(
            {
                "speeds": ", ".join(f"{x:g}" for x in speeds),
                "layers": " ".join(map(str, cut)),
                "order": order.name,
                "predicted ms": 1e3 * predicted,
                "measured ms": 1e3 * measured,
                "predicted gain": first[0] / predicted,
                "measured gain": first[1] / measured,
                "exact": exact,
            }
        )
    return results


def main() -> None:
    """Prints a table of all speeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--speeds",
        type=lambda text: tuple(map(float, text.split(","))),
        nargs="+",
        default=[(1, 0.5), (1, 0.25), (1, 1, 0.5, 1)],
        help="of the devices, with commas",
    )
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.01, help="seconds")
    parser.add_argument("--steps", type=int, default=3)
    flags = parser.parse_args()
    import tensorflow as tf

    # Those that sleep hold a thread each.
    tf.config.threading.set_inter_op_parallelism_threads(64)
    tfgpipe.make_logical_cpus(max(map(len, flags.speeds)))
    found = itertools.chain(*(rows(speeds, flags) for speeds in flags.speeds))
    print(tables.draw([*found]))


if __name__ == "__main__":
    main()
