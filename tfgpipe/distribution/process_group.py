"""Collectives over replicas that are processes of their own, one replica each.

Each process sees its own replica alone, so gradients of a stage are summed by a
collective operation that runs on the stage's device, in each process: see
`stage_collectives` for what such operations need.

Each process builds its own graph, and one may trace more often than another. So the
keys of these collectives depend only on what is the same in all processes whatever was
traced: stages, weights, the order in which optimizers are first used, and of other sums
the shape and the position among those of one function.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._util import IdentityMap
from tfgpipe.devices import ordering_token

# Disjoint from the keys of TensorFlow's own collectives, which count from 1, and from
# those of collectives inside stages.
_FIRST_GROUP = 1_000_000
_FIRST_INSTANCE = 1_000_000
# Group keys differ by the position of a process' task, and of a device in it.
_MAX_DEVICES = 1_000
# Group keys of stages are from here to the last that there is, and so are the instance
# keys of sums other than those of gradients.
_FIRST_HASH = 1 << 30


class InstanceKeys:
    """Instance keys of gradient all-reduces: one for each weight of each optimizer."""

    def __init__(self) -> None:
        self._unused = itertools.count(_FIRST_INSTANCE)
        self._keys: weakref.WeakKeyDictionary[
            keras.optimizers.Optimizer, IdentityMap[keras.Variable, int]
        ] = weakref.WeakKeyDictionary()

    def for_weights(
        self, optimizer: keras.optimizers.Optimizer, weights: Iterable[keras.Variable]
    ) -> list[int]:
        """Returns a key for each weight, the same whenever they are asked for."""
        keys = self._keys.setdefault(optimizer, IdentityMap())
        weights = list(weights)
        for weight in weights:
            if weight not in keys:
                keys[weight] = next(self._unused)
        return [keys[weight] for weight in weights]


class ProcessGroup:
    """Replicas that are processes, whose devices take part in collectives.

    Args:
        size: The number of processes.
        index: The index of this one.
        tasks: The tasks of TensorFlow's cluster that have the devices of this one; in
            each process as many, in the order of the stages.
        device: The device of small sums, one stage's in all processes.
        checks_weights: True to check that training starts from equal weights.

    Attributes:
        num_processes: The number of processes.
        index: The index of this one.
        local_index: Zero: each process has one replica.
    """

    local_index = 0

    def __init__(
        self,
        *,
        size: int,
        index: int,
        tasks: range,
        device: str,
        checks_weights: bool = True,
    ) -> None:
        self.num_processes = size
        self.index = index
        self._tasks = tasks
        self._device = device
        self._checks_weights = checks_weights
        self._instance_keys = InstanceKeys()
        # Optimizers whose weights are known to be equal in all processes.
        self._checked: weakref.WeakSet[keras.optimizers.Optimizer] = weakref.WeakSet()
        self._num_sums: weakref.WeakKeyDictionary[tf.Graph, Iterator[int]] = (
            weakref.WeakKeyDictionary()
        )
        self._function = tf.function(self._collective, autograph=False)

    def check_weights(self, weights: Sequence[keras.Variable]) -> None:
        """Checks, while a function is traced, that processes have equal weights.

        Raises:
            ValueError: If one has other values in another process.
        """
        with tf.init_scope():
            content = [tf.reduce_sum(tf.cast(w.value, tf.float64)) for w in weights]
            with tf.device(self._device):
                own = tf.stack(content)
            others = (self.sum(own) - own).numpy()
        expected = own.numpy() * (self.num_processes - 1)
        equal = np.isclose(others, expected, rtol=1e-9, atol=1e-9, equal_nan=True)
        if not equal.all():
            weight = weights[int(np.argmin(equal))]
            raise ValueError(
                "Replicas that are processes must start from the same weights. "
                f"Received '{weight.path}' with other values than in the others. Call "
                "`keras.utils.set_random_seed(...)` before making the model, with the "
                "same number in all, or load the same weights."
            )

    def sum_gradients(
        self,
        optimizer: keras.optimizers.Optimizer,
        weights: Sequence[keras.Variable],
        gradients: Sequence[Any],
    ) -> list[Any]:
        """Returns gradients summed over all processes, on their weights' devices.

        All processes call this for the same weights, in the same order.
        """
        if self._checks_weights and optimizer not in self._checked:
            self._checked.add(optimizer)
            self.check_weights(weights)
        keys = self._instance_keys.for_weights(optimizer, weights)
        return [
            None if x is None else self._all_reduce(x, weight.value.device, key)
            for x, weight, key in zip(gradients, weights, keys, strict=True)
        ]

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the sum over all processes of a tensor of a known shape.

        All processes call this equally often in a function, in the same order.
        """
        graph = tf.compat.v1.get_default_graph()
        position = next(self._num_sums.setdefault(graph, itertools.count()))
        content = position, tensor.dtype.name, tuple(tensor.shape)
        return self._all_reduce(tensor, self._device, _hash_key(content))

    def metrics_result(
        self,
        make: Callable[[], dict[str, Any]],
        metrics: Sequence[keras.metrics.Metric],
    ) -> dict[str, Any]:
        """Returns results of metrics whose state is that of all processes together.

        Args:
            make: Returns the results.
            metrics: The metrics, in the same order in all processes.

        Raises:
            ValueError: If a metric does not say how its state is combined.
        """
        if self.num_processes == 1:
            return make()
        variables = [(metric, v) for metric in metrics for v in metric.variables]
        scales = [self._scale(metric, variable) for metric, variable in variables]
        # Counts in float32 are exact in it, and so are their sums.
        own = [
            tf.math.multiply_no_nan(
                tf.reshape(tf.cast(variable.value, tf.float64), [-1]), scale
            )
            for (_, variable), scale in zip(variables, scales, strict=True)
        ]
        parts = tf.split(self.sum(tf.concat(own, 0)), [part.shape[0] for part in own])
        state = [
            (variable, tf.reshape(tf.cast(part, variable.dtype), variable.shape))
            for (_, variable), part in zip(variables, parts, strict=True)
        ]
        with keras.StatelessScope(state_mapping=state):
            return make()

    def _scale(self, metric: keras.metrics.Metric, variable: keras.Variable) -> float:
        """Returns the factor of this process' value in the sum over processes."""
        scales = {
            "sum": 1.0,
            "mean": 1 / self.num_processes,
            "only_first_replica": float(self.index == 0),
        }
        if variable.aggregation not in scales:
            raise ValueError(
                "The state of metrics is combined over processes as `aggregation` of "
                f"their variables says. Received metric '{metric.name}', whose "
                f"variable '{variable.path}' has "
                f"aggregation='{variable.aggregation}'. Make it with "
                '`self.add_variable(..., aggregation="sum")`, "mean" or '
                '"only_first_replica", or leave the metric out.'
            )
        return scales[variable.aggregation]

    def stage_group_key(
        self, key: int, device: str, num_sums: int, specs: Iterable[tf.TensorSpec]
    ) -> int:
        """Returns the group key of a stage whose collectives span processes.

        Stages that share it have variables of the same shapes, so that sums of one are
        never taken for those of another of different shape.
        """
        del key  # Of this process alone.
        kind = tf.DeviceSpec.from_string(device).device_type
        content = [kind, self._position(device), num_sums]
        content += [(spec.dtype.name, tuple(spec.shape)) for spec in specs]
        return _hash_key(content)

    def _all_reduce(self, tensor: Any, device: str, key: int) -> tf.Tensor:
        if tf.executing_eagerly():
            # Not an operation by itself: one thread of a TensorFlow server executes
            # those of all clients, and would wait for another client that waits for
            # this thread. Functions, unless placed on a device, do not block it.
            with tf.device(None):
                return self._function(tensor, device, key)
        return self._collective(tensor, device, key)

    def _collective(self, tensor: Any, device: str, key: int) -> tf.Tensor:
        position = self._position(device)
        with tf.device(device):
            return tf.raw_ops.CollectiveReduceV2(
                input=tf.convert_to_tensor(tensor),
                group_size=self.num_processes,
                group_key=_FIRST_GROUP + position,
                instance_key=key,
                ordering_token=[ordering_token(f"sums over processes {position}")],
                merge_op="Add",
                final_op="Id",
            )

    def _position(self, device: str) -> int:
        """Returns the index of a device in its process: one stage's in all of them."""
        place = tf.DeviceSpec.from_string(device)
        return self._tasks.index(place.task) * _MAX_DEVICES + place.device_index


def _hash_key(content: object) -> int:
    return _FIRST_HASH + zlib.crc32(repr(content).encode()) % _FIRST_HASH
