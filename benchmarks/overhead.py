"""What a pipeline adds to the short steps of a tiny model, beside plain Keras.

    python -m benchmarks.overhead

A perceptron whose plain step takes about a millisecond on one core, by `fit`, with
metrics and callbacks, and by the methods of single batches; and pipelines of it. One
process trains all in turns, some hundred steps each. Columns are medians over the
turns, in milliseconds a step, and medians of the ratios to plain Keras in the same
turn. A pipeline of one stage and one microbatch does the same arithmetic as the plain
model. One of eight microbatches does that of the plain model which adds up their
gradients, the last column, and its forwards twice; it has two cores for it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import tables

WIDTH, LAYERS, ROWS = 128, 4, 64
# Stages and microbatches.
PIPELINES = ((1, 1), (2, 2), (2, 8))


def _metrics(count: int) -> list[Any]:
    import keras

    kinds = (
        keras.metrics.MeanSquaredError,
        keras.metrics.MeanAbsoluteError,
        keras.metrics.CosineSimilarity,
        keras.metrics.RootMeanSquaredError,
        keras.metrics.LogCoshError,
    )
    return [kind(name=f"metric_{i}") for i, kind in enumerate(kinds[:count])]


def _callbacks(count: int) -> list[Any]:
    import keras

    def each(batch: int, logs: Any = None) -> None:
        del batch, logs

    return [
        keras.callbacks.LambdaCallback(
            on_train_batch_begin=each, on_train_batch_end=each
        )
        for _ in range(count)
    ]


def models(num_metrics: int) -> list[Any]:
    """Returns the plain model, its pipelines, and one that only cuts mini-batches."""
    import keras
    import tensorflow as tf

    import tfgpipe

    def layers() -> list[Any]:
        return [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]

    class Accumulated(keras.Sequential):
        def train_step(self, data: Any) -> dict[str, Any]:
            count = PIPELINES[-1][1]
            sums: list[Any] = []
            for x, y in zip(*(tf.split(each, count) for each in data[:2]), strict=True):
                with tf.GradientTape() as tape:
                    predicted = self(x, training=True)
                    loss = self.compute_loss(x, y, predicted) / count
                gradients = tape.gradient(loss, self.trainable_variables)
                sums = list(map(tf.add, sums, gradients)) if sums else gradients
                logs = self.compute_metrics(x, y, predicted)
            self.optimizer.apply(sums, self.trainable_variables)
            return logs

    made = [keras.Sequential([keras.Input((WIDTH,)), *layers()])]
    made += [
        tfgpipe.PipelinedModel(layers(), num_stages=K, num_microbatches=M)
        for K, M in PIPELINES
    ]
    made.append(Accumulated([keras.Input((WIDTH,)), *layers()]))
    for model in made:
        model.build((None, WIDTH))
        model.compile("sgd", "mse", metrics=_metrics(num_metrics))
    return made


def _fit(count: int) -> Callable[..., None]:
    def run(model: Any, x: Any, y: Any, steps: int) -> None:
        model.fit(
            x[: steps * ROWS],
            y[: steps * ROWS],
            batch_size=ROWS,
            shuffle=False,
            verbose=0,
            callbacks=_callbacks(count),
        )

    return run


def _each(name: str) -> Callable[..., None]:
    def run(model: Any, x: Any, y: Any, steps: int) -> None:
        method = getattr(model, name)
        data = (x[:ROWS],) if name.startswith("predict") else (x[:ROWS], y[:ROWS])
        for _ in range(steps):
            method(*data)

    return run


CASES: dict[str, tuple[int, Callable[..., None]]] = {
    "fit": (0, _fit(0)),
    "fit, five metrics": (5, _fit(0)),
    "fit, five callbacks": (0, _fit(5)),
    "train_on_batch": (0, _each("train_on_batch")),
    "train_on_batch, five metrics": (5, _each("train_on_batch")),
    "test_on_batch": (0, _each("test_on_batch")),
    "predict_on_batch": (0, _each("predict_on_batch")),
}


def measure(
    name: str,
    run: Callable[..., None],
    models: Sequence[Any],
    *,
    steps: int,
    turns: int,
) -> tables.Row:
    """Returns the row of a case."""
    import numpy as np

    x = np.random.default_rng(0).normal(size=(steps * ROWS, WIDTH)).astype("float32")
    for model in models:
        run(model, x, x, 2)
    rounds = []
    for _ in range(turns):
        taken = []
        for model in models:
            start = time.perf_counter()
            run(model, x, x, steps)
            taken.append((time.perf_counter() - start) / steps)
        rounds.append(taken)
    row: tables.Row = {"case": name}
    row["plain ms"] = 1e3 * statistics.median(each[0] for each in rounds)
    names = [f"K={K} M={M}" for K, M in PIPELINES]
    if "predict" not in name and "test" not in name:
        names.append(f"M={PIPELINES[-1][1]} alone")
    for index, each_name in enumerate(names, 1):
        row[f"{each_name} ms"] = 1e3 * statistics.median(each[index] for each in rounds)
        row[f"ratio {each_name}"] = statistics.median(
            each[index] / each[0] for each in rounds
        )
    return row


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Overhead of short steps.")
    parser.add_argument("--steps", type=int, default=300, help="steps of a turn")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    flags = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    import tfgpipe

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tfgpipe.make_logical_cpus(2)
    by_count = {
        count: models(count) for count in {count for count, _ in CASES.values()}
    }
    rows = [
        measure(name, run, by_count[count], steps=flags.steps, turns=flags.turns)
        for name, (count, run) in CASES.items()
    ]
    print(tables.draw(rows))
    if flags.json:
        tables.write_json(flags.json, rows)


if __name__ == "__main__":
    main()
