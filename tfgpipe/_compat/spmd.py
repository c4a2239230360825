"""Private TensorFlow API: annotations for XLA's SPMD partitioner.

The partitioner makes of one computation a program that all cores run, each on its part
of the tensors. Annotations say how tensors are split; collectives follow from them.
Between `enter_manual` and `leave_manual` a computation is written for one core, on its
part alone. Where nothing is partitioned XLA ignores annotations, but not these two;
outside XLA none of them has a kernel.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.python.compiler.xla.experimental import xla_sharding


def split(tensor: tf.Tensor, *, num_parts: int, axis: int = 0) -> tf.Tensor:
    """Returns a tensor that is split over the cores along an axis that they divide."""
    return _tiles(tensor.shape.rank, num_parts, axis).apply_to_tensor(
        tensor, use_sharding_op=True
    )


def replicate(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor that all cores have the whole of."""
    return xla_sharding.replicate(tensor, use_sharding_op=True)


def enter_manual(tensor: tf.Tensor, *, num_parts: int) -> tf.Tensor:
    """Returns a core's own part of a tensor that is split along the first axis.

    Args:
        tensor: A split tensor, `[num_parts * n, ...]`.
        num_parts: The number of cores.
    """
    tiles = _tiles(tensor.shape.rank, num_parts, 0)
    return xla_sharding.auto_to_manual_spmd_partition(
        tensor, tiles.proto.SerializeToString()
    )


def leave_manual(part: tf.Tensor, *, num_parts: int) -> tf.Tensor:
    """Returns the whole tensor that cores have parts of, split along the first axis.

    Args:
        part: A core's own part, `[n, ...]`.
        num_parts: The number of cores.
    """
    rows, *rest = part.shape
    tiles = _tiles(part.shape.rank, num_parts, 0)
    return xla_sharding.manual_to_auto_spmd_partition(
        part, tiles.proto.SerializeToString(), [num_parts * rows, *rest]
    )


def _tiles(rank: int, num_parts: int, axis: int) -> xla_sharding.Sharding:
    grid = np.arange(num_parts).reshape(
        [num_parts if i == axis else 1 for i in range(rank)]
    )
    return xla_sharding.Sharding.tile(grid)


def with_split_arguments(
    module: bytes, arguments: Collection[int], *, num_parts: int
) -> bytes:
    """Returns an HLO module with its arguments split, or replicated.

    TensorFlow's compiler for TPUs says so of each argument when it calls XLA, from how
    variables are stored. Elsewhere TensorFlow has no partitions and says nothing.
    Results that take the place of an argument, as the new value of a variable, are
    split as it is.
    """
    proto = hlo_pb2.HloModuleProto.FromString(module)
    (entry,) = (c for c in proto.computations if c.id == proto.entry_computation_id)
    by_id = {instruction.id: instruction for instruction in entry.instructions}
    for instruction in entry.instructions:
        if instruction.opcode == "parameter":
            is_split = instruction.parameter_number in arguments
            instruction.sharding.CopyFrom(
                _first_axis(instruction.shape, num_parts, is_split=is_split)
            )
    root = by_id[entry.root_id]
    assert root.opcode == "tuple", root.opcode
    aliased = _aliased(proto)
    root.sharding.type = xla_data_pb2.OpSharding.TUPLE
    for i, shape in enumerate(root.shape.tuple_shapes):
        is_split = aliased.get(i) in arguments
        root.sharding.tuple_shardings.append(
            _first_axis(shape, num_parts, is_split=is_split)
        )
        # A copy of an argument is XLA's to make, and not all of its formats have it.
        operand = by_id[root.operand_ids[i]]
        if operand.opcode == "copy":
            root.operand_ids[i] = operand.operand_ids[0]
    return proto.SerializeToString()


def updated_arguments(module: bytes) -> dict[int, int]:
    """Returns the argument's index for each result that takes the place of one."""
    return _aliased(hlo_pb2.HloModuleProto.FromString(module))


def _aliased(proto: Any) -> dict[int, int]:
    return {
        alias.output_shape_index[0]: alias.parameter_number
        for alias in proto.input_output_alias.entries
    }


def _first_axis(shape: Any, num_parts: int, *, is_split: bool) -> Any:
    rank = len(shape.dimensions)
    tiles = (
        _tiles(rank, num_parts, 0) if is_split else xla_sharding.Sharding.replicate()
    )
    return tiles.proto


def argument_shardings(module: bytes) -> list[list[int]]:
    """Returns, for each argument of an HLO module, into how many parts each axis is.

    That is nothing if all cores have the whole of it.
    """
    proto = hlo_pb2.HloModuleProto.FromString(module)
    (entry,) = (c for c in proto.computations if c.id == proto.entry_computation_id)
    parameters = [i for i in entry.instructions if i.opcode == "parameter"]
    parameters.sort(key=lambda instruction: instruction.parameter_number)
    return [list(i.sharding.tile_assignment_dimensions) for i in parameters]
