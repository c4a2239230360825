"""Strategies over replicas: a copy of variables on each, updates by sums of gradients.

Copies on D replicas can be avoided (ZeRO). Then a variable has an *owner*: the replica
that owns the fewest bytes when the variable is first used.

                          replica 0        replica 1
    "none"                w  m  v          w  m  v
    "slots" (ZeRO-1)      w  m  v          w            m, v: slots of the weight w
    "whole_weights"       w  m  v                       copied for the time of a step

With `"weights"` each replica owns a slice of every large weight: see `slices`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals, sliced_variables, tf_internals
from tfgpipe._util import num_bytes
from tfgpipe.devices import Mesh
from tfgpipe.distribution import all_reduce, slices
from tfgpipe.distribution.all_reduce import AllReduce
from tfgpipe.distribution.process_group import ProcessGroup
from tfgpipe.distribution.replica_update import PerReplica, ReplicaUpdate, merge_call
from tfgpipe.distribution.replicas import LocalReplicas
from tfgpipe.distribution.stage_strategy import StageStrategy
from tfgpipe.distribution.zero import ZeroAssignment

ShardReplicas = Literal["none", "slots", "whole_weights", "weights"]
# The two forms of replicas, which answer the same questions.
Replicas = LocalReplicas | ProcessGroup
SHARD_REPLICAS: tuple[ShardReplicas, ...] = (
    *("none", "slots", "whole_weights", "weights"),
)


class ReplicatedStrategy(StageStrategy):
    """A strategy whose replicas are in this process, or processes of their own."""

    def set_replicas(
        self,
        mesh: Mesh,
        replicas: Replicas,
        *,
        all_reduce: AllReduce = "reduce",
        shard_replicas: ShardReplicas = "none",
    ) -> None:
        """Sets up what TensorFlow's own constructors do not know of."""
        self._mesh = mesh
        self._replicas = replicas
        self._all_reduce: AllReduce = all_reduce
        self._shards_slots = shard_replicas != "none"
        self._shards_weights = shard_replicas in ("whole_weights", "weights")
        self._slices = shard_replicas == "weights"
        self._zero = ZeroAssignment()

    @property
    def mesh(self) -> Mesh:
        """The devices: `mesh.devices[replica][stage][shard]`, of this process."""
        return self._mesh

    @property
    def stage_devices(self) -> tuple[tuple[str, ...], ...]:
        """For each stage, the devices of the replica whose computation is built."""
        return self._mesh.devices[self._replicas.local_index]

    def stage_scope(
        self, k: int, shard: int = 0
    ) -> contextlib.AbstractContextManager[Any]:
        """Variables created inside are mirrored over the devices of stage `k`."""
        return device_scope(self._mesh.replica_devices(k, shard))

    def weight_scope(
        self, k: int, shard: int, weight: keras.Variable
    ) -> contextlib.AbstractContextManager[Any]:
        """Like `stage_scope`, for a weight, which may be shared out."""
        devices = self._mesh.replica_devices(k, shard)
        cut = slices.find_cut(weight, len(devices)) if self._slices else None
        if cut is not None:
            return slices.slice_scope(devices, cut)
        if self._shards_weights:
            devices = (devices[self._owner(weight, devices)],)
        return device_scope(devices)

    def slot_scope(self, weight: tf.Variable) -> contextlib.AbstractContextManager[Any]:
        """Variables created inside are on the devices of a weight's slots."""
        copies = self.copies(weight)
        if isinstance(weight, sliced_variables.SlicedVariable):
            devices = [copy.device for copy in copies]
            return slices.slice_scope(devices, slices.Cut(weight.axis, weight.sizes))
        if len(copies) > 1 and self._shards_slots:
            copies = (copies[self.owner_replica(weight)],)
        return device_scope(tuple(copy.device for copy in copies))

    @property
    def replica_index(self) -> int | tf.Tensor:
        """The index of the replica being built, among those of all processes."""
        return self._replicas.index

    def stage_group_key(
        self, key: int, device: str, num_sums: int, specs: Iterable[tf.TensorSpec]
    ) -> int:
        """Returns the group key of a stage's collectives, the same in all processes."""
        return self._replicas.stage_group_key(key, device, num_sums, specs)

    def sum_over_replicas(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the sum of a small tensor over replicas."""
        return tensor if self.num_replicas == 1 else self._replicas.sum(tensor)

    def check_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Raises ValueError for an optimizer that cannot work on what replicas own."""
        super().check_optimizer(optimizer)
        if self._slices:
            slices.check_by_element(optimizer)

    def apply_gradients(
        self,
        optimizer: keras.optimizers.Optimizer,
        weights: Sequence[keras.Variable] | None,
        gradients: list[Any],
    ) -> None:
        """Applies an optimizer on each replica, or on the owners of the weights."""
        if weights is None:
            weights = keras_internals.optimizers.optimizer_weights(optimizer)

        def run(values: Sequence[Any]) -> None:
            update = ReplicaUpdate(optimizer, list(weights))
            local_results = tf.distribute.get_strategy().experimental_local_results
            local: PerReplica = [x if x is None else local_results(x) for x in values]
            if self._shards_slots:
                update.on_owners(local, self.owner_replica)
            else:
                update.check_copies(self._mesh.num_replicas)
                devices = map(update.devices, weights)
                update.on_replicas(self._sums(values, local, devices))

        merge_call(self._replicas.sum_gradients(optimizer, weights, gradients), run)

    def metrics_result(
        self,
        make: Callable[[], dict[str, Any]],
        metrics: Sequence[keras.metrics.Metric],
    ) -> dict[str, Any]:
        """Returns the results over all replicas, as each adds to the metrics."""
        return self._replicas.metrics_result(make, metrics)

    @property
    def metrics_are_reduced(self) -> bool:
        """True if other processes hold part of the state of metrics."""
        return self._replicas.num_processes > 1

    def owner_replica(self, weight: tf.Variable) -> int:
        """Returns the index of the replica that owns a weight."""
        copies = self.copies(weight)
        return self._owner(copies[0], [copy.device for copy in copies])

    def _owner(
        self, variable: keras.Variable | tf.Variable, devices: Sequence[str]
    ) -> int:
        """Returns the owner's among these devices, as long as there are both."""
        if id(variable) not in self._zero:
            weakref.finalize(variable, self._zero.release, id(variable))
        return self._zero.owner(id(variable), devices, num_bytes(variable))

    def _sums(
        self,
        values: Sequence[Any],
        local: PerReplica,
        devices: Iterable[Sequence[str]],
    ) -> PerReplica:
        """Returns each gradient's sum, on all replicas' devices of its weight."""
        if self._all_reduce == "nccl":
            present = [value for value in values if value is not None]
            sums = iter(all_reduce.all_reduce_nccl(self, present))
            return [None if value is None else next(sums) for value in values]
        return [
            each
            and all_reduce.all_reduce(
                each, where, algorithm=self._all_reduce, reducer=i % len(each)
            )
            for i, (where, each) in enumerate(zip(devices, local, strict=True))
        ]


def check_not_nested(name: str) -> None:
    """Raises RuntimeError if a strategy is made inside the scope of another."""
    if tf.distribute.has_strategy():
        raise RuntimeError(
            f"Strategies cannot be nested. Received a {name} made inside the scope of "
            f"a {type(tf.distribute.get_strategy()).__name__}. Leave that scope first: "
            "a strategy for pipelines makes replicas itself."
        )


@contextlib.contextmanager
def device_scope(devices: tuple[str, ...]) -> Iterator[None]:
    """Variables created inside a strategy's scope are on these devices.

    Args:
        devices: One for each replica, or one alone.
    """
    colocation = tf_internals.colocation(devices)

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        return next_creator(**{**kwargs, "colocate_with": colocation})

    with tf.variable_creator_scope(create):
        yield
