"""Batch normalization over replicas, against one model that has all their rows."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.marks import nightly
from tfgpipe.stage import normalization

layers = keras.layers


class Together(layers.Layer):
    """Normalises microbatch m of all replicas together.

    Its input is the rows of the first replica, those of the second, and so on. Moving
    averages move once a microbatch, or once by all.
    """

    def __init__(self, sizes, num_microbatches, batch_norm, **arguments):
        super().__init__()
        self.sizes = sizes
        self.num_microbatches = num_microbatches
        self.batch_norm = batch_norm
        self.norm = layers.BatchNormalization(**arguments)

    def build(self, shape):
        self.norm.build(shape)

    def call(self, x, training=None):
        averages = self.norm.non_trainable_variables
        before = [tf.identity(average.value) for average in averages]
        of_replica = np.split(np.arange(sum(self.sizes)), np.cumsum(self.sizes)[:-1])
        # Replicas of fewer rows than microbatches have empty ones at the end.
        cut = [np.array_split(rows, self.num_microbatches) for rows in of_replica]
        together = [np.concatenate(pieces) for pieces in zip(*cut, strict=True)]
        made = [
            self.norm(tf.gather(x, rows), training=True)
            for rows in together
            if rows.size
        ]
        if self.batch_norm == "deferred":
            for average, value in zip(averages, before, strict=True):
                average.assign(value)
            self.norm(x, training=True)
        order = np.argsort(np.concatenate(together))
        return tf.gather(tf.concat(made, axis=0), order)


def stack(norm):
    return [
        layers.Dense(6, use_bias=False),
        norm(momentum=0.8),
        layers.Activation("relu"),
        layers.Dense(4, use_bias=False),
        norm(momentum=0.5),
        layers.Dense(3),
    ]


def sum_of_squares(y):
    c = tf.reshape(tf.range(tf.size(y[0]), dtype=y.dtype), y.shape[1:])
    return tf.reduce_sum((c + 1) * y * y)


def step_of(strategy, model, x, sizes):
    """Returns outputs and gradients of one step in a strategy, summed over replicas."""
    rows = np.split(x, np.cumsum(sizes)[:-1])
    given = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(rows[context.replica_id_in_sync_group])
    )

    @tf.function
    def step(given):
        def on_replica(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = model(x, training=True)
                loss = sum_of_squares(y)
            grads = tape.gradient(loss, [x, *model.trainable_variables])
            return y, grads[0], grads[1:]

        return strategy.run(on_replica, args=(given,))

    *rowwise, grads = step(given)
    joined = [np.concatenate(strategy.experimental_local_results(v)) for v in rowwise]
    return [*joined, *(sum(strategy.experimental_local_results(g)) for g in grads)]


def step_alone(model, x):
    """Returns the same of a model that is called on all rows, eagerly."""
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = model(x, training=True)
        loss = sum_of_squares(y)
    return [y, *tape.gradient(loss, [x, *model.trainable_variables])]


CASES = [
    # Rows of each replica, M, remat, batch_norm.
    ((4, 2), 3, "stage", "deferred"),  # Two rows leave the third microbatch empty.
    ((4, 0), 2, "layer", "microbatch"),
    ((4, 2), 2, "layer", "deferred"),
    ((1, 3), 2, "except_last", "microbatch"),
    ((1, 3), 2, "except_last", "deferred"),
    ((4, 2), 3, "products", "deferred"),
    *nightly(
        [
            ((6, 6), 1, "stage", "microbatch"),
            ((6, 6), 3, "layer", "deferred"),
            ((7, 4), 3, "none", "deferred"),
            ((5, 5), 2, "except_last", "microbatch"),
            ((4, 0), 3, "layer", "microbatch"),
            ((4, 0), 2, "none", "microbatch"),
            ((3, 2, 4), 2, "stage", "deferred"),
        ]
    ),
]


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(("sizes", "num_microbatches", "remat", "batch_norm"), CASES)
def test_microbatches_are_normalised_over_replicas(
    sizes, num_microbatches, remat, batch_norm
):
    alone = keras.Sequential(
        stack(lambda **kw: Together(sizes, num_microbatches, batch_norm, **kw))
    )
    strategy = tfgpipe.PipelineStrategy(num_stages=2, num_replicas=len(sizes))
    with strategy.scope():
        norm = layers.BatchNormalization
        pipelined = tfgpipe.PipelinedLayer(
            stack(lambda **kw: norm(synchronized=True, **kw)),
            num_microbatches=num_microbatches,
            remat=remat,
            batch_norm=batch_norm,
        )
        pipelined.build((None, 5))
    rng = np.random.default_rng(0)
    alone(np.zeros((sum(sizes), 5)))
    for a, b in zip(alone.variables, pipelined.variables, strict=True):
        # With biases of zero some gradients would be sums that cancel.
        b.assign(b + rng.uniform(0.1, 0.5, b.shape))
        a.assign(b.value)
    for _ in range(2):
        x = rng.normal(1.0, 2.0, (sum(sizes), 5))
        expected = step_alone(alone, x)
        received = step_of(strategy, pipelined, x, sizes)
        compare.assert_close(expected, received, 1e-10, 1e-11)
        for a, b in zip(alone.variables, pipelined.variables, strict=True):
            # A weight has one gradient, a moving average one value: on all replicas.
            for copy in strategy.experimental_local_results(b.value):
                compare.close(a.numpy(), copy.numpy(), a.path, 1e-12, 1e-13)


def fitted(strategy, make, rows=20, **arguments):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), *make()])
        model.compile("sgd", "mse", **arguments)
    x = np.random.default_rng(1).normal(1.0, 2.0, (rows, 5)).astype("float32")
    model.fit(x, x[:, :3], batch_size=8, shuffle=False, epochs=2, verbose=0)
    return compare.values(model)


def synchronized(**arguments):
    return layers.BatchNormalization(synchronized=True, **arguments)


@pytest.mark.nightly
def test_one_microbatch_is_what_keras_does_with_replicas():
    expected = fitted(
        compare.mirrored(2),
        lambda: stack(synchronized),
    )
    received = fitted(
        tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2),
        lambda: [tfgpipe.PipelinedLayer(stack(synchronized), num_microbatches=1)],
    )
    compare.assert_close(expected, received, 1e-5, 1e-5)


def test_other_layers_bear_the_rows_that_stand_in_for_none():
    """Batches of 8, 8 and 1 rows, for 2 replicas and 3 microbatches."""

    def make():
        return [
            tfgpipe.PipelinedLayer(
                [
                    layers.Dense(4),
                    synchronized(),
                    layers.BatchNormalization(),
                    normalization.DeferredBatchNormalization(),
                    layers.Dropout(0.1),
                    layers.Dense(3),
                    layers.ActivityRegularization(l2=0.1),
                ],
                num_microbatches=3,
                jit_compile=True,
            )
        ]

    strategy = tfgpipe.PipelineStrategy(num_stages=1, num_replicas=2)
    weights = fitted(strategy, make, rows=17, steps_per_execution=3)
    assert all(np.isfinite(weight).all() for weight in weights)


def test_one_replica_has_nobody_to_synchronize_with():
    def weights(**arguments):
        def make():
            norm = layers.BatchNormalization
            return [
                tfgpipe.PipelinedLayer(
                    stack(lambda **kw: norm(**arguments, **kw)),
                    num_microbatches=2,
                )
            ]

        return fitted(tfgpipe.PipelineStrategy(num_stages=2), make)

    compare.assert_close(weights(), weights(synchronized=True), 1e-5, 1e-6)


def replicated(norms, **arguments):
    strategy = tfgpipe.PipelineStrategy(num_stages=1, num_replicas=2)
    with strategy.scope():
        layer = tfgpipe.PipelinedLayer(norms, num_microbatches=1, **arguments)
        layer.build((None, 5))
    return strategy, layer


def test_replicas_that_run_one_after_the_other_cannot_synchronize():
    strategy, layer = replicated([synchronized()])
    x = tf.ones((4, 5))
    with pytest.raises(RuntimeError, match=r"Put `strategy.run\(...\)` into a `tf.fun"):
        strategy.run(lambda: layer(x, training=True))
    strategy.run(lambda: layer(x, training=False))


def test_a_layer_that_cannot_synchronize_is_refused():
    class Own(layers.BatchNormalization):
        pass

    for norm in (Own, lambda **kw: layers.BatchNormalization(renorm=True, **kw)):
        with pytest.raises(ValueError, match=r"Received 'norm' .* synchronized=True"):
            replicated([norm(synchronized=True, name="norm")])
    frozen = Own(synchronized=True)
    frozen.trainable = False
    replicated([frozen])
