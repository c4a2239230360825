"""The comparison behind most tests: a pipelined model against the plain one.

Both are built from the same factory, given the same initial weights and seeds, and run
on the same data. Then *everything* is compared: outputs with their Keras masks, losses,
the gradient of every input and every weight, and every state variable afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from tests.helpers import reference

# A sum over microbatches associates differently from a sum over the batch; that is the
# only difference there is. Double precision proves it. What single precision loses is
# a few dozen roundings of terms that can be larger than their sum.
TOLERANCES = {"float32": (1e-5, 5e-6), "float64": (1e-12, 1e-13)}
RTOL, ATOL = TOLERANCES["float32"]

Factory = Callable[[], Sequence[keras.layers.Layer]]
Arrays = Iterable[Any]


@dataclasses.dataclass
class Run:
    """All that one training step computes.

    Attributes:
        outputs: What the model returned, nested as it returned it.
        masks: The Keras mask on each output, in flat order, or None.
        losses: The losses that layers added.
        input_grads: The gradient of each input, in flat order, or None.
        weight_grads: The gradient of each weight, or None.
        state: The value of each other variable after the step.
    """

    outputs: Any
    masks: list[np.ndarray | None]
    losses: list[np.ndarray]
    input_grads: list[np.ndarray | None]
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


def model_pair(
    make: Callable[[], keras.Model], **arguments: object
) -> tuple[keras.Model, keras.Model]:
    """Returns a model and the pipeline of its twin, with equal weights and names."""
    plain = make()
    fresh_names()
    pipelined = tfgpipe.pipeline(make(), **arguments)
    copy_state(plain, pipelined)
    return plain, pipelined


def train_alike(
    pair: Sequence[keras.Model],
    x: np.ndarray,
    y: np.ndarray,
    batch_size: int,
    *,
    epochs: int = 2,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> None:
    """Trains both models of a pair, the second with callbacks; compares variables."""
    arguments = {"epochs": epochs, "shuffle": False, "verbose": 0}
    for each, own in zip(pair, ([], [*callbacks]), strict=True):
        each.compile(keras.optimizers.SGD(0.1), "mse")
        each.fit(x, y, batch_size, callbacks=own, **arguments)
    assert_close(*(each.variables for each in pair), 1e-5, 1e-6)


def reloaded(model: keras.Model, folder: Path, **arguments: Any) -> keras.Model:
    """Returns what a folder gives back of a model, after it is saved there."""
    model.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras", **arguments)


def fresh_names() -> None:
    """Lets the names of layers count from the start again."""
    policy = keras.config.dtype_policy()  # Which would be forgotten as well.
    keras.utils.clear_session(free_memory=False)
    keras.config.set_dtype_policy(policy)


def copy_state(source: keras.Model, target: keras.Model) -> None:
    """Copies weights, statistics and dropout seeds."""
    for a, b in zip(source.variables, target.variables, strict=True):
        b.assign(a.value)


def values(model: keras.Model) -> list[np.ndarray]:
    """Returns the values of all variables."""
    return [variable.numpy() for variable in model.variables]


def mirrored(num_replicas: int) -> tf.distribute.Strategy:
    """Returns TensorFlow's own strategy for replicas, on CPUs."""
    return tf.distribute.MirroredStrategy(
        [f"CPU:{replica}" for replica in range(num_replicas)],
        # With the default two such strategies get into each other's sums.
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def squares(outputs: Any) -> tf.Tensor:
    """Returns the sum over outputs of mean(c * output^2), c varying by element."""
    terms = []
    for i, y in enumerate(x for x in keras.tree.flatten(outputs) if x is not None):
        if y.dtype.is_floating:
            c = tf.reshape(tf.range(tf.size(y)) % 7 + 1 + i, tf.shape(y))
            terms.append(tf.reduce_mean(tf.cast(c, y.dtype) * y * y))
    widest = max((term.dtype for term in terms), key=lambda dtype: dtype.size)
    return tf.add_n([tf.cast(term, widest) for term in terms])


def unknown_sizes(
    x: Any, side_inputs: Mapping[str, Any] | None = None, *, axes: int = 1
) -> list[tf.TensorSpec]:
    """Returns the shapes and types of inputs, the first axes' sizes left open."""
    return [
        tf.TensorSpec(
            [None if i < axes else n for i, n in enumerate(leaf.shape)],
            leaf.dtype,
        )
        for leaf in keras.tree.flatten((x, side_inputs or {}))
        if leaf is not None
    ]


def run(
    model: Any,
    x: Any,
    *,
    side_inputs: Mapping[str, np.ndarray] | None = None,
    training: bool = True,
    graph: bool = True,
    specs: Sequence[tf.TensorSpec] | None = None,
    loss: Callable[[Any], tf.Tensor] = squares,
    times: int = 1,
) -> Run:
    """Runs one step with a loss of the outputs.

    Args:
        model: A model, or a layer that is called like one.
        x: Its inputs, arrays in any structure, None for an optional one.
        side_inputs: Keyword arguments of the call, arrays.
        training: Whether layers run as in training.
        graph: Whether the step is a `tf.function`.
        specs: The signature of that function, for the tensors in flat order.
        loss: A scalar of the outputs.
        times: How often it runs; the last time is returned.
    """
    given = (x, dict(side_inputs or {}))

    def step(*tensors: tf.Tensor) -> tuple:
        present = iter(tensors)
        inputs, sides = keras.tree.map_structure(
            lambda leaf: None if leaf is None else next(present), given
        )
        with tf.GradientTape() as tape:
            tape.watch([tensor for tensor in tensors if tensor.dtype.is_floating])
            y = model(inputs, training=training, **sides)
            losses = list(model.losses)
            total = loss(y)
            total = tf.add_n(
                [total, *(tf.cast(added, total.dtype) for added in losses)]
            )
        masks = [
            None if v is None else reference.mask_of(v) for v in keras.tree.flatten(y)
        ]
        gradients = tape.gradient(total, [*tensors, *model.trainable_variables])
        return y, masks, losses, gradients

    if graph:
        step = tf.function(step, input_signature=specs)
    flat = [leaf for leaf in keras.tree.flatten(given) if leaf is not None]
    for _ in range(times):
        y, masks, losses, grads = step(*map(tf.convert_to_tensor, flat))
    return Run(
        outputs=keras.tree.map_structure(_array, y),
        masks=[_array(mask) for mask in masks],
        losses=[_array(loss) for loss in losses],
        input_grads=[_array(g) for g in grads[: len(flat)]],
        weight_grads={
            _name(i, v): _array(g)
            for i, (v, g) in enumerate(
                zip(model.trainable_variables, grads[len(flat) :], strict=True)
            )
        },
        state={
            _name(i, v): v.numpy() for i, v in enumerate(model.non_trainable_variables)
        },
    )


def assert_same(
    plain: Run, pipelined: Run, *, rtol: float = RTOL, atol: float = ATOL
) -> None:
    """Asserts that two runs agree in every single value."""
    keras.tree.assert_same_structure(plain.outputs, pipelined.outputs)
    for (name, a), (_, b) in zip(_named(plain), _named(pipelined), strict=True):
        if a is None or b is None:
            assert a is b is None, f"{name}: expected {a}, received {b}"
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        close(a, b, name, rtol, atol)


def assert_runs_the_same(
    plain: Any,
    other: Any,
    x: Any,
    *,
    rtol: float = RTOL,
    atol: float = ATOL,
    graph: bool = True,
    **arguments: Any,
) -> tuple[Run, Run]:
    """Runs a step of a plain model, out of a graph, and one of another; compares both.

    Args:
        plain: The plain model.
        other: Its pipeline, for one.
        x: Their inputs.
        rtol: What may differ, relative.
        atol: What may differ, absolute.
        graph: Whether the other's step is a `tf.function`.
        **arguments: Other arguments of `run`.
    """
    expected = run(plain, x, graph=False, **arguments)
    received = run(other, x, graph=graph, **arguments)
    assert_same(expected, received, rtol=rtol, atol=atol)
    return expected, received


def close(
    expected: np.ndarray, received: np.ndarray, what: str, rtol: float, atol: float
) -> None:
    # Relative to the largest element: an element near zero is a sum that cancels.
    scale = max(1.0, float(np.max(np.abs(np.float64(expected)), initial=0.0)))
    np.testing.assert_allclose(
        received, expected, rtol=rtol, atol=atol * scale, err_msg=what
    )


def assert_close(
    expected: Arrays, received: Arrays, rtol: float = RTOL, atol: float = ATOL
) -> None:
    """Asserts that arrays, or variables, are `close` one by one."""
    for name, a, b in _pairs(expected, received):
        close(a, b, name, rtol, atol)


def assert_allclose(
    received: Arrays, expected: Arrays, rtol: float = 1e-7, atol: float = 0.0
) -> None:
    """Asserts of arrays, or variables, one by one, what NumPy asserts of two."""
    for name, a, b in _pairs(received, expected):
        np.testing.assert_allclose(a, b, rtol, atol, err_msg=name)


def assert_equal(expected: Arrays, received: Arrays) -> None:
    """Asserts that arrays, or variables, are equal one by one."""
    for name, a, b in _pairs(expected, received):
        np.testing.assert_array_equal(b, a, err_msg=name)


def _pairs(some: Arrays, others: Arrays) -> Iterator[tuple[str, Any, Any]]:
    """Yields two and two values, and the path of the first or their number."""
    for number, pair in enumerate(zip(some, others, strict=True)):
        a, b = (x.numpy() if hasattr(x, "numpy") else x for x in pair)
        yield getattr(pair[0], "path", f"number {number}"), a, b


def _named(run: Run) -> Iterator[tuple[str, np.ndarray | None]]:
    for what in ("outputs", "masks", "input_grads"):
        for i, value in enumerate(keras.tree.flatten(getattr(run, what))):
            yield f"{what}[{i}]", value
    yield "sum of losses", np.float64(sum(run.losses))
    for what in ("weight_grads", "state"):
        for name, value in getattr(run, what).items():
            yield f"{what} of {name}", value


def _array(tensor: Any) -> np.ndarray | None:
    # A gradient of an embedding comes as rows.
    return None if tensor is None else tf.convert_to_tensor(tensor).numpy()


def _name(position: int, variable: keras.Variable) -> str:
    # Keras does not keep paths from being equal.
    return f"{position}: {variable.path}"
