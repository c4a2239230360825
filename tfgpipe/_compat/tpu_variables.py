"""Private TensorFlow API: variables that are split over the cores of a TPU replica.

Under `experimental_spmd_xla_partitioning` TensorFlow gives each core a whole copy of
every variable. Its compiler takes parts as well (`TPUPartitionedInputV2`), but Python
has no variable of such.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.compiler.xla.experimental import xla_sharding
from tensorflow.python.distribute import tpu_replicated_variable, tpu_util
from tensorflow.python.ops import gen_tpu_partition_ops


class _SplitVariable(tpu_replicated_variable.TPUReplicatedVariable):
    """A variable of which each core of a replica has one row.

    Its base class is of copies, `[n, ...]` on each core; here they are `[1, ...]`, and
    the shape, the value and the handle are of all together.
    """

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape([len(self._vars), *self._vars[0].shape[1:]])

    @property
    def handle(self) -> tf.Tensor:
        if tf.executing_eagerly() or tpu_util.enclosing_tpu_context() is None:
            raise NotImplementedError("A split variable has a handle on TPUs alone.")
        dims = [len(self._vars), *[1] * (self.shape.rank - 1)]
        with tpu_util.outside_or_skip_tpu_context():
            handle = gen_tpu_partition_ops.tpu_partitioned_input_v2(
                [v.handle for v in self._vars], partition_dims=dims, is_packed=False
            )
        tiles = np.arange(len(self._vars)).reshape(dims)
        return xla_sharding.Sharding.tile(tiles).apply_to_tensor(handle)

    def read_value(self) -> tf.Tensor:
        if tpu_util.enclosing_tpu_context() is not None:
            return self._read_variable_op()
        with tf.device("CPU:0"):
            return tf.concat([v.read_value() for v in self._vars], 0)

    def numpy(self) -> np.ndarray:
        return np.concatenate([v.numpy() for v in self._vars])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self.numpy(), dtype)

    def _update(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        parts = tf.split(tf.convert_to_tensor(value, self.dtype), len(self._vars))
        updates = []
        for variable, part in zip(self._vars, parts, strict=True):
            with tf.device(variable.device):
                updates.append(update_fn(variable, part, **kwargs))
        return tf.group(*updates)

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {"VARIABLE_VALUE": self.read_value()}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return self.assign(restored_tensors["VARIABLE_VALUE"])


def split_variables(
    strategy: tf.distribute.TPUStrategy,
    *,
    num_parts: int,
    is_split: Callable[[], bool],
) -> None:
    """Has a strategy split variables over the cores of a replica.

    Those that are created while `is_split()`, and those of the same shape that are
    colocated with one, as slots of optimizers are.

    Args:
        strategy: One that partitions computations.
        num_parts: The cores of a replica.
        is_split: Returns whether a variable that is created now is to be split.
    """
    extended = strategy.extended
    create = extended._create_variable

    def create_split(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        of = kwargs.get("colocate_with")
        if not (is_split() or is_split_variable(of)):
            return create(next_creator, **kwargs)
        initial = kwargs.pop("initial_value")
        with tf.init_scope(), tf.device("CPU:0"):
            value = tf.convert_to_tensor(
                initial() if callable(initial) else initial, kwargs.get("dtype")
            )
        if of is not None and value.shape != of.shape:
            return create(next_creator, initial_value=value, **kwargs)
        kwargs.pop("shape", None)
        # Called for each core of a replica in turn, replica after replica.
        cores = itertools.cycle(range(num_parts))

        def create_row(**kwargs: Any) -> tf.Variable:
            k = next(cores)
            return next_creator(**{**kwargs, "initial_value": value[k : k + 1]})

        variable = create(create_row, initial_value=value, **kwargs)
        for copy in variable.values:
            copy.__class__ = _SplitVariable
        return variable

    extended._create_variable = create_split


def is_split_variable(variable: Any) -> bool:
    """Returns whether a variable is split over the cores of each replica."""
    if isinstance(variable, keras.Variable):
        variable = variable.value
    copies: Sequence[Any] = getattr(variable, "values", ())
    return any(isinstance(copy, _SplitVariable) for copy in copies)
