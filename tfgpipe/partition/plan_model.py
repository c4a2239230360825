"""`tfgpipe.plan`: the partition of a model, without building it on devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import keras

from tfgpipe.capture import source_model
from tfgpipe.devices import make_mesh
from tfgpipe.partition.config import PipelineConfig, PlanOptions, takes_options
from tfgpipe.partition.plans import Plan, check_memory, make_plan
from tfgpipe.partition.resolution import resolve_plan
from tfgpipe.runtime import check_batch_independence


@takes_options(PlanOptions)
def plan(
    model: keras.Model | Sequence[keras.layers.Layer],
    *,
    sample: Any = None,
    batch_size: int = 32,
    num_slots: int = 2,
    device: str | Sequence[str] | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Plans the partition of a model, without building anything on a device.

    The partition is optimal: no other contiguous one has a smaller bottleneck, and of
    those with the same bottleneck none sends fewer bytes between stages. It may be for
    more devices than there are here.

    Example:

    >>> layers = [keras.layers.Dense(64, name=f"dense_{i}") for i in range(6)]
    >>> x = np.ones((32, 64), "float32")
    >>> plan = tfgpipe.plan(layers, num_stages=3, num_microbatches=4, sample=x)
    >>> plan.calls_per_stage, plan.imbalance
    ((2, 2, 2), 1.0)
    >>> print(plan)  # doctest: +ELLIPSIS
    3 stages, 4 microbatches of 8 examples, remat=stage, balanced by params
    stage  layers            parameters  FLOPs     memory  receives  share
    0      dense_0, dense_1       8,320  ... k  142.0 KiB       0 B  33.3%
    1      dense_2, dense_3       8,320  ... k  142.0 KiB   2.0 KiB  33.3%
    2      dense_4, dense_5       8,320  ... k  142.0 KiB   2.0 KiB  33.3%
    imbalance 1.000, bubble 33.3%, 142.0 KiB on the fullest device

    Args:
        model: A Functional or Sequential model, or layers that each take what the one
            before returns. Layers that are not built stay so.
        sample: A mini-batch as the model takes it. A list of layers needs one, and a
            model with inputs of unknown sizes.
        batch_size: Examples in the mini-batch, where there is no sample.
        num_slots: Optimizer slots a trained weight: 2 for Adam, 1 for momentum.
        device: Name of the device to measure time on. Defaults to the first. Or the
            names of all P, whose speeds are then measured with the model's layers:
            `plan.settings.speeds`, to be given as `device_speeds`.
        **options: Fields of `tfgpipe.PipelineConfig`.

    Raises:
        ValueError: If the model has no such partition, if none stays within the memory
            limit (by how much is said), or if a size is not known.
        TypeError: If `model` has a `call` of its own.
    """
    config = PipelineConfig.of(options, takes=PlanOptions)
    source = source_model.make_source(source_model.copy_unbuilt(model))
    schedule, calls_per_stage = resolve_plan(config, source)
    if source.inputs is None and sample is None:
        raise ValueError(
            "The costs of layers depend on what they are given. Received a list of "
            "layers and no `sample`. Pass a mini-batch, `sample=x`."
        )
    devices = [device] if isinstance(device, str) else device
    if devices is not None and len(devices) > 1:
        _check_timed(config, len(devices), schedule.num_devices)
    mesh = make_mesh(num_stages=len(devices or [""]), devices=devices)
    inputs = source.inputs
    if inputs is None:
        inputs = source_model.to_symbolic(sample)
    with keras.StatelessScope(initialize_variables=False):
        captured = source.capture(inputs, {})
        check_batch_independence(captured, num_microbatches=config.num_microbatches)
        plan = make_plan(
            captured,
            calls_per_stage or config.balance,
            config.plan_settings(schedule, num_slots, order=config.schedule),
            sample=None
            if sample is None
            else [*source.flatten_inputs(captured, sample, {}).values()],
            batch_size=batch_size,
            devices=mesh.primary_devices[0],
        )
        return check_memory(plan)


def _check_timed(config: PipelineConfig, count: int, num_devices: int) -> None:
    """Raises ValueError if the speeds of so many devices are of no use."""
    is_timed = config.partition is None and config.balance.is_measured
    if count != num_devices or not is_timed or config.device_speeds is not None:
        raise ValueError(
            'The speeds of devices are measured for `balance="time"`, with all '
            f"devices of the pipeline in `device`, {num_devices} here, and no "
            f"`device_speeds`. Received {count} devices, balance={config.balance}, "
            f"partition={config.partition}, device_speeds={config.device_speeds}."
        )
