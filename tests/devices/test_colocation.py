"""Operations that go where their data is."""

from __future__ import annotations

import tensorflow as tf

from tfgpipe.devices import colocation


def device_of(tensor):
    return tensor.device[-5:]


def test_operations_follow_the_first_input_that_is_somewhere():
    @tf.function
    def f():
        with tf.device("CPU:3"):
            x = tf.ones([2])
        with colocation.colocate_with_inputs():
            y = 2.0 * tf.square(x)
            with tf.device("CPU:1"):
                elsewhere = y + 1.0
            z = tf.clip_by_norm(elsewhere, 1.0)
        assert [device_of(t) for t in (y, elsewhere, z)] == ["CPU:3", "CPU:1", "CPU:1"]
        assert tf.square(x).device == ""
        return z

    f()


def test_operations_follow_variables():
    with tf.device("CPU:2"):
        variable = tf.Variable([1.0, 2.0])

    @tf.function
    def f():
        with colocation.colocate_with_inputs():
            a = 0.5 * variable + (1 - 0.5) * tf.square(variable)
            assert device_of(a) == "CPU:2"

            def branch():
                b = variable * 2.0
                assert device_of(b) == "CPU:2"
                return variable.assign(b)

            tf.cond(a[0] > 0, branch, branch)
        return a

    f()
    assert variable.numpy().tolist() == [2.0, 4.0]


def test_eagerly_nothing_changes():
    with colocation.colocate_with_inputs():
        assert (tf.constant(1.0) + 1.0).numpy() == 2.0
