"""Tracing a step takes no more than linearly longer with more microbatches.

Seconds to trace a train step of many microbatches, under each remat policy.

    python -m benchmarks.studies.tracing --stages=8 --microbatches=1024

Layers are tiny, so that what grows with the number of actions shows: emission by the
executor, and the questions that it asks schedule and policy about each action.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import tfgpipe
from benchmarks import tables
from tfgpipe import remat as remat_lib


def measure(*, num_stages: int, num_microbatches: int, remat: remat_lib.Name) -> float:
    """Returns the seconds that the train step of a new model takes to trace."""
    import keras
    import tensorflow as tf

    layers = [keras.layers.Dense(4) for _ in range(num_stages)]
    model = tfgpipe.PipelinedModel(
        layers,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        schedule="1f1b",
        remat=remat,
    )
    model.compile("sgd", "mse")
    examples = tf.zeros([num_microbatches, 4])
    model.build(examples.shape)
    step: Any = tf.function(model.train_step)
    start = time.perf_counter()
    step.get_concrete_function((examples, examples))
    return time.perf_counter() - start


def main() -> None:
    """Measures each policy, and prints how much longer than `"stage"` it takes."""
    parser = argparse.ArgumentParser(description="Measures tracing of a step.")
    parser.add_argument("--stages", type=int, default=8, help="K")
    parser.add_argument("--microbatches", type=int, default=1024, help="M")
    flags = parser.parse_args()
    tfgpipe.make_logical_cpus(flags.stages)
    rows: list[tables.Row] = []
    for remat in remat_lib.NAMES:
        seconds = measure(
            num_stages=flags.stages, num_microbatches=flags.microbatches, remat=remat
        )
        row: tables.Row = {"remat": remat, "seconds": seconds}
        rows.append(
            {**row, "longer": seconds - (rows[0]["seconds"] if rows else seconds)}
        )
    print(tables.draw(rows))


if __name__ == "__main__":
    main()
