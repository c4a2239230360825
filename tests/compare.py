"""The comparison behind most tests: a pipelined stack against the plain one.

Both are built from the same factory, given the same initial weights and seeds, and run
on the same data. Then *everything* is compared: outputs, losses, the gradient of the
input, of every weight, and every state variable afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

import tfgpipe

# A sum over microbatches associates differently from a sum over the batch; that is the
# only difference there is. Double precision proves it. What single precision loses is
# a few dozen roundings of terms that can be larger than their sum.
TOLERANCES = {"float32": (1e-5, 5e-6), "float64": (1e-12, 1e-13)}
RTOL, ATOL = TOLERANCES["float32"]

Factory = Callable[[], Sequence[keras.layers.Layer]]


@dataclasses.dataclass
class Run:
    """All that one training step computes."""

    outputs: np.ndarray
    losses: list[np.ndarray]
    input_grad: np.ndarray | None
    weight_grads: dict[str, np.ndarray | None]
    state: dict[str, np.ndarray]


def plain_model(make_layers: Factory, shape: tuple, dtype: str) -> keras.Model:
    return keras.Sequential([keras.Input(shape, dtype=dtype), *make_layers()])


def pipelined_model(
    make_layers: Factory, shape: tuple, input_dtype: str, **arguments: object
) -> keras.Model:
    layer = tfgpipe.PipelinedLayer(make_layers(), **arguments)
    return keras.Sequential([keras.Input(shape, dtype=input_dtype), layer])


def pair(
    make_layers: Factory, shape: tuple, input_dtype: str, **arguments: object
) -> tuple[keras.Model, keras.Model]:
    """Returns the plain and the pipelined model, with equal weights and seeds."""
    plain = plain_model(make_layers, shape, input_dtype)
    pipelined = pipelined_model(make_layers, shape, input_dtype, **arguments)
    copy_state(plain, pipelined)
    return plain, pipelined


def copy_state(source: keras.Model, target: keras.Model) -> None:
    """Copies weights, statistics and dropout seeds."""
    for a, b in zip(source.variables, target.variables, strict=True):
        b.assign(a.value)


def run(
    model: keras.Model,
    x: np.ndarray,
    *,
    training: bool = True,
    graph: bool = True,
    specs: Sequence[tf.TensorSpec] | None = None,
) -> Run:
    """Runs one step with the loss mean(c * output^2), c varying by element."""

    def step(x: tf.Tensor) -> tuple:
        with tf.GradientTape() as tape:
            if x.dtype.is_floating:
                tape.watch(x)
            y = model(x, training=training)
            c = tf.reshape(tf.range(tf.size(y)) % 7 + 1, tf.shape(y))
            loss = tf.reduce_mean(tf.cast(c, y.dtype) * y * y)
            losses = list(model.losses)
            total = tf.add_n([loss, *losses])
        sources = [x, *model.trainable_variables]
        return y, losses, tape.gradient(total, sources)

    if graph:
        step = tf.function(step, input_signature=specs)
    y, losses, (input_grad, *weight_grads) = step(tf.convert_to_tensor(x))
    dense = [None if g is None else tf.convert_to_tensor(g) for g in weight_grads]
    return Run(
        outputs=y.numpy(),
        losses=[loss.numpy() for loss in losses],
        input_grad=None if input_grad is None else input_grad.numpy(),
        weight_grads={
            _name(v): None if g is None else g.numpy()
            for v, g in zip(model.trainable_variables, dense, strict=True)
        },
        state={_name(v): v.numpy() for v in model.non_trainable_variables},
    )


def assert_same(
    plain: Run, pipelined: Run, *, rtol: float = RTOL, atol: float = ATOL
) -> None:
    """Asserts that two runs agree in every single value."""
    close(plain.outputs, pipelined.outputs, "outputs", rtol, atol)
    close(sum(plain.losses), sum(pipelined.losses), "losses", rtol, atol)
    if plain.input_grad is not None:
        close(plain.input_grad, pipelined.input_grad, "input gradient", rtol, atol)
    for what in ("weight_grads", "state"):
        expected, received = getattr(plain, what), getattr(pipelined, what)
        for (name, a), b in zip(expected.items(), received.values(), strict=True):
            if a is None or b is None:
                assert a is b is None, f"{what} of {name}"
                continue
            close(a, b, f"{what} of {name}", rtol, atol)


def close(
    expected: np.ndarray, received: np.ndarray, what: str, rtol: float, atol: float
) -> None:
    # Relative to the largest element: an element near zero is a sum that cancels.
    scale = max(1.0, float(np.max(np.abs(np.float64(expected)), initial=0.0)))
    np.testing.assert_allclose(
        received, expected, rtol=rtol, atol=atol * scale, err_msg=what
    )


def _name(variable: keras.Variable) -> str:
    return variable.path.split("/", 1)[-1]
