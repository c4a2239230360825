"""`tfgpipe.plan`: the partition of a model, without building it on devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import keras

from tfgpipe import remat as remat_lib
from tfgpipe import schedules
from tfgpipe._util import argument_checks
from tfgpipe.capture import source_model
from tfgpipe.devices import default_devices, make_mesh, sharding
from tfgpipe.partition.configuration import check_schedule, resolve
from tfgpipe.partition.plans import Plan, make_plan
from tfgpipe.partition.profiles import (
    QUANTITIES,
    PlanSettings,
    Quantity,
    check_feasible,
)
from tfgpipe.remat import RematLike
from tfgpipe.runtime import check_batch_independence
from tfgpipe.schedules import Schedule
from tfgpipe.stage import TransferDtype


@argument_checks.checks_argument_names()
def plan(
    model: keras.Model | Sequence[keras.layers.Layer],
    *,
    num_stages: int | None = None,
    num_microbatches: int,
    balance: Quantity | Sequence[int] | Sequence[str] = "params",
    remat: RematLike = "stage",
    transfer_dtype: TransferDtype | None = None,
    sample: Any = None,
    batch_size: int = 32,
    memory_limit: float | None = None,
    num_slots: int = 2,
    schedule: schedules.Name | Schedule = "gpipe",
    device: str | None = None,
) -> Plan:
    """Plans the partition of a model, without building anything on a device.

    The partition is optimal: no other contiguous one has a smaller bottleneck, and of
    those with the same bottleneck none sends fewer bytes between stages.

    Example:

    >>> layers = [keras.layers.Dense(64, name=f"dense_{i}") for i in range(6)]
    >>> x = np.ones((32, 64), "float32")
    >>> plan = tfgpipe.plan(layers, num_stages=3, num_microbatches=4, sample=x)
    >>> plan.calls_per_stage, plan.imbalance
    ((2, 2, 2), 1.0)
    >>> print(plan)  # doctest: +ELLIPSIS
    3 stages, 4 microbatches of 8 examples, remat=stage, balanced by params
    stage  layers            parameters  FLOPs     memory  receives  share
    0      dense_0, dense_1       8,320  ... k  134.0 KiB       0 B  33.3%
    1      dense_2, dense_3       8,320  ... k  142.0 KiB   2.0 KiB  33.3%
    2      dense_4, dense_5       8,320  ... k  142.0 KiB   2.0 KiB  33.3%
    imbalance 1.000, bubble 33.3%, 142.0 KiB on the fullest device

    Args:
        model: A Functional or Sequential model, or layers that each take what the one
            before returns. Layers that are not built stay so.
        num_stages: K. Defaults to that of a partition given as `balance`, else to as
            many as visible GPUs or logical CPUs are enough for.
        num_microbatches: M.
        balance: What to minimise on the largest stage: `"params"`;
            `"flops"`, counted in the layers' traced forward and backward; `"time"`,
            measured by running each layer's forward and backward on a microbatch;
            `"memory"`, the bytes of weights, gradients, slots and activations. Or a
            partition to look at, as calls per stage or as names of layers that end
            stages.
        remat: What the backward recomputes: a name, or a `tfgpipe.remat.Remat`.
        transfer_dtype: What values are compressed to between stages.
        sample: A mini-batch as the model takes it. A list of layers needs one, and a
            model with inputs of unknown sizes.
        batch_size: Examples in the mini-batch, where there is no sample.
        memory_limit: Bytes that a device has, for all its stages, or None.
        num_slots: Optimizer slots a trained weight: 2 for Adam, 1 for momentum.
        schedule: How many microbatches each stage has in flight, and which stages
            share a device. A `tfgpipe.Schedule` may be for more
            devices than there are here.
        device: Where to measure time. Defaults to the first.

    Raises:
        ValueError: If the model has no such partition, if none stays within the memory
            limit (by how much is said), or if a size is not known.
        TypeError: If `model` has a `call` of its own.
    """
    remat = remat_lib.find(remat)
    argument_checks.check_choice(
        "transfer_dtype", transfer_dtype, (None, *get_args(TransferDtype))
    )
    memory_limit = argument_checks.check_memory_limit(memory_limit)
    source = source_model.make_source(source_model.copy_unbuilt(model))
    num_shards = sharding.num_shards(source.calls)
    chosen: Quantity | tuple[int, ...]
    if isinstance(balance, str):
        chosen = argument_checks.check_choice("balance", balance, QUANTITIES)
        if num_stages is None:
            available = len(default_devices()) // num_shards
            num_stages = (
                schedule.num_stages
                if isinstance(schedule, Schedule)
                else max(available, 1)
            )
        check_feasible(source.calls, num_stages, source.opaque_calls)
    else:
        chosen = source.calls_per_stage(balance, num_stages)
        num_stages = len(chosen)
    if source.inputs is None and sample is None:
        raise ValueError(
            "The costs of layers depend on what they are given. Received a list of "
            "layers and no `sample`. Pass a mini-batch, `sample=x`."
        )
    if isinstance(schedule, Schedule):
        check_schedule(schedule, num_stages, num_microbatches)
    else:
        schedule = resolve(
            schedule,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            balance=balance,
            devices=None,
            num_shards=num_shards,
        ).schedule
    mesh = make_mesh(num_stages=1, devices=device and [device])
    inputs = source.inputs
    if inputs is None:
        inputs = source_model.to_symbolic(sample)
    with keras.StatelessScope(initialize_variables=False):
        captured = source.capture(inputs, {})
        check_batch_independence(captured, num_microbatches=num_microbatches)
        return make_plan(
            captured,
            chosen,
            PlanSettings(
                num_stages=num_stages,
                num_microbatches=num_microbatches,
                remat=remat,
                memory_limit=memory_limit,
                num_slots=num_slots,
                transfer_dtype=transfer_dtype,
                schedule=schedule,
            ),
            sample=None
            if sample is None
            else [*source.flatten_inputs(captured, sample, {}).values()],
            batch_size=batch_size,
            device=mesh.primary_devices[0][0],
        )
