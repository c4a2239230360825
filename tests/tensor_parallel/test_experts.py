"""Experts on devices, against a layer in which every expert sees every token."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfgpipe
from tests.helpers import compare
from tfgpipe.layers import TPMixtureOfExperts
from tfgpipe.tensor_parallel import full_weights, set_full_weights

E, FEATURES, HIDDEN = 4, 6, 5
X = np.random.default_rng(1).normal(size=(6, 7, FEATURES))


class EveryExpert(keras.layers.Layer):
    """The plain layer: each expert is applied to all tokens, most of it for nothing."""

    def __init__(
        self, top_k, gated, normalizes, balancing=0.0, capacity=None, **kwargs
    ):
        super().__init__(**kwargs)
        self.arguments = top_k, gated, normalizes, balancing, capacity

    def build(self, shape):
        gated = self.arguments[1]
        self.router = self.add_weight(shape=(FEATURES, E))
        self.up = self.add_weight(shape=(E, FEATURES, HIDDEN))
        self.down = self.add_weight(shape=(E, HIDDEN, FEATURES))
        self.gate = self.add_weight(shape=(E, FEATURES, HIDDEN)) if gated else None

    def call(self, x):
        ops = keras.ops
        k, gated, normalizes, balancing, capacity = self.arguments
        p = ops.softmax(x @ self.router)
        least = ops.sort(p, axis=-1)[..., E - k : E - k + 1]
        chosen = ops.cast(p >= least, p.dtype)
        if balancing:
            shares = ops.mean(chosen, axis=1) / k
            self.add_loss(
                balancing * E * ops.mean(ops.sum(shares * ops.mean(p, axis=1), axis=-1))
            )
        weights = p * chosen
        if normalizes:
            weights = weights / ops.sum(weights, axis=-1, keepdims=True)
        if capacity is not None:  # With k = 1 the order is that of positions.
            weights = weights * ops.cast(
                ops.cumsum(chosen, axis=1) <= capacity, p.dtype
            )
        hidden = ops.einsum("bld,edh->bleh", x, self.up)
        if gated:
            hidden = hidden * ops.silu(ops.einsum("bld,edh->bleh", x, self.gate))
        else:
            hidden = ops.silu(hidden)
        y = ops.einsum("bleh,ehd->bled", hidden, self.down)
        return ops.einsum("ble,bled->bld", weights, y)


def pair(T, *, top_k=2, gated=True, normalizes=True, balancing=0.0, capacity=None):
    """Returns the plain layer and the sharded one, built, with equal weights."""
    plain = EveryExpert(top_k, gated, normalizes, balancing, capacity)
    factor = None if capacity is None else capacity * E / top_k / X.shape[1]
    sharded = TPMixtureOfExperts(
        E,
        hidden_units=HIDDEN,
        top_k=top_k,
        gated=gated,
        normalizes=normalizes,
        balancing=balancing,
        capacity_factor=factor,
        num_shards=T,
    )
    for layer in (plain, sharded):
        layer.build(X.shape)
    rng = np.random.default_rng(2)
    plain.set_weights([rng.normal(size=w.shape) for w in plain.get_weights()])
    set_full_weights(sharded, plain.get_weights())
    return plain, sharded


def results(layer, x):
    """Returns the output, added losses, and all gradients, those of parts joined."""
    import tensorflow as tf

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            loss = compare.squares(y) + sum(layer.losses)
        return y, loss, tape.gradient(loss, [x, *layer.trainable_weights])

    y, loss, (of_x, *of_weights) = step(tf.constant(x))
    arrays = [np.asarray(g) for g in map(tf.convert_to_tensor, of_weights)]
    T = getattr(layer, "num_shards", 1)
    router, *others = arrays
    joined = [np.concatenate(others[i : i + T]) for i in range(0, len(others), T)]
    return [y, loss, of_x, router, *joined]


CASES = {
    "mixtral": {},
    "switch": {"top_k": 1, "gated": False, "normalizes": False},
    "balanced": {"balancing": 0.5},
    "one of one device": {"top_k": 3, "normalizes": False, "balancing": 0.1},
    "full experts": {"top_k": 1, "normalizes": False, "capacity": 2},
}


@pytest.mark.parametrize("T", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_outputs_losses_and_gradients(floatx, case, T):
    floatx("float64")
    plain, sharded = pair(T, **CASES[case])
    compare.assert_close(results(plain, X), results(sharded, X), 1e-10, 1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_in_a_pipeline_with_any_microbatches(floatx, schedule):
    floatx("float64")

    def model(layer, **arguments):
        compare.fresh_names()
        found = keras.Sequential(
            [
                keras.Input((7, FEATURES)),
                keras.layers.Dense(FEATURES, kernel_initializer=constant(1)),
                layer,
                keras.layers.Dense(3, kernel_initializer=constant(2)),
            ]
        )
        if arguments:
            found = tfgpipe.pipeline(found, **arguments)
        found.compile(keras.optimizers.Adam(0.01), "mse")
        return found

    def constant(seed):
        return keras.initializers.RandomNormal(seed=seed)

    plain, sharded = pair(2, balancing=0.3)
    models = [
        model(plain),
        model(sharded, num_stages=2, num_microbatches=3, schedule=schedule),
    ]
    y = np.random.default_rng(3).normal(size=(6, 7, 3))
    histories = [
        each.fit(X, y, batch_size=5, epochs=2, shuffle=False, verbose=0).history["loss"]
        for each in models
    ]
    np.testing.assert_allclose(*histories, 1e-10)
    compare.assert_close(models[0].get_weights(), full_weights(models[1]), 1e-9, 1e-11)


def test_experts_in_half_precision_are_nearly_those_without_shards():
    plain, _ = pair(1)
    sharded = TPMixtureOfExperts(
        E, hidden_units=HIDDEN, num_shards=2, dtype="mixed_bfloat16"
    )
    sharded.build(X.shape)
    set_full_weights(sharded, plain.get_weights())
    assert sharded(X).dtype == "bfloat16"
    a, b = (keras.ops.cast(layer(X), "float32") for layer in (plain, sharded))
    assert np.abs(a - b).max() < 0.06 * np.abs(a).max()


def test_padding_is_not_routed(floatx):
    """It gets nothing, and takes no capacity from what comes after it."""
    floatx("float64")
    _, layer = pair(2, top_k=1, normalizes=False, capacity=2, balancing=1.0)
    mask = np.arange(7) % 2 == 0
    y = keras.ops.convert_to_numpy(layer(X, mask=np.tile(mask, (6, 1))))
    (loss,) = layer.losses
    assert not y[:, ~mask].any()
    layer.capacity_factor *= 7 / 4  # The same limit of the four positions.
    np.testing.assert_allclose(layer(X[:, mask]), y[:, mask], 1e-12)
    np.testing.assert_allclose(layer.losses[-1], loss, 1e-12)


def test_a_seed_draws_the_same_weights_for_any_number_of_devices(tmp_path):
    drawn = []
    for T in (1, 4):
        keras.utils.set_random_seed(5)
        compare.fresh_names()
        layer = TPMixtureOfExperts(E, hidden_units=HIDDEN, num_shards=T)
        model = keras.Sequential([keras.Input((7, FEATURES)), layer])
        drawn.append(full_weights(model))
    compare.assert_equal(*drawn)
    assert np.ptp([np.std(kernel) for kernel in drawn[0][1]]) < 0.2
    loaded = compare.reloaded(model, tmp_path)
    np.testing.assert_allclose(loaded(X), model(X), 1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_experts": 5, "num_shards": 2}, "as many experts as the others"),
        ({"num_experts": 4, "top_k": 5}, "top_k"),
        ({"num_experts": 4, "capacity_factor": 0.0}, "capacity_factor=0.0"),
        ({"num_experts": 4, "balancing": -1.5}, "balancing=-1.5"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TPMixtureOfExperts(hidden_units=3, **{"num_shards": 1, **arguments})
