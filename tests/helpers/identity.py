"""One training step of a pipeline against the plain Keras model, in every way there is.

A case takes a value of each factor: the model, the schedule, how it is cut and fed, and
what is done on the way. Whatever it is, outputs, losses, metrics, every gradient and
every state variable are those of the plain model on the whole mini-batch. Only where a
layer mixes the examples of a microbatch (batch statistics) or draws by it (dropout) the
plain model takes the mini-batch in microbatches as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from tests.helpers import compare, pairwise, train_steps, zoo
from tests.helpers.layer_stacks import (
    REMAT_MODES,
    TRANSFER_DTYPES,
    AddsLoss,
    ResidualBlock,
)
from tests.helpers.sharded_dense import Columns
from tests.stage.test_normalization import Reference
from tfgpipe import quantization, schedules
from tfgpipe.graph import fusion
from tfgpipe.pipelined_layer import find_pipelines
from tfgpipe.quantization.fake_quant import RANGE_UPDATES

layers = keras.layers
Dense = Callable[..., keras.layers.Layer]

# -- the models -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stack:
    """A model of six layers or more.

    Attributes:
        make: Makes its layers, or a Functional model, given what makes dense layers.
        shape: Shape of one input row.
        ids: Whether inputs and targets are integers.
        rowwise: Whether a row's result is independent of the other rows in its batch,
            and of how many came before; if so any M gives what the plain model gives.
        weighted: Whether rows have sample weights.
        reference: Makes the plain model's layers as `make` does, given M as well,
            where they are others.
        arguments: More arguments of the pipeline.
    """

    make: Callable[[Dense], Sequence[keras.layers.Layer] | keras.Model]
    shape: tuple[int, ...] = (5,)
    ids: bool = False
    rowwise: bool = True
    weighted: bool = False
    reference: Callable[[Dense, int], Sequence[keras.layers.Layer]] | None = None
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def inputs(self, rows: int) -> np.ndarray:
        if self.ids:
            return zoo.padded_ids(rows, *self.shape)
        return zoo.floats(rows, *self.shape)

    def targets(self, rows: int, shape: tuple[int, ...]) -> np.ndarray:
        if self.ids:
            return zoo.ids(rows, *shape[:-1], seed=2)
        return zoo.floats(rows, *shape, seed=2)

    def compiled(self) -> dict[str, Any]:
        """Returns the arguments of `compile`."""
        if self.ids:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            kinds = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
            return {"loss": loss, **kinds}
        return {"loss": "mse", "metrics": ["mae"], "weighted_metrics": ["mse"]}


def dense(dense: Dense) -> list[keras.layers.Layer]:
    return [*(dense(n, activation="tanh") for n in (6, 5, 7, 4, 6)), dense(3)]


def wide(dense: Dense) -> list[keras.layers.Layer]:
    """Weights with more numbers than a mini-batch's values, one layer twice."""
    twice = dense(48, activation="tanh")
    sizes = (48, 64, 48)
    return [*(dense(n, activation="tanh") for n in sizes), twice, twice, dense(3)]


def convolutional(dense: Dense) -> list[keras.layers.Layer]:
    return [
        layers.Conv2D(4, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(3, 3, activation="relu"),
        layers.Flatten(),
        dense(6, activation="tanh"),
        dense(3),
    ]


def blocks(dense: Dense) -> list[keras.layers.Layer]:
    """Layers of layers, all alike, built lazily."""
    return [*(ResidualBlock(6) for _ in range(5)), dense(3)]


def frozen(dense: Dense) -> list[keras.layers.Layer]:
    """Some layers have no weights to train, some none at all."""
    stack = [
        layers.Activation("tanh"),
        dense(6, activation="tanh"),
        layers.Reshape((2, 3)),
        layers.Flatten(),
        dense(4, activation="tanh"),
        dense(3),
    ]
    stack[1].trainable = False
    return stack


def dropped(dense: Dense) -> list[keras.layers.Layer]:
    return [
        dense(8),
        layers.Dropout(0.5, seed=3),
        dense(6, activation="tanh"),
        layers.GaussianNoise(0.3, seed=4),
        dense(4),
        layers.Dropout(0.2, seed=5),
        dense(3),
    ]


def normalised(
    dense: Dense, norm: Dense = layers.BatchNormalization
) -> list[keras.layers.Layer]:
    # A bias before a normalization would have nothing but rounding as its gradient.
    return [
        layers.Dense(6, use_bias=False),
        norm(momentum=0.9),
        layers.Activation("tanh"),
        layers.Dense(4, use_bias=False),
        norm(momentum=0.8),
        dense(3),
    ]


def regularised(dense: Dense) -> list[keras.layers.Layer]:
    return [
        layers.Dense(6, kernel_regularizer="l2"),
        layers.Dense(5, activation="tanh", activity_regularizer="l2"),
        layers.ActivityRegularization(l1=0.01),
        AddsLoss(),
        layers.Dense(6, bias_regularizer="l1", activation="tanh"),
        layers.Dense(4, kernel_regularizer="l1", activation="tanh"),
        dense(3),
    ]


def masked(dense: Dense, length: int | None = 5) -> keras.Model:
    """Padding that attention and recurrence read, and that the loss leaves out."""
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(zoo.IDS, 4, mask_zero=True)(inputs)
    x = layers.Add()([x, zoo.attention()(x, x)])
    x = layers.LayerNormalization()(x)
    x = layers.LSTM(4, return_sequences=True)(x)
    x = layers.Dense(5, activation="tanh")(x)
    return keras.Model(inputs, dense(zoo.IDS)(x))


def skipping(dense: Dense) -> keras.Model:
    inputs = keras.Input((5,))
    a = dense(6, activation="tanh")(inputs)
    b = dense(7, activation="tanh")(a)
    c = dense(6, activation="tanh")(layers.Concatenate()([b, inputs]))
    d = dense(4, activation="tanh")(layers.Add()([c, a]))
    return keras.Model(inputs, dense(3)(layers.Concatenate()([d, b, a])))


def tied(dense: Dense) -> keras.Model:
    """The first stage's embedding is the last stage's projection."""
    inputs = keras.Input((4,), dtype="int32")
    embedding = layers.ReversibleEmbedding(zoo.IDS, 4, name="tied")
    x = embedding(inputs)
    for n in (6, 5, 6, 4):
        x = dense(n, activation="tanh")(x)
    return keras.Model(inputs, embedding(x, reverse=True))


STACKS = {
    "dense": Stack(dense, weighted=True),
    "wide": Stack(wide, weighted=True),
    "convolutional": Stack(convolutional, (6, 6, 2)),
    "blocks": Stack(blocks, (6,)),
    "frozen": Stack(frozen),
    "dropped": Stack(dropped, rowwise=False),
    "normalised": Stack(normalised, rowwise=False),
    "deferred": Stack(
        normalised,
        reference=lambda dense, M: normalised(dense, functools.partial(Reference, M)),
        arguments={"batch_norm": "deferred"},
    ),
    "regularised": Stack(regularised),
    "masked": Stack(masked, ids=True),
    "skipping": Stack(skipping, weighted=True),
    "tied": Stack(tied, (4,), ids=True),
}
# Those that are a list of layers, so that another may be put between any two.
LISTED = STACKS.keys() - {"masked", "skipping", "tied"}

# -- the factors ----------------------------------------------------------------------

FACTORS = {
    "stack": tuple(STACKS),
    # Outside: the layer is called, and the loss is the caller's; else the model's.
    "schedule": ("outside", *schedules.NAMES),
    "num_stages": (1, 2, 3, 4),
    "num_microbatches": (1, 2, 3, 5),
    # Two a microbatch, one more in some, or too few for all.
    "rows": ("even", "uneven", "few"),
    "remat": REMAT_MODES,
    "dtype": ("float32", "float64"),
    "sizes": ("static", "unknown"),
    "execution": ("graph", "eager"),
    "transfer_dtype": TRANSFER_DTYPES,
    "quantized": (None, *RANGE_UPDATES),
    "num_shards": (1, 2),
    # On CPUs as on them, with all chains of operations fused, or as on GPUs.
    "kernels": ("native", "fused", "gpu"),
}
# What takes longest to trace waits for the night.
ALL_FACTORS = {
    **FACTORS,
    "num_stages": (1, 2, 3, 4, 6),
    "num_microbatches": (1, 2, 3, 5, 8),
    "num_shards": (1, 2, 3),
}


def devices_of(schedule: str, num_stages: int) -> int:
    """Returns over how many devices stages go: interleaved, two each or all on one."""
    if schedule != "interleaved":
        return num_stages
    return num_stages // 2 if num_stages % 2 == 0 else 1


IMPOSSIBLE = (
    # Eight devices.
    lambda num_stages, num_shards: num_stages * num_shards > 8,
    # Only GPipe takes fewer microbatches than there are devices.
    lambda schedule, num_stages, num_microbatches: (
        schedule not in ("outside", "gpipe")
        and num_microbatches < devices_of(schedule, num_stages)
    ),
    # A size is unknown to a graph alone.
    lambda sizes, execution: sizes == "unknown" and execution == "eager",
    # In double precision alone no other difference ends in another rounding.
    lambda transfer_dtype, dtype: transfer_dtype and dtype == "float32",
    # The reference has a layer at each boundary, and losses of the whole mini-batch.
    lambda transfer_dtype, stack: transfer_dtype and stack not in LISTED,
    lambda transfer_dtype, stack: (
        transfer_dtype == "int8_channel" and stack in ("regularised", "deferred")
    ),
    # XLA compiles what is of one device and of known shapes; each chain takes a while.
    lambda kernels, sizes: kernels == "fused" and sizes == "unknown",
    lambda kernels, rows: kernels == "fused" and rows == "few",
    lambda kernels, num_shards: kernels == "fused" and num_shards > 1,
    lambda kernels, num_stages: kernels == "fused" and num_stages > 2,
    # Simulated integers are of single precision, and of layers that are known.
    lambda quantized, dtype: quantized and dtype == "float64",
    lambda quantized, num_shards: quantized and num_shards > 1,
    lambda quantized, stack: quantized and stack not in LISTED,
    lambda quantized, stack: (
        quantized and stack in ("blocks", "deferred", "regularised")
    ),
    # Alone a layer that is called twice moves its ranges twice.
    lambda quantized, stack: quantized == "per_step" and stack == "wide",
    # A range that moves at each call, or statistics of a microbatch that it bounds.
    lambda quantized, num_microbatches: (
        quantized == "per_call" and num_microbatches > 1
    ),
    lambda quantized, stack, num_microbatches: (
        quantized and not STACKS[stack].rowwise and num_microbatches > 1
    ),
)


def cases(factors: pairwise.Factors, *, strength: int = 2) -> list[dict[str, Any]]:
    """Returns cases in which all values meet that can, by pairs or more."""
    found = pairwise.all_pairs(factors, impossible=IMPOSSIBLE, strength=strength)
    return [dict(zip(factors, case, strict=True)) for case in found]


# -- a step ---------------------------------------------------------------------------


def assert_case(
    *,
    stack: str,
    schedule: str,
    num_stages: int,
    num_microbatches: int,
    rows: str,
    dtype: str,
    sizes: str,
    execution: str,
    quantized: str | None,
    num_shards: int,
    **arguments: Any,
) -> None:
    """Asserts for a case of the factors that the step is the plain model's."""
    M = num_microbatches
    if num_shards > 1:
        arguments["dense"] = sharded(num_shards)
    if arguments["transfer_dtype"] is None:
        arguments["num_stages"] = num_stages
    else:
        num_layers = len(STACKS[stack].make(layers.Dense))
        arguments["balance"] = even_cut(num_layers, num_stages)
    if schedule != "outside":
        num_devices = devices_of(schedule, num_stages) * num_shards
        arguments["schedule"] = schedule
        arguments["devices"] = [f"CPU:{p}" for p in range(num_devices)]
    assert_same_step(
        STACKS[stack],
        {"even": 2 * M, "uneven": 2 * M + 1, "few": max(1, M - 1)}[rows],
        outside=schedule == "outside",
        num_microbatches=M,
        dtype=dtype,
        unknown=sizes == "unknown",
        eagerly=execution == "eager",
        quantized=quantized,
        **arguments,
    )


def assert_same_step(
    stack: Stack,
    rows: int,
    *,
    num_microbatches: int,
    outside: bool = False,
    dtype: str = "float32",
    unknown: bool = False,
    eagerly: bool = False,
    dense: Dense = layers.Dense,
    quantized: str | None = None,
    tolerance: tuple[float, float] | None = None,
    kernels: str = "native",
    **arguments: Any,
) -> None:
    """Asserts that a step of the pipeline is that of the plain model.

    Args:
        stack: The model.
        rows: Rows of the mini-batch.
        num_microbatches: M.
        outside: Whether the loss is taken outside of the pipeline.
        dtype: Type of all numbers.
        unknown: Whether the number of rows is unknown until the step runs.
        eagerly: Whether the pipeline's step is run eagerly.
        dense: Makes dense layers.
        quantized: When the ranges of quantized layers move, or None for plain layers.
        tolerance: Relative and absolute, in place of those of the type.
        kernels: `"gpu"` for the operations that GPUs are given, `"fused"` for chains
            of operations compiled however small they are.
        **arguments: More arguments of the pipeline.
    """
    M = num_microbatches
    arguments = {"num_microbatches": M, **stack.arguments, **arguments}
    rtol, atol = tolerance or compare.TOLERANCES[dtype]
    transfer_dtype = arguments.get("transfer_dtype")

    def make() -> Any:
        made = stack.make(dense)
        if quantized is None:
            return made
        return quantization.apply(made, range_update=quantized)

    plain_layers = stack.reference(dense, M) if stack.reference else make()
    if transfer_dtype is not None:
        crossings = arguments["balance"], transfer_dtype
        plain_layers = with_crossings(plain_layers, *crossings)
    plain = modelled(plain_layers, stack)
    compare.fresh_names()
    if outside:
        layer = tfgpipe.PipelinedLayer(make(), **arguments)
        pipelined = keras.Sequential([keras.Input(**input_of(stack)), layer])
    else:
        pipelined = tfgpipe.pipeline(modelled(make(), stack), **arguments)
        (layer,) = find_pipelines(pipelined)
    traced: Callable[[], Any] = {
        "native": contextlib.nullcontext,
        "fused": functools.partial(mock.patch.object, fusion, "_LEAST_SAVED", 0),
        "gpu": functools.partial(layer.traced_without_xla, "gpu"),
    }[kernels]
    rng = np.random.default_rng(0)
    for a, b in zip(plain.variables, pipelined.variables, strict=True):
        if a.trainable:  # Biases of zero, and scales of one, would hide much.
            a.assign_add(rng.uniform(-0.2, 0.2, a.shape))
        b.assign(a.value)
    in_microbatches = not stack.rowwise or transfer_dtype == "int8_channel"
    x = stack.inputs(rows)
    if outside:
        reference = compare.OneAfterAnother(plain, M) if in_microbatches else plain
        specs = compare.unknown_sizes(x) if unknown else None
        expected = compare.run(reference, x, graph=False)
        with traced():
            received = compare.run(pipelined, x, graph=not eagerly, specs=specs)
        assert any(np.any(g) for g in expected.weight_grads.values())
        compare.assert_same(expected, received, rtol=rtol, atol=atol)
        return
    reference = train_steps.InMicrobatches(plain, M) if in_microbatches else plain
    data = [x, stack.targets(rows, reference(x).shape[1:])]
    if stack.weighted:
        data.append(np.arange(1.0, rows + 1).astype(dtype))
    # Eagerly, as what batches of the reference hold is not to depend on any graph.
    reference.compile(train_steps.Keeps(), **stack.compiled(), run_eagerly=True)
    pipelined.compile(train_steps.Keeps(), **stack.compiled(), run_eagerly=eagerly)
    before = train_steps.train(reference, *data)
    with traced():
        after = train_steps.train(pipelined, *data, unknown=unknown)
    assert any(np.any(g) for g in before.gradients.values())
    train_steps.assert_same(before, after, rtol=rtol, atol=atol)


def input_of(stack: Stack) -> dict[str, Any]:
    dtype = "int32" if stack.ids else keras.config.floatx()
    return {"shape": stack.shape, "dtype": dtype}


def modelled(made: Sequence[keras.layers.Layer] | keras.Model, stack: Stack) -> Any:
    if isinstance(made, keras.Model):
        return made
    return keras.Sequential([keras.Input(**input_of(stack)), *made])


def sharded(num_shards: int) -> Dense:
    """Returns what makes dense layers in shards."""

    class Activated(Columns):
        def __init__(self, units: int, activation: str = "linear", **kwargs: Any):
            super().__init__(units, **{"num_shards": num_shards, **kwargs})
            self.activation = keras.activations.get(activation)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.activation(super().call(x))

    return Activated


def even_cut(num_layers: int, num_stages: int) -> list[int]:
    """Returns how many layers each stage has, the first ones one more."""
    least, more = divmod(num_layers, num_stages)
    return [least + (k < more) for k in range(num_stages)]


def with_crossings(
    stack: Sequence[keras.layers.Layer], balance: Sequence[int], transfer_dtype: str
) -> list[keras.layers.Layer]:
    """Returns layers with one more at each boundary, that rounds as the way does."""
    made, rest = [], list(stack)
    for size in balance[:-1]:
        made += [*rest[:size], Crosses(transfer_dtype)]
        rest = rest[size:]
    return [*made, *rest]


class Crosses(layers.Layer):
    """What going to another stage does to a value, written once more."""

    def __init__(self, way: str, **kwargs: Any):
        super().__init__(**kwargs)
        self.way = way
        self.supports_masking = True

    def call(self, x):
        @tf.custom_gradient
        def crossed(x):
            if self.way.startswith("int8"):
                return stepped(x, self.way), lambda dy: dy
            return rounded(x, self.way), lambda dy: rounded(dy, self.way)

        return crossed(x)


def rounded(x, dtype):
    return tf.cast(tf.cast(x, dtype), x.dtype)


def stepped(x, way):
    axes = list(range(1, len(x.shape)) if way == "int8" else range(len(x.shape) - 1))
    largest = tf.reduce_max(tf.abs(x), axis=axes, keepdims=True)
    scale = tf.where(largest > 0, largest / 127, 1.0)
    return tf.round(x / scale) * scale
