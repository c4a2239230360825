"""One training step of a pipeline against the plain Keras model, in every way there is.

A case of `identity_cases` takes a value of each factor: a model of `identity_models`,
the schedule, how it is cut and fed, and what is done on the way. Whatever it is,
outputs, losses, metrics, every gradient and every state variable are those of the plain
model on the whole mini-batch. Only where a layer mixes the examples of a microbatch
(batch statistics) or draws by it (dropout) the plain model takes the mini-batch in
microbatches as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any
from unittest import mock

import keras
import numpy as np

import tfgpipe
from tests.helpers import compare, train_steps
from tests.helpers.identity_cases import devices_of
from tests.helpers.identity_models import STACKS, Dense, Stack
from tests.helpers.reference import (
    InMicrobatches,
    OneAfterAnother,
    Shards,
    even_cut,
    with_crossings,
)
from tfgpipe import quantization
from tfgpipe.graph.passes import fusion
from tfgpipe.runtime import step

layers = keras.layers


def assert_case(
    *,
    stack: str,
    schedule: str,
    num_stages: int,
    num_microbatches: int,
    rows: str,
    sizes: str,
    execution: str,
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
        num_shards = arguments["shards"][0] if arguments["shards"] else 1
        num_devices = devices_of(schedule, num_stages) * num_shards
        arguments["schedule"] = schedule
        arguments["devices"] = [f"CPU:{p}" for p in range(num_devices)]
    assert_same_step(
        STACKS[stack],
        {"even": 2 * M, "uneven": 2 * M + 1, "few": max(1, M - 1)}[rows],
        outside=schedule == "outside",
        num_microbatches=M,
        unknown=sizes == "unknown",
        eagerly=execution == "eager",
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
            all compiled by XLA, `"inlined"` for functions inlined
            as in small steps, `"fused"` for chains of operations compiled however
            small they are.
        **arguments: More arguments of the pipeline.
    """
    M = num_microbatches
    num_shards = shards[0] if shards else 1
    arguments = {"num_microbatches": M, **stack.arguments, **arguments}
    plain = plain_model(stack, num_shards, quantized, arguments)
    compare.fresh_names()
    pipelined = pipelined_model(stack, shards, quantized, outside, arguments)
    rng = np.random.default_rng(0)
    for variable in plain.trainable_variables:
        # Biases of zero, and scales of one, would hide much.
        variable.assign_add(rng.uniform(-0.2, 0.2, variable.shape))
    Shards(plain.variables, pipelined.variables, num_shards).assign()
    mixes = not stack.rowwise or arguments.get("transfer_dtype") == "int8_channel"
    x = stack.inputs(rows)
    if outside:
        gradients, assert_same = "weight_grads", compare.assert_same
        reference = OneAfterAnother(plain, M) if mixes else plain
        specs = compare.unknown_sizes(x) if unknown else None
        before = compare.run(reference, x, graph=False)
        with traced_for(kernels, pipelined):
            after = compare.run(pipelined, x, graph=not eagerly, specs=specs)
    else:
        gradients, assert_same = "gradients", train_steps.assert_same
        reference = InMicrobatches(plain, M) if mixes else plain
        data = [x, stack.targets(rows, reference(x).shape[1:])]
        if weights is not None:
            given = np.arange(1.0, rows + 1).astype(dtype)
            data.append(given if weights == "rows" else given[:, None])
        # Eagerly, as what batches of the reference hold is not to depend on any graph.
        for model, at_once in ((reference, True), (pipelined, eagerly)):
            kinds = stack.compiled(reduction)
            model.compile(train_steps.Keeps(), **kinds, run_eagerly=at_once)
        before = train_steps.train(reference, *data)
        with traced_for(kernels, pipelined):
            after = train_steps.train(pipelined, *data, unknown=unknown)
    assert any(np.any(g) for g in getattr(before, gradients).values())
    after = whole(after, gradients, plain, pipelined, num_shards)
    rtol, atol = tolerance or compare.TOLERANCES[dtype]
    assert_same(before, after, rtol=rtol, atol=atol)


def plain_model(
    stack: Stack, num_shards: int, quantized: str | None, arguments: dict[str, Any]
) -> keras.Model:
    """Returns the model without shards, with a layer for each boundary's rounding."""
    dense = times_as_wide(num_shards)
    if stack.reference:
        made = stack.reference(dense, arguments["num_microbatches"])
    else:
        made = quantized_layers(stack, dense, quantized)
    if arguments.get("transfer_dtype") is not None:
        made = with_crossings(made, arguments["balance"], arguments["transfer_dtype"])
    return stack.model(made)


def pipelined_model(
    stack: Stack,
    shards: tuple[int, str] | None,
    quantized: str | None,
    outside: bool,
    arguments: dict[str, Any],
) -> keras.Model:
    """Returns the pipeline, as a layer of a model if its loss is outside."""
    dense = sharded(*shards) if shards else times_as_wide(1)
    made = quantized_layers(stack, dense, quantized)
    if outside:
        layer = tfgpipe.PipelinedLayer(made, **arguments)
        return keras.Sequential([stack.input(), layer])
    return tfgpipe.pipeline(stack.model(made), **arguments)


def quantized_layers(stack: Stack, dense: Dense, quantized: str | None) -> Any:
    made = stack.make(dense)
    return quantization.apply(made, range_update=quantized) if quantized else made


def traced_for(kernels: str, pipelined: keras.Model) -> Any:
    """Returns a context in which a pipeline is traced for such kernels."""
    if kernels == "native":
        return contextlib.nullcontext()
    if kernels == "inlined":
        return mock.patch.object(step, "FEW_OPERATIONS", 2**20)
    if kernels == "fused":
        return mock.patch.object(fusion, "MIN_SAVED_ELEMENTS", 0)
    (layer,) = (x for x in pipelined.layers if isinstance(x, tfgpipe.PipelinedLayer))
    return layer.traced_for(kernels.upper())


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
