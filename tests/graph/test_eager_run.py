"""Runs of a traced graph, operation by operation."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfgpipe._compat import functions
from tfgpipe.graph import eager_run


def traced(function, *shapes):
    """Returns the placeholders' names and the result of a function in a graph."""

    def build():
        inputs = [tf.compat.v1.placeholder("float32", shape) for shape in shapes]
        return [x.name for x in inputs], function(*inputs)

    return functions.trace_graph(build)


def run(function, *values, draw=None):
    names, result = traced(function, *([None, *x.shape[1:]] for x in values))
    draw = draw or eager_run.RandomDraws().for_run()
    (made,) = eager_run.run(
        [result], dict(zip(names, map(tf.constant, values), strict=True)), draw
    )
    return made.numpy()


X = np.arange(12, dtype="float32").reshape(6, 2)


@pytest.mark.parametrize(
    "noise",
    [
        lambda shape: tf.random.normal(shape),
        lambda shape: tf.random.uniform(shape),
        lambda shape: tf.random.truncated_normal(shape),
        lambda shape: tf.random.stateless_uniform(shape, [1, 2]),
    ],
)
def test_draws_are_drawn_again_for_parts_of_a_batch(noise):
    def transposed(x):  # With examples along the second axis.
        return x + tf.transpose(noise(tf.reverse(tf.shape(x), [0])))

    draws = eager_run.RandomDraws()
    whole = run(transposed, X, draw=draws.for_run())
    assert not np.allclose(whole, X)
    first = run(transposed, X[:3], draw=draws.for_run())
    last = run(transposed, X[3:], draw=draws.for_run(last=True))
    np.testing.assert_array_equal(np.concatenate([first, last]), whole)


def test_what_results_do_not_need_does_not_run(capfd):
    variable = tf.Variable(1.0)

    def effects(x):
        tf.print("printed")
        tf.debugging.assert_less(x, -1.0)
        variable.assign_add(1.0)
        return 2 * x

    np.testing.assert_array_equal(run(effects, X), 2 * X)
    assert variable.numpy() == 1.0
    assert "printed" not in capfd.readouterr().err


def test_effects_that_results_need_are_named():
    def looped(x):
        return tf.map_fn(lambda row: row + tf.random.normal([2]), x)

    with pytest.raises(NotImplementedError, match="effects of RandomStandardNormal"):
        run(looped, X)


def test_a_generator_keeps_its_state():
    generator = tf.random.Generator.from_seed(1)
    before = generator.state.numpy()
    draws = eager_run.RandomDraws()
    twice = [
        run(lambda x: x + generator.normal([2]), X, draw=draws.for_run())
        for _ in range(2)
    ]
    assert not np.allclose(twice[0], X)
    np.testing.assert_array_equal(*twice)
    np.testing.assert_array_equal(generator.state.numpy(), before)


# -- narrow weights -------------------------------------------------------------------

COLUMNS = np.random.default_rng(0).standard_normal((2, 5)).astype("float32")
NARROW = eager_run.Narrow(tf.constant(COLUMNS), axis=1, size=12)
WIDE = np.tile(COLUMNS, 3)[:, :12]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x @ w,
        lambda x, w: tf.cast(tf.cast(x, "float64") @ tf.cast(w, "float64"), "float32"),
        lambda x, w: tf.einsum("bi,ij->bj", x, w),
        lambda x, w: tf.gather(w, tf.cast(x[:, 0], "int32") % 2),
        lambda x, w: (x @ w) @ tf.transpose(w),
        lambda x, w: x @ (2 * tf.abs(w)),
        lambda x, w: tf.reshape(w, [3, 8])[:, :1] + x[0],
    ],
)
def test_a_narrow_weight_gives_what_the_whole_one_does(function):
    names, result = traced(function, [None, 2], [2, 12])
    draw = eager_run.RandomDraws().for_run()
    (made,) = eager_run.run(
        [result], dict(zip(names, (tf.constant(X), NARROW), strict=True)), draw
    )
    expected = function(tf.constant(X), tf.constant(WIDE))
    np.testing.assert_allclose(made, expected, rtol=1e-5)
