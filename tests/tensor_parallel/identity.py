"""Sharded layers beside Keras' own, alone, trained and as parts of stages."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np

import tfgpipe
from tests.helpers import compare, pairwise
from tests.helpers.reference import Shards
from tests.tensor_parallel.models import CASES, WAYS, assert_same
from tfgpipe.tensor_parallel import OutputLoss

# Half precision rounds sums of parts, which a whole sum does not have. Relative to the
# largest value.
HALF = {"mixed_float16": 8e-3, "mixed_bfloat16": 6e-2}

GRID = pairwise.all_pairs({"case": [*CASES], "T": [1, 2, 3, 4], "ways": [*WAYS]})
HALF_GRID = [
    *zip(
        CASES,
        itertools.cycle(HALF),
        itertools.cycle(["sync", "both_ways", "both_ways", "sync"]),
        strict=False,
    )
]
STAGES = pairwise.all_pairs(
    {
        "case": ["mlp", "all_in_parts", "language_model"],
        "remat": ["none", "stage", "layer", "products"],
        "ways": [*WAYS],
    }
)


def assert_equal(
    case: str,
    T: int,
    ways: str,
    *,
    dtype: str = "float64",
    unknown_sizes: bool = False,
    graph: bool = True,
) -> None:
    """Asserts that outputs, masks and every gradient are those without shards.

    Args:
        case: One of `CASES`.
        T: Shards.
        ways: One of `WAYS`.
        dtype: Which `keras.config.floatx` is.
        unknown_sizes: Whether the number of rows is, in the trace; it is one then.
        graph: Whether the step is traced.
    """
    plain, sharded = CASES[case].pair(T, **WAYS[ways])
    rtol, atol = compare.TOLERANCES[dtype]
    x = CASES[case].data(1 if unknown_sizes else 3)
    specs = compare.unknown_sizes(x) if unknown_sizes else None
    assert_same(plain, sharded, x, T, rtol=rtol, atol=atol, specs=specs, graph=graph)


def assert_equal_in_half_precision(case: str, policy: str, ways: str) -> None:
    """Asserts the same of three shards, within what half precision loses."""
    keras.config.set_dtype_policy(policy)
    try:
        plain, sharded = CASES[case].pair(3, **WAYS[ways])
    finally:
        keras.config.set_dtype_policy("float32")
    x, tolerance = CASES[case].data(3), HALF[policy]
    assert {w.dtype for w in sharded.trainable_weights} == {"float32"}
    assert_same(plain, sharded, x, 3, rtol=tolerance, atol=tolerance)


def assert_equal_weights_of_a_seed(case: str) -> None:
    """Asserts that a seed draws the weights of the model without shards."""
    keras.utils.set_random_seed(5)
    plain = CASES[case].make(None)
    compare.fresh_names()
    keras.utils.set_random_seed(5)
    sharded = CASES[case].make(4)
    x = CASES[case].data(3)
    rtol, atol = compare.TOLERANCES["float32"]
    assert_same(plain, sharded, x, 4, rtol=rtol, atol=atol, training=False)


def assert_trains_equally(case: str, ways: str, *, epochs: int) -> None:
    """Asserts that `fit` with Adam gives the weights of the model without shards.

    Args:
        case: "columns_and_rows" or "classifier".
        ways: One of `WAYS`.
        epochs: Each of three steps, the last one of fewer rows.
    """
    plain, sharded = CASES[case].pair(4, **WAYS[ways])
    x = CASES[case].data(12)
    losses = {"columns_and_rows": "mse", "classifier": OutputLoss()}
    y = np.ones((12, 12)) if case == "columns_and_rows" else x[1]
    for model in (plain, sharded):
        model.compile(keras.optimizers.Adam(0.01), losses[case])
        model.fit(x, y, batch_size=5, epochs=epochs, shuffle=False, verbose=0)
    received = Shards(plain.weights, sharded.weights, 4).joined(sharded.get_weights())
    compare.assert_close(plain.get_weights(), received, 1e-10, 1e-12)


def pipelined(
    case: str, plain: keras.Model, *, T: int, ways: str, **arguments: Any
) -> keras.Model:
    """Returns a pipeline of a sharded model, with the weights of the plain one."""
    compare.fresh_names()
    model = tfgpipe.pipeline(CASES[case].make(T, **WAYS[ways]), **arguments)
    Shards(plain.weights, model.weights, T).assign()
    return model


def assert_equal_in_stages(case: str, remat: str, ways: str) -> None:
    """Asserts that outputs and gradients of a pipeline are those without shards."""
    plain, _ = CASES[case].pair(1)
    model = pipelined(
        case, plain, T=2, ways=ways, num_stages=2, num_microbatches=2, remat=remat
    )
    rtol, atol = compare.TOLERANCES["float64"]
    x = CASES[case].data(4)
    # Microbatches draw different masks of dropout.
    assert_same(plain, model, x, 2, rtol=rtol, atol=atol, training=case != "mlp")


def assert_schedule_trains_equally(schedule: str) -> None:
    """Asserts that a schedule trains to the weights of the model without shards."""
    plain, _ = CASES["classifier"].pair(1)
    interleaved = {"devices": [f"CPU:{i}" for i in range(4)], "num_stages": 2}
    arguments = interleaved if schedule == "interleaved" else {"num_stages": 2}
    model = pipelined(
        "classifier",
        plain,
        T=2,
        ways="ring",
        num_microbatches=4,
        schedule=schedule,
        **arguments,
    )
    x = CASES["classifier"].data(12)
    for each in (plain, model):
        optimizer = keras.optimizers.Adam(0.01)
        each.compile(optimizer, OutputLoss(), jit_compile=False)
        each.fit(x, x[1], batch_size=8, epochs=2, shuffle=False, verbose=0)
    received = Shards(plain.weights, model.weights, 2).joined(model.get_weights())
    compare.assert_allclose(received, plain.get_weights(), rtol=1e-10, atol=1e-12)
