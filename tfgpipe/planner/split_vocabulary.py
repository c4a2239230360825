"""A configuration with its vocabulary over all devices of a pipeline.

That is `tfgpipe.layers.SplitVocabulary` (Yeung et al. 2024): of P devices each has a
stage of blocks, and a P-th part of the head as a stage of its own. The order of the
actions is searched for, as it is for the pipeline itself, among those of whole
backwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfgpipe import schedules
from tfgpipe.costs import LayerCost, TensorBytes
from tfgpipe.planner import step_time
from tfgpipe.planner.parallel_config import ParallelConfig
from tfgpipe.planner.plan_request import Estimate, PlanRequest
from tfgpipe.planner.workload import Workload
from tfgpipe.schedules import DataFlow
from tfgpipe.simulation import AutoSchedule, Costs, best_schedule

# Bytes of the terms of the loss that a part returns of a position.
_TERMS = 4 * 4


def with_split_vocabulary(request: PlanRequest, config: ParallelConfig) -> Estimate:
    """Returns the estimate of a configuration whose head is in parts.

    Args:
        request: The model, whose last layer is the head, and the devices.
        config: The configuration, of whose schedule nothing stays.

    Raises:
        ValueError: If the model ends in no head, the pipeline is on one device, or
            replicas share out weights.
    """
    workload, P = request.workload, config.num_devices
    if workload.layers[-1].num_tokens < P or P == 1 or config.weight_share < 1:
        raise ValueError(
            "A vocabulary is split over the devices of a pipeline whose weights are "
            f"whole. Received '{workload.name}', which ends in "
            f"'{workload.layers[-1].name}', for {config}. Plan such a pipeline of a "
            "model that ends in its head, as `tfgpipe.planner.transformer` does."
        )
    blocks = _request(request, workload.layers[:-1]).partition(
        dataclasses.replace(config, schedule=schedules.one_f_one_b, stages_per_device=1)
    )
    split = _request(request, (*workload.layers[:-1], *_parts(workload, P)))
    layers_per_stage = (*blocks, *[1] * (P + 1))
    staged = split.staged(_ordered(config), layers_per_stage)
    costs = step_time.search_costs(staged)
    try:
        config = _ordered(config, costs, step_time.available_bytes(staged))
    except ValueError:  # Nothing that was found fits.
        config = _ordered(config, costs)
    return split.estimate(config, layers_per_stage)


def _request(request: PlanRequest, layers: tuple[LayerCost, ...]) -> PlanRequest:
    workload = dataclasses.replace(request.workload, layers=layers)
    return dataclasses.replace(request, workload=workload)


def _parts(workload: Workload, P: int) -> list[LayerCost]:
    """Returns P parts of the head, and the loss that joins them."""
    head = workload.layers[-1]
    tensors, terms = head.tensors, _TERMS * head.positions
    inputs = tensors.inputs if tensors.saves_inputs else 0.0
    part = dataclasses.replace(
        head,
        weights=dataclasses.replace(
            head.weights,
            count=head.weights.count / P,
            trained=head.weights.trained and head.weights.trained / P,
        ),
        flops=head.flops / P,
        traffic=head.traffic / P,
        tensors=dataclasses.replace(
            tensors,
            saved=inputs + (tensors.saved - inputs) / P,
            workspace=tensors.workspace / P,
            kept=tensors.kept / P,
            outputs=terms,
        ),
    )
    loss = LayerCost(
        name="loss",
        tensors=TensorBytes(saved=P * terms, inputs=P * terms, received=terms),
        positions=head.positions,
    )
    return [
        *(dataclasses.replace(part, name=f"{head.name} {p}") for p in range(P)),
        loss,
    ]


def _ordered(
    config: ParallelConfig,
    costs: Costs | None = None,
    memory_limit: Sequence[float] | None = None,
) -> ParallelConfig:
    """Returns a configuration in the best order that is found in seconds.

    Args:
        config: The configuration.
        costs: The costs of the blocks, the parts of the head, and the loss. None for an
            order that holds little.
        memory_limit: Bytes of each device, or None.
    """
    P, M = config.num_devices, config.num_microbatches
    placement = (*range(P), *range(P), P - 1)
    line = DataFlow.line(P).sources
    flow = DataFlow((*line, *[(P - 1,)] * P, tuple(range(P, 2 * P))))
    if costs is None:
        order = AutoSchedule().on(placement, M, flow)
    else:
        order = best_schedule(
            costs,
            placement,
            M,
            flow=flow,
            memory_limit=memory_limit,
            splits_backwards=False,
            effort=1,
        ).schedule
    order = dataclasses.replace(order, name=f"auto, vocabulary / {P}")
    return dataclasses.replace(config, schedule=order, stages_per_device=1)
