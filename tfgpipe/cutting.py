"""Where a whole Keras model is cut: planned before, and changed while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfgpipe import (
    arrangement,
    checks,
    original,
    planning,
    profiles,
    rows,
    schedules,
    shards,
)
from tfgpipe import mesh as mesh_lib
from tfgpipe.pipelined_layer import PipelinedLayer
from tfgpipe.planning import Plan
from tfgpipe.profiles import QUANTITIES, Quantity, Settings
from tfgpipe.schedule import Schedule
from tfgpipe.stage import REMAT_MODES, Remat
from tfgpipe.transfer import TRANSFER_DTYPES, TransferDtype


@checks.with_names_checked()
def plan(
    model: keras.Model | Sequence[keras.layers.Layer],
    *,
    num_stages: int | None = None,
    num_microbatches: int,
    balance: Quantity | Sequence[int] | Sequence[str] = "params",
    remat: Remat = "stage",
    transfer_dtype: TransferDtype | None = None,
    sample: Any = None,
    batch_size: int = 32,
    memory_limit: float | None = None,
    num_slots: int = 2,
    schedule: schedules.Name | Schedule = "gpipe",
    device: str | None = None,
) -> Plan:
    """Plans where to cut a model, without building anything on a device.

    The cut is the best one there is: no other contiguous cut has a lighter heaviest
    stage, and of those that are as good none sends fewer bytes between stages.

    Example:

    >>> layers = [keras.layers.Dense(64, name=f"dense_{i}") for i in range(6)]
    >>> x = np.ones((32, 64), "float32")
    >>> plan = tfgpipe.plan(layers, num_stages=3, num_microbatches=4, sample=x)
    >>> plan.counts, plan.imbalance
    ((2, 2, 2), 1.0)
    >>> print(plan)  # doctest: +ELLIPSIS
    3 stages, 4 microbatches of 8 rows, remat=stage, balanced by params
    stage  layers            parameters  FLOPs     memory  receives  share
    0      dense_0, dense_1       8,320  ... k  134.0 KiB       0 B  33.3%
    1      dense_2, dense_3       8,320  ... k  142.0 KiB   2.0 KiB  33.3%
    2      dense_4, dense_5       8,320  ... k  142.0 KiB   2.0 KiB  33.3%
    imbalance 1.000, bubble 33.3%, 142.0 KiB on the fullest device

    Args:
        model: A Functional or Sequential model, or layers that each take what the one
            before returns. Layers that are not built stay so.
        num_stages: K. Defaults to that of a cut given as `balance`, else to as many as
            visible GPUs or logical CPUs are enough for.
        num_microbatches: M.
        balance: What of the stage that has most of it is to be least: `"params"`;
            `"flops"`, counted in the layers' traced forward and backward; `"time"`,
            measured by running each layer's forward and backward on a microbatch;
            `"memory"`, the bytes of weights, gradients, slots and activations. Or a cut
            to look at, as numbers of calls or as names of layers that end stages.
        remat: What the backward recomputes.
        transfer_dtype: What values are compressed to on their way from stage to stage.
        sample: A mini-batch as the model takes it. A list of layers needs one, and a
            model with inputs of unknown sizes.
        batch_size: Rows of the mini-batch, where there is no sample.
        memory_limit: Bytes that a device has, for all its stages, or None.
        num_slots: Optimizer slots a trained weight: 2 for Adam, 1 for momentum.
        schedule: What the pipeline is to run by: how many microbatches a stage holds,
            and which stages share a device. A `tfgpipe.Schedule` may be for more
            devices than there are here.
        device: Where to measure time. Defaults to the first.

    Raises:
        ValueError: If the model cannot be cut as asked, if no cut stays within the
            memory limit (by how much is said), or if a size is not known.
        TypeError: If `model` has a `call` of its own.
    """
    checks.choice("remat", remat, REMAT_MODES)
    checks.choice("transfer_dtype", transfer_dtype, TRANSFER_DTYPES)
    checks.num_microbatches(num_microbatches)
    given = original.make(original.copied_if_unbuilt(model))
    chosen: Quantity | tuple[int, ...]
    if isinstance(balance, str):
        chosen = checks.choice("balance", balance, QUANTITIES)
        there = len(mesh_lib.default_devices()) // shards.count(given.calls)
        if isinstance(schedule, Schedule) and num_stages is None:
            num_stages = schedule.num_stages
        num_stages = max(there, 1) if num_stages is None else num_stages
        profiles.check_possible(given.calls, num_stages, given.closed)
    else:
        chosen = given.counts(balance)
        checks.counts_for_stages(chosen, balance, num_stages)
        num_stages = len(chosen)
    if given.inputs is None and sample is None:
        raise ValueError(
            "The costs of layers depend on what they are given. Received a list of "
            "layers and no `sample`. Pass a mini-batch, `sample=x`."
        )
    if isinstance(schedule, Schedule):
        arrangement.check(schedule, num_stages, num_microbatches)
        order = schedule
    else:
        order = arrangement.arrange(
            schedule,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            balance=balance,
            devices=None,
            num_shards=shards.count(given.calls),
        ).schedule
    mesh = mesh_lib.make_mesh(num_stages=1, devices=device and [device])
    inputs = original.symbolic(sample) if given.inputs is None else given.inputs
    with keras.StatelessScope(initialize_variables=False):
        recorded = given.record(inputs, {})
        rows.check(recorded, num_microbatches=num_microbatches)
        return planning.make(
            recorded,
            chosen,
            Settings(
                num_stages=num_stages,
                num_microbatches=num_microbatches,
                remat=remat,
                memory_limit=memory_limit,
                num_slots=num_slots,
                transfer_dtype=transfer_dtype,
                schedule=order,
            ),
            sample=None if sample is None else [*given.feed(sample, {}).values()],
            batch_size=batch_size,
            device=mesh.grid[0][0],
        )


def recut(model: keras.Model, balance: Sequence[int] | Sequence[str]) -> None:
    """Changes the layers of each stage of a model that is trained already.

    Training goes on as it would have, to rounding: TensorFlow may fuse or rewrite other
    operations where stages end elsewhere, which can differ in the last bit. With
    `tf.config.optimizer.set_experimental_options({"remapping": False,
    "arithmetic_optimization": False})` it does neither, and the bits are equal.

    Weights and optimizer slots move to the devices of their new stages. The functions
    that `fit`, `evaluate` and `predict` have traced are made again at their next use.

    Example:

    >>> layers = [keras.layers.Dense(8) for _ in range(4)]
    >>> layer = tfgpipe.PipelinedLayer(layers, num_stages=2, num_microbatches=2)
    >>> model = keras.Sequential([keras.Input((8,)), layer])
    >>> plan = layer.plan().rebalance(measured=[0.3, 0.1])  # In seconds.
    >>> tfgpipe.recut(model, plan.counts)
    >>> [len(stage.layers) for stage in layer.stages]
    [1, 3]

    Args:
        model: A model that holds one `PipelinedLayer`.
        balance: Each stage's number of calls, or the names of the layers that end each
            stage but the last.

    Raises:
        ValueError: If the layers cannot be cut so, or the model does not hold exactly
            one pipeline.
    """
    pipelines = pipelines_in(model)
    if len(pipelines) != 1:
        raise ValueError(
            "`recut` cuts the pipeline of a model anew. Received a model "
            f"'{model.name}' that holds {len(pipelines)} of them. Use "
            "`PipelinedLayer.recut` on each."
        )
    pipelines[0].recut(balance, optimizer=getattr(model, "optimizer", None))
    model.train_function = model.test_function = model.predict_function = None


def pipelines_in(layer: keras.layers.Layer) -> list[PipelinedLayer]:
    """Returns the pipelines in a model, or the one that is given."""
    if isinstance(layer, PipelinedLayer):
        return [layer]
    inner = layer.layers if isinstance(layer, keras.Model) else ()
    return [found for each in inner for found in pipelines_in(each)]
