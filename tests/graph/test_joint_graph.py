"""Joint graphs are rewritten by functions that know nothing of each other."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.helpers import joints
from tfgpipe.stage.joint import trace_joint


def traced(function, *specs):
    return trace_joint(
        lambda inputs: {0: function(*inputs)},
        input_specs=[tf.TensorSpec(s) for s in specs],
        weights=[],
        state=[],
    )


def in_place_of(joint, type_, form):
    """Returns a joint graph with a form of what an operation of a type makes."""
    return joint.replaced([type_], lambda op, inputs: form(*inputs(op)))


def run(joint, *arrays):
    return [x.numpy() for x in joints.run(joint, *map(np.float32, arrays))]


def test_a_form_may_read_what_it_replaces():
    joint = traced(lambda x: tf.exp(tf.sin(x)), [2])
    doubled = joint.replaced(["Sin"], lambda op, _: 2 * op.outputs[0])
    x, dy = np.array([0.5, 1.0]), np.array([1.0, 3.0])
    y, dx = run(doubled, x, dy)
    np.testing.assert_allclose(y, np.exp(2 * np.sin(x)), rtol=1e-6)
    # Gradients are those of the stage, on what is there in its place.
    np.testing.assert_allclose(dx, dy * y * np.cos(x), rtol=1e-6)


def test_rewritings_follow_one_another():
    """The second replaces what the first has put there, and what reads that."""
    joint = traced(lambda x: tf.exp(tf.sin(x)), [2])
    first = in_place_of(joint, "Sin", tf.cos)
    second = in_place_of(first, "Cos", tf.tanh)
    third = in_place_of(second, "Exp", lambda x: x + 1)
    x = np.array([0.5, 1.0])
    for graph, expected in [
        (joint, np.exp(np.sin(x))),
        (first, np.exp(np.cos(x))),
        (second, np.exp(np.tanh(x))),
        (third, np.tanh(x) + 1),
    ]:
        np.testing.assert_allclose(run(graph, x, x)[0], expected, rtol=1e-6)
    name = next(op.name for op in joint.graph.get_operations() if op.type == "Sin")
    assert second.operation(third.forms[f"{name}:0"]).type == "Tanh"


def test_a_rewriting_sees_its_own_forms_further_on():
    joint = traced(lambda x: tf.sin(tf.sin(x)), [2])
    both = in_place_of(joint, "Sin", lambda x: x + 1)
    x = np.array([0.5, 1.0])
    np.testing.assert_allclose(run(both, x, x)[0], x + 2, rtol=1e-6)


def test_what_waits_for_an_operation_waits_for_its_form():
    def function(x):
        y = tf.sin(x)
        with tf.control_dependencies([y]):
            return tf.exp(x)

    joint = traced(function, [2])
    (sin,) = (op.name for op in joint.graph.get_operations() if op.type == "Sin")
    (exp,) = (op.name for op in joint.graph.get_operations() if op.type == "Exp")
    assert f"^{sin}" in joint.edges[exp]
    with joint.graph.as_default():
        cos = tf.cos(joint.graph.get_tensor_by_name(joint.given.inputs[0]))
    rewritten = joint.rewritten({f"^{sin}": f"^{cos.op.name}"})
    assert f"^{cos.op.name}" in rewritten.edges[exp]
