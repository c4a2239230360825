"""Private TensorFlow API: variables whose slices are on devices of their own.

`SlicedVariable` is on any devices. On a TPU a `_SplitVariable` is over the cores of a
replica: under `experimental_spmd_xla_partitioning` TensorFlow gives each core a whole
copy of every variable; its compiler takes parts as well (`TPUPartitionedInputV2`), but
Python has no variable of such.
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
from tensorflow.python.eager import record, tape
from tensorflow.python.ops import gen_tpu_partition_ops


class SlicedVariable(tpu_replicated_variable.TPUReplicatedVariable):
    """A variable whose slices along an axis are variables on devices of their own.

    It reads, and is assigned, saved and restored, as the whole. Its base class is of
    copies, one on each core of a TPU, which a program takes for one variable.

    Args:
        slices: The variables, one behind the other.
        axis: The axis.

    Attributes:
        axis: The axis.
    """

    _known_as: str | None = None

    def __init__(self, slices: Sequence[tf.Variable], axis: int) -> None:
        self._vars, self.axis = list(slices), axis
        self._name = slices[0].name
        self._common_name = self._name.split(":")[0]
        self._cached_value = None

    @property
    def _unique_id(self) -> str:
        """The key by which optimizers know it."""
        return self._known_as or self._vars[0]._unique_id

    @_unique_id.setter
    def _unique_id(self, key: str) -> None:
        self._known_as = key

    @property
    def slices(self) -> tuple[tf.Variable, ...]:
        """The variables."""
        return tuple(self._vars)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The length of each slice along the axis."""
        return tuple(int(v.shape[self.axis]) for v in self._vars)

    @property
    def shape(self) -> tf.TensorShape:
        dims = self._vars[0].shape.as_list()
        dims[self.axis] = sum(self.sizes)
        return tf.TensorShape(dims)

    @property
    def handle(self) -> tf.Tensor:
        """The handle by which a gradient tape knows it: that of the first slice."""
        return self._vars[0].handle

    def read_value(self) -> tf.Tensor:
        """Returns the whole, gathered on the device in scope."""
        with record.stop_recording():
            slices = []
            for variable in self._vars:
                with tf.device(variable.device):
                    slices.append(variable.read_value())
            value = tf.concat(slices, self.axis)
        if self.trainable:
            # To a tape it is one variable that is read by one operation.
            tape.variable_accessed(self._vars[0])
            record.record_operation(
                "ReadVariableOp", [value], [self.handle], lambda gradient: [gradient]
            )
        return value

    def value(self) -> tf.Tensor:
        """Returns the whole."""
        return self.read_value()

    def numpy(self) -> np.ndarray:
        return np.concatenate([v.numpy() for v in self._vars], self.axis)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self.numpy(), dtype)

    def _dense_var_to_tensor(
        self, dtype: Any = None, name: str | None = None, as_ref: bool = False
    ) -> tf.Tensor:
        del name, as_ref
        if tpu_util.enclosing_tpu_context() is not None:
            return self._read_variable_op()
        value = self.read_value()
        return value if dtype in (None, value.dtype) else NotImplemented

    def _update(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        whole = tf.convert_to_tensor(value, self.dtype)
        slices = tf.split(whole, self.sizes, self.axis)
        updates = []
        for variable, each in zip(self._vars, slices, strict=True):
            with tf.device(variable.device):
                updates.append(update_fn(variable, each, **kwargs))
        return tf.group(*updates)

    def _serialize_to_tensors(self) -> dict[str, Any]:
        with tf.device("CPU:0"):
            return {"VARIABLE_VALUE": self.read_value()}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return self.assign(restored_tensors["VARIABLE_VALUE"])

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise NotImplementedError(
            "A SavedModel has whole weights. Received a model with the weight "
            f"'{self._common_name}' in slices on {len(self._vars)} devices. Save the "
            "model with `model.save`, load it outside of the strategy, and export that."
        )


class _SplitVariable(SlicedVariable):
    """A variable of which each core of a replica has one row.

    The handle is that of all together.
    """

    axis = 0

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
