"""How often layers are traced again as the lengths of batches vary.

    python -m benchmarks.retraces --lengths=20

Batches of as many random lengths go through a plain model and the same one pipelined,
by `fit` and by calling the model eagerly with gradients. Counted is how often Python
runs the `call` of a layer: eagerly a plain layer runs once a batch, a traced one once a
trace.
"""

from __future__ import annotations

import argparse
import time

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from benchmarks import tables


class Counted(keras.layers.Layer):
    """A dense layer that notes how often its `call` runs."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(16, activation="relu")
        self.num_calls = 0

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Builds the layer inside."""
        self.dense.build(input_shape)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Counts."""
        self.num_calls += 1
        return self.dense(x)


def measure(*, pipelined: bool, fit: bool, num_lengths: int) -> tables.Row:
    """Returns a row for one model under one way of training."""
    counted = Counted()
    layers = [keras.layers.Dense(16), counted, keras.layers.Dense(16)]
    if pipelined:
        layers = [tfgpipe.PipelinedLayer(layers, num_stages=2, num_microbatches=4)]
    model = keras.Sequential([keras.Input((None, 16)), *layers])
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    lengths = rng.permutation(np.arange(8, 8 + num_lengths))
    batches = [rng.standard_normal((8, n, 16), dtype=np.float32) for n in lengths]
    counted.num_calls = 0
    start = time.perf_counter()
    if fit:
        spec = tf.TensorSpec((None, None, 16))
        data = tf.data.Dataset.from_generator(
            lambda: ((x, x) for x in batches), output_signature=(spec, spec)
        )
        model.fit(data, verbose=0)
    else:
        for x in map(tf.constant, batches):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x, training=True) ** 2)
            tape.gradient(loss, model.trainable_variables)
    return {
        "model": "pipelined" if pipelined else "plain",
        "by": "fit" if fit else "eager",
        "batches": len(batches),
        "calls": counted.num_calls,
        "s": time.perf_counter() - start,
    }


def main() -> None:
    """Measures both models both ways."""
    flags = _parse()
    tfgpipe.make_logical_cpus(2)
    rows = [
        measure(pipelined=pipelined, fit=fit, num_lengths=flags.lengths)
        for fit in (True, False)
        for pipelined in (False, True)
    ]
    print(tables.draw(rows))
    if flags.json:
        tables.write_json(flags.json, rows)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Counts how often layers are traced as lengths vary."
    )
    parser.add_argument("--lengths", type=int, default=20)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
