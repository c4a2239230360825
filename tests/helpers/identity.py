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
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np

import tfgpipe
from tests.helpers import compare, pairwise, train_steps, zoo
from tests.helpers.layer_stacks import (
    REMAT_MODES,
    TRANSFER_DTYPES,
    AddsLoss,
    Balances,
    ResidualBlock,
)
from tests.helpers.reference import (
    DeferredNorm,
    InMicrobatches,
    OneAfterAnother,
    Shards,
    even_cut,
    with_crossings,
)
from tfgpipe import quantization, schedules
from tfgpipe.graph.passes import fusion
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
        reference: Makes the plain model's layers as `make` does, given M as well,
            where they are others.
        arguments: More arguments of the pipeline.
    """

    make: Callable[[Dense], Sequence[keras.layers.Layer] | keras.Model]
    shape: tuple[int, ...] = (5,)
    ids: bool = False
    rowwise: bool = True
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

    def compiled(self, reduction: str = "sum_over_batch_size") -> dict[str, Any]:
        """Returns the arguments of `compile`, given the reduction of the loss."""
        if self.ids:
            loss = keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction=reduction
            )
            kinds = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
            return {"loss": loss, **kinds}
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        return {"loss": loss, "metrics": ["mae"], "weighted_metrics": ["mse"]}


def dense(dense: Dense) -> list[keras.layers.Layer]:
    return [*(dense(n, activation="tanh") for n in (6, 5, 7, 4, 6)), dense(3)]


def wide(dense: Dense) -> list[keras.layers.Layer]:
    """Weights with more numbers than a mini-batch's values, one layer twice."""
    made = [dense(n, activation="tanh") for n in (48, 64, 48, 48)]
    return [*made, made[-1], dense(3)]


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
    # Flattened to the same channels: levels of int8 that are rounded to levels with
    # another scale may lie exactly halfway, where the last bit decides.
    stack = [
        layers.Activation("tanh"),
        dense(6, activation="tanh"),
        layers.Reshape((1, -1)),
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
    # A bias before a normalization would have nothing but rounding as its gradient. The
    # variance of two examples is often near zero, and without a larger epsilon its
    # inverse magnifies the rounding of single precision.
    return [
        layers.Dense(6, use_bias=False),
        norm(momentum=0.9, epsilon=0.05),
        layers.Activation("tanh"),
        layers.Dense(4, use_bias=False),
        norm(momentum=0.8, epsilon=0.05),
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


def balanced(dense: Dense) -> list[keras.layers.Layer]:
    """Losses that couple the examples of a mini-batch, as if of experts."""
    return [
        dense(6, activation="tanh"),
        Balances(),
        dense(5, activation="tanh"),
        layers.Dense(6, activation="tanh"),
        Balances(),
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


def two_encoders(dense: Dense) -> keras.Model:
    """Two encoders that neither reads the other, and a head that reads both."""

    def encoder(*units: int) -> keras.Model:
        x = encoded = keras.Input((5,))
        for n in units:
            encoded = dense(n, activation="tanh")(encoded)
        return keras.Model(x, encoded)

    inputs = keras.Input((5,))
    encoded = [encoder(*units)(inputs) for units in ((6, 4), (7, 6))]
    return keras.Model(inputs, dense(3)(layers.Concatenate()(encoded)))


def tied(dense: Dense) -> keras.Model:
    """The first stage's embedding is the last stage's projection."""
    inputs = keras.Input((4,), dtype="int32")
    embedding = layers.ReversibleEmbedding(zoo.IDS, 4, name="tied")
    x = embedding(inputs)
    for n in (6, 5, 6):
        x = dense(n, activation="tanh")(x)
    x = layers.Dense(4, activation="tanh")(x)
    return keras.Model(inputs, embedding(x, reverse=True))


STACKS = {
    "dense": Stack(dense),
    "wide": Stack(wide),
    "convolutional": Stack(convolutional, (6, 6, 2)),
    "blocks": Stack(blocks, (6,)),
    "frozen": Stack(frozen),
    "dropped": Stack(dropped, rowwise=False),
    "normalised": Stack(normalised, rowwise=False),
    "deferred": Stack(
        normalised,
        reference=lambda dense, M: normalised(
            dense, functools.partial(DeferredNorm, M)
        ),
        arguments={"batch_norm": "deferred"},
    ),
    "regularised": Stack(regularised),
    "balanced": Stack(balanced),
    "masked": Stack(masked, ids=True),
    "skipping": Stack(skipping),
    "two_encoders": Stack(two_encoders),
    "tied": Stack(tied, (4,), ids=True),
}
# Those that are a list of layers, so that another may be put between any two.
LISTED = STACKS.keys() - {"masked", "skipping", "two_encoders", "tied"}

# -- the factors ----------------------------------------------------------------------

FACTORS = {
    "stack": tuple(STACKS),
    # Outside: the layer is called, and the loss is the caller's; else the model's.
    # Others in tests/models/test_schedule_identity.py, and by night.
    "schedule": (
        *("outside", "gpipe", "1f1b", "interleaved", "zero_bubble"),
        "gpipe+offload",
    ),
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
    # T and the collective, of dense layers T times as wide: columns and rows in turn.
    # Mostly none where nothing asks for some, as they take long to trace.
    "shards": (None, None, None, (2, "gather")),
    # Of the loss in the model, and sample weights `[rows]` or `[rows, 1]`.
    "reduction": ("sum_over_batch_size", "mean_with_sample_weight", "sum"),
    "weights": (None, "rows", "column"),
    # On CPUs as on them, with all chains of operations fused, as on GPUs, or as on
    # TPUs, where XLA compiles every function.
    "kernels": ("native", "fused", "gpu", "tpu"),
}
# What takes longest to trace waits for the night.
ALL_FACTORS = {
    **FACTORS,
    "num_stages": (1, 2, 3, 4, 6),
    "num_microbatches": (1, 2, 3, 5, 8),
    "shards": (*FACTORS["shards"], (2, "bidirectional_ring"), (3, "ring")),
}
OTHER_SCHEDULES = {
    **FACTORS,
    "schedule": (*schedules.NAMES[4:], "zero_bubble+offload"),
}


def devices_of(schedule: str, num_stages: int) -> int:
    """Returns over how many devices stages go: two on each, or all on one."""
    if schedule == "outside" or not schedules.find(schedule).deals_stages:
        return num_stages
    return num_stages // 2 if num_stages % 2 == 0 else 1


FOLDED = ("zbv", "v_half", "v_min", "dualpipe_v")

IMPOSSIBLE = (
    # Eight devices.
    lambda num_stages, shards: shards and num_stages * shards[0] > 8,
    lambda schedule, num_stages, num_microbatches: (
        schedule != "outside"
        and num_microbatches
        < schedules.find(schedule).min_microbatches(devices_of(schedule, num_stages))
    ),
    # Two stages on each device, or one on one.
    lambda schedule, num_stages: (
        schedule in FOLDED and num_stages % 2 == 1 and num_stages > 1
    ),
    # Without these there would be nothing to meet: no boundary, no other microbatch,
    # no loss of the model.
    lambda transfer_dtype, num_stages: transfer_dtype and num_stages == 1,
    lambda remat, num_microbatches: remat == "except_last" and num_microbatches == 1,
    lambda rows, num_microbatches: rows != "even" and num_microbatches == 1,
    lambda weights, schedule: weights and schedule == "outside",
    lambda reduction, schedule: (
        reduction != "sum_over_batch_size" and schedule == "outside"
    ),
    # Keras takes no weights of rows for losses of places.
    lambda weights, stack: weights == "rows" and STACKS[stack].ids,
    # A size is unknown to a graph alone.
    lambda sizes, execution: sizes == "unknown" and execution == "eager",
    # In double precision alone no other difference ends in another rounding.
    lambda transfer_dtype, dtype: transfer_dtype and dtype == "float32",
    # The reference has a layer at each boundary, and losses of the whole mini-batch.
    lambda transfer_dtype, stack: transfer_dtype and stack not in LISTED,
    lambda transfer_dtype, stack: (
        transfer_dtype == "int8_channel"
        and stack in ("regularised", "deferred", "balanced")
    ),
    # XLA compiles what is of one device and of known shapes; each chain takes a while.
    lambda kernels, sizes: kernels == "fused" and sizes == "unknown",
    lambda kernels, rows: kernels == "fused" and rows == "few",
    lambda kernels, shards: kernels == "fused" and shards,
    lambda kernels, num_stages: kernels == "fused" and num_stages > 2,
    lambda kernels, sizes: kernels == "tpu" and sizes == "unknown",
    lambda kernels, shards: kernels == "tpu" and shards,
    # XLA draws other random numbers, and does not compile the gradient of a loop.
    lambda kernels, stack: kernels == "tpu" and stack in ("dropped", "masked"),
    # Simulated integers are of single precision, and of layers that are known.
    lambda quantized, dtype: quantized and dtype == "float64",
    lambda quantized, shards: quantized and shards,
    lambda quantized, stack: quantized and stack not in LISTED,
    lambda quantized, stack: (
        quantized and stack in ("blocks", "deferred", "regularised", "balanced")
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
    **arguments: Any,
) -> None:
    """Asserts for a case of the factors that the step is the plain model's."""
    M = num_microbatches
    if arguments["transfer_dtype"] is None:
        arguments["num_stages"] = num_stages
    else:
        num_layers = len(STACKS[stack].make(layers.Dense))
        arguments["balance"] = even_cut(num_layers, num_stages)
    if schedule != "outside":
        num_shards = 1 if arguments["shards"] is None else arguments["shards"][0]
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
    shards: tuple[int, str] | None = None,
    reduction: str = "sum_over_batch_size",
    weights: str | None = None,
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
        shards: T and the collective of sharded dense layers, or None for plain ones.
        reduction: Of the loss.
        weights: Shape of the sample weights, `"rows"` or `"column"`, or None.
        quantized: When the ranges of quantized layers move, or None for plain layers.
        tolerance: Relative and absolute, in place of those of the type.
        kernels: `"gpu"` for the operations that GPUs are given, `"tpu"` for functions
            all compiled by XLA, `"fused"` for chains of operations compiled however
            small they are.
        **arguments: More arguments of the pipeline.
    """
    M = num_microbatches
    arguments = {"num_microbatches": M, **stack.arguments, **arguments}
    rtol, atol = tolerance or compare.TOLERANCES[dtype]
    transfer_dtype = arguments.get("transfer_dtype")
    num_shards = 1 if shards is None else shards[0]
    dense = times_as_wide(num_shards)

    def make(shards: tuple[int, str] | None = None) -> Any:
        made = stack.make(sharded(*shards) if shards else dense)
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
        layer = tfgpipe.PipelinedLayer(make(shards), **arguments)
        pipelined = keras.Sequential([keras.Input(**input_of(stack)), layer])
    else:
        pipelined = tfgpipe.pipeline(modelled(make(shards), stack), **arguments)
        (layer,) = (
            x for x in pipelined.layers if isinstance(x, tfgpipe.PipelinedLayer)
        )
    traced: Callable[[], Any] = {
        "native": contextlib.nullcontext,
        "fused": functools.partial(mock.patch.object, fusion, "_MIN_SAVED_ELEMENTS", 0),
        "gpu": functools.partial(layer.traced_for, "GPU"),
        "tpu": functools.partial(layer.traced_for, "TPU"),
    }[kernels]
    rng = np.random.default_rng(0)
    for variable in plain.trainable_variables:
        # Biases of zero, and scales of one, would hide much.
        variable.assign_add(rng.uniform(-0.2, 0.2, variable.shape))
    Shards(plain.variables, pipelined.variables, num_shards).assign()
    in_microbatches = not stack.rowwise or transfer_dtype == "int8_channel"
    x = stack.inputs(rows)
    if outside:
        reference = OneAfterAnother(plain, M) if in_microbatches else plain
        specs = compare.unknown_sizes(x) if unknown else None
        expected = compare.run(reference, x, graph=False)
        with traced():
            received = compare.run(pipelined, x, graph=not eagerly, specs=specs)
        assert any(np.any(g) for g in expected.weight_grads.values())
        received = whole(received, "weight_grads", plain, pipelined, num_shards)
        compare.assert_same(expected, received, rtol=rtol, atol=atol)
        return
    reference = InMicrobatches(plain, M) if in_microbatches else plain
    data = [x, stack.targets(rows, reference(x).shape[1:])]
    if weights is not None:
        given = np.arange(1.0, rows + 1).astype(dtype)
        data.append(given if weights == "rows" else given[:, None])
    # Eagerly, as what batches of the reference hold is not to depend on any graph.
    for model, at_once in ((reference, True), (pipelined, eagerly)):
        kinds = stack.compiled(reduction)
        model.compile(train_steps.Keeps(), **kinds, run_eagerly=at_once)
    before = train_steps.train(reference, *data)
    with traced():
        after = train_steps.train(pipelined, *data, unknown=unknown)
    assert any(np.any(g) for g in before.gradients.values())
    after = whole(after, "gradients", plain, pipelined, num_shards)
    train_steps.assert_same(before, after, rtol=rtol, atol=atol)


def input_of(stack: Stack) -> dict[str, Any]:
    dtype = "int32" if stack.ids else keras.config.floatx()
    return {"shape": stack.shape, "dtype": dtype}


def modelled(made: Sequence[keras.layers.Layer] | keras.Model, stack: Stack) -> Any:
    if isinstance(made, keras.Model):
        return made
    return keras.Sequential([keras.Input(**input_of(stack)), *made])


def times_as_wide(num_shards: int) -> Dense:
    """Returns what makes dense layers of so many times the units."""
    return lambda units, **kwargs: layers.Dense(num_shards * units, **kwargs)


def sharded(num_shards: int, collective: str) -> Dense:
    """Returns what makes the same layers in shards, of columns and of rows in turn."""
    partitions = itertools.cycle(["column", "row"])

    def dense(units: int, **kwargs: Any) -> keras.layers.Layer:
        return tfgpipe.layers.TPDense(
            num_shards * units,
            partition=next(partitions),
            collective=collective,
            num_shards=num_shards,
            **kwargs,
        )

    return dense


def whole(
    done: Any, gradients: str, plain: keras.Model, other: keras.Model, num_shards: int
) -> Any:
    """Returns a run or a step, its gradients and state named as the plain model's."""
    kinds = {gradients: "trainable_variables", "state": "non_trainable_variables"}
    joined = {}
    for kind, name in kinds.items():
        before = getattr(plain, name)
        shards = Shards(before, getattr(other, name), num_shards)
        names = [f"{i}: {v.path}" for i, v in enumerate(before)]
        values = shards.joined([*getattr(done, kind).values()])
        joined[kind] = dict(zip(names, values, strict=True))
    return dataclasses.replace(done, **joined)
