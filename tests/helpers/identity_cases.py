"""What a step may be asked for: factors, the values that cannot meet, and cases."""

from __future__ import annotations

from typing import Any

from tests.helpers import pairwise
from tests.helpers.identity_models import LISTED, STACKS
from tests.helpers.layer_stacks import REMAT_MODES, TRANSFER_DTYPES
from tests.helpers.some_schedules import FOLDED
from tfgpipe import schedules
from tfgpipe.quantization.fake_quant import RANGE_UPDATES

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
    # On CPUs as on them, with functions inlined, as in small steps, with all chains of
    # operations fused, as on GPUs, or as on TPUs, where XLA compiles every function.
    "kernels": ("native", "inlined", "fused", "gpu", "tpu"),
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


def cases(factors: pairwise.Factors, *, strength: int = 2) -> list[dict[str, Any]]:
    """Returns cases in which all values meet that can, by pairs or more."""
    found = pairwise.all_pairs(factors, impossible=IMPOSSIBLE, strength=strength)
    return [dict(zip(factors, case, strict=True)) for case in found]


def devices_of(schedule: str, num_stages: int) -> int:
    """Returns over how many devices stages go: two on each, or all on one."""
    if schedule == "outside" or not schedules.find(schedule).deals_stages:
        return num_stages
    return num_stages // 2 if num_stages % 2 == 0 else 1


# -- what cannot meet: each rule is true of values of the factors that it names -------

IMPOSSIBLE: list[pairwise.Rule] = []


def impossible(rule: pairwise.Rule) -> pairwise.Rule:
    IMPOSSIBLE.append(rule)
    return rule


@impossible
def more_devices_than_there_are(num_stages, shards):
    """Tests have eight."""
    return shards and num_stages * shards[0] > 8


@impossible
def too_few_microbatches(schedule, num_stages, num_microbatches):
    """Some schedules need as many as devices, or more."""
    if schedule == "outside":
        return False
    num_devices = devices_of(schedule, num_stages)
    return num_microbatches < schedules.find(schedule).min_microbatches(num_devices)


@impossible
def half_a_fold(schedule, num_stages):
    """Stages that fold back are two on each device, or one on one."""
    return schedule in FOLDED and num_stages % 2 == 1 and num_stages > 1


@impossible
def no_boundary_to_cross(transfer_dtype, num_stages):
    """One stage sends nothing."""
    return transfer_dtype and num_stages == 1


@impossible
def no_microbatch_but_the_last(remat, num_microbatches):
    """Nothing is left to recompute."""
    return remat == "except_last" and num_microbatches == 1


@impossible
def one_microbatch_of_uneven_rows(rows, num_microbatches):
    """One microbatch has all rows."""
    return rows != "even" and num_microbatches == 1


@impossible
def weights_without_a_loss(weights, schedule):
    """Outside, the caller's loss has none."""
    return weights and schedule == "outside"


@impossible
def a_reduction_without_a_loss(reduction, schedule):
    """Outside, the caller's loss has its own."""
    return reduction != "sum_over_batch_size" and schedule == "outside"


@impossible
def weights_of_rows_for_places(weights, stack):
    """Keras takes no weights of rows for losses of places."""
    return weights == "rows" and STACKS[stack].ids


@impossible
def sizes_unknown_to_no_graph(sizes, execution):
    """A size is unknown to a graph alone."""
    return sizes == "unknown" and execution == "eager"


@impossible
def rounding_that_may_differ(transfer_dtype, dtype):
    """In double precision alone no other difference ends in another rounding."""
    return transfer_dtype and dtype == "float32"


@impossible
def boundaries_without_a_reference(transfer_dtype, stack):
    """The reference has a layer at each boundary, and losses of whole mini-batches."""
    coupled = stack in ("regularised", "deferred", "balanced")
    by_batch = transfer_dtype == "int8_channel" and coupled
    return transfer_dtype and (by_batch or stack not in LISTED)


@impossible
def inlined_in_no_graph(kernels, execution):
    """Eagerly no graph has a call to inline."""
    return kernels == "inlined" and execution == "eager"


@impossible
def compiled_without_sizes(kernels, sizes):
    """XLA compiles for shapes that are known."""
    return kernels in ("fused", "tpu") and sizes == "unknown"


@impossible
def compiled_for_several_devices(kernels, shards):
    """XLA compiles what is of one device."""
    return kernels in ("fused", "tpu") and shards


@impossible
def compiled_for_no_rows(kernels, rows):
    """Each chain takes a while to compile, for microbatches without rows as well."""
    return kernels == "fused" and rows == "few"


@impossible
def compiled_in_many_stages(kernels, num_stages):
    """Each chain takes a while to compile."""
    return kernels == "fused" and num_stages > 2


@impossible
def not_compiled_as_it_runs(kernels, stack):
    """XLA draws other random numbers, and does not compile the gradient of a loop."""
    return kernels == "tpu" and stack in ("dropped", "masked")


@impossible
def quantized_in_double_precision(quantized, dtype):
    """Simulated integers are of single precision."""
    return quantized and dtype == "float64"


@impossible
def quantized_shards(quantized, shards):
    """Layers in shards have no simulated integers."""
    return quantized and shards


@impossible
def quantized_otherwise_alone(quantized, stack):
    """Layers are of kinds that are known; one called twice moves its ranges twice."""
    unknown = ("blocks", "deferred", "regularised", "balanced")
    twice = quantized == "per_step" and stack == "wide"
    return quantized and (twice or stack in unknown or stack not in LISTED)


@impossible
def ranges_of_each_call(quantized, num_microbatches):
    """A range that moves at each call moves for each microbatch."""
    return quantized == "per_call" and num_microbatches > 1


@impossible
def ranges_of_mixed_rows(quantized, stack, num_microbatches):
    """A range bounds what depends on all rows of a microbatch."""
    return quantized and not STACKS[stack].rowwise and num_microbatches > 1
