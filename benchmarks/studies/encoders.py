"""Two encoders side by side make a step up to 1.32 times as fast as in a line.

Two encoders side by side: the gain of stages that begin with an encoder each.

    python -m benchmarks.studies.encoders

Equal layers whose passes sleep, on a logical CPU device a stage: two encoders and a
head, under 1F1B. The first row has both encoders in a line, so that the second waits
for the first; the second row has them side by side in the cut with the least
bottleneck, of which one stage may have layers of both; the third has the cut of
`tfgpipe.plan`. Columns: layers in each stage; milliseconds of a step, by
`tfgpipe.simulate` and measured, the mean of `--steps` steps; both gains over the first
row.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

import tfgpipe
from benchmarks import tables
from benchmarks.studies.padded import sleeping_layer
from benchmarks.studies.unequal import PASSES
from tfgpipe import Costs
from tfgpipe._util import stage_spans
from tfgpipe.partition import best_partition


def make_model(
    sizes: Sequence[int],
    seconds: Sequence[float],
    stages: Sequence[int],
    *,
    is_line: bool,
) -> Any:
    """Returns two encoders and a head.

    Args:
        sizes: Number of layers of the encoders and of the head.
        seconds: Seconds of the passes of a layer.
        stages: Number of layers in each stage, all of whose passes are in turn.
        is_line: True for a second encoder of the first one's outputs.
    """
    import keras

    locks = ((threading.Lock(), n) for n in stages)
    each = itertools.chain(*(itertools.repeat(lock, n) for lock, n in locks))

    def stack(x: Any, num: int) -> Any:
        for _ in range(num):
            x = sleeping_layer(seconds, next(each))(x)
        return x

    def encoder(num: int) -> Any:
        inputs = keras.Input((8,))
        # One before them, so that the first of them has an input gradient as well.
        return keras.Model(inputs, stack(keras.layers.Dense(8)(inputs), num))

    first, second, head = sizes
    image, text = keras.Input((8,)), keras.Input((8,))
    x = encoder(first)(image)
    y = encoder(second)(keras.layers.Add()([x, text]) if is_line else text)
    return keras.Model([image, text], stack(keras.layers.Add()([x, y]), head))


def measure(
    model: Any, partition: Sequence[int], layers: Sequence[int], flags: Any
) -> tuple[float, float]:
    """Returns the simulated and the measured seconds of a step."""
    import numpy as np

    M, K = flags.microbatches, len(partition)
    pipelined = tfgpipe.pipeline(
        model,
        partition=[*partition],
        num_microbatches=M,
        schedule="1f1b",
        remat="none",
        devices=[f"CPU:{k}" for k in range(K)],
    )
    pipelined.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(2 * M, 8)).astype("float32")
    with tempfile.TemporaryDirectory() as folder:
        timing = tfgpipe.TimelineCallback(folder, steps=(3, 2 + flags.steps))
        pipelined.fit(
            *([x, x], np.cos(x)),
            batch_size=len(x),
            epochs=2 + flags.steps,
            verbose=0,
            callbacks=[timing],
        )
    forward, *backward = ([flags.unit * n * x for n in layers] for x in PASSES)
    costs = Costs(
        forward=forward, backward=[a + b for a, b in zip(*backward, strict=True)]
    )
    simulated = tfgpipe.simulate(pipelined.schedule, costs).timeline.step_time
    assert timing.timeline is not None
    return simulated, timing.timeline.step_time


def rows(flags: Any) -> list[tables.Row]:
    """Returns a row for each way."""
    seconds = [flags.unit * x for x in PASSES]
    options = {"num_stages": flags.stages, "num_microbatches": flags.microbatches}
    results: list[tables.Row] = []
    first: tuple[float, float] | None = None
    for name, is_line in (("line", True), ("least bottleneck", False), ("plan", False)):
        # The layers are in turn in all stages alike, until the stages are known.
        model = make_model(flags.layers, seconds, [sum(flags.layers)], is_line=is_line)
        plan = tfgpipe.plan(model, balance="params", schedule="1f1b", **options)
        partition = plan.calls_per_stage
        if name != "plan":
            costs = [x.weights.count for x in plan.profile.layers]
            partition = best_partition(costs, num_stages=flags.stages)
        sleeps = [x.name.startswith("sleeping") for x in plan.profile.layers]
        layers = [sum(sleeps[span]) for span in stage_spans(partition)]
        model = make_model(flags.layers, seconds, layers, is_line=is_line)
        simulated, measured = measure(model, partition, layers, flags)
        first = first or (simulated, measured)
        results.append(
            {
                "encoders": name,
                "layers": " ".join(map(str, layers)),
                "simulated ms": 1e3 * simulated,
                "measured ms": 1e3 * measured,
                "simulated gain": first[0] / simulated,
                "measured gain": first[1] / measured,
            }
        )
    return results


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--layers",
        type=lambda text: tuple(map(int, text.split(","))),
        default=(7, 7, 2),
        help="of both encoders and the head, with commas",
    )
    parser.add_argument("--stages", type=int, default=5)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.01, help="seconds")
    parser.add_argument("--steps", type=int, default=3)
    flags = parser.parse_args()
    import tensorflow as tf

    # Those that sleep hold a thread each.
    tf.config.threading.set_inter_op_parallelism_threads(64)
    tfgpipe.make_logical_cpus(flags.stages)
    print(tables.draw(rows(flags)))


if __name__ == "__main__":
    main()
