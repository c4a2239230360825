"""A distribution strategy with a stage scope, which places variables by stage.

`PipelineStrategy` is TensorFlow's MirroredStrategy with one addition. Its own devices
are those of the *last* stage, one a replica, so that a model's loss runs where its
logits are. Variables made in `stage_scope(k)` are mirrored over the devices of stage
`k` instead, and so are their optimizer slots: see `tfgpipe.distribution.optimizer`.

Copies on D replicas can be avoided (ZeRO). Then a variable has an *owner*: the replica
that owns the fewest bytes when the variable is first used.

                          replica 0        replica 1
    "none"                w  m  v          w  m  v
    "slots"  (ZeRO-1)     w  m  v          w            m, v: slots of the weight w
    "weights" (FSDP)      w  m  v                       copied for the time of a step
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfgpipe import cluster as cluster_lib
from tfgpipe._compat import tf_internals
from tfgpipe._util import argument_checks, num_bytes
from tfgpipe.devices import Mesh, check_primary_devices, device_type, make_mesh
from tfgpipe.distribution import all_reduce
from tfgpipe.distribution.all_reduce import ALL_REDUCES, AllReduce
from tfgpipe.distribution.process_all_reduce import ProcessGroup
from tfgpipe.distribution.replica_context import replica_copies, static_replica_index
from tfgpipe.distribution.replica_update import (
    PerReplica,
    ReplicaUpdate,
    local_tensors,
    merge,
)
from tfgpipe.distribution.stage_strategy import StageStrategy
from tfgpipe.distribution.zero import ZeroAssignment

ShardReplicas = Literal["none", "slots", "weights"]
SHARD_REPLICAS: tuple[ShardReplicas, ...] = ("none", "slots", "weights")


class PipelineStrategy(tf.distribute.MirroredStrategy, StageStrategy):
    """Synchronous training of pipelines over a mesh of replicas, stages and shards.

    Build and compile a model that holds a `PipelinedLayer` inside its scope; then
    `fit` as usual. With one replica a model made outside any strategy is placed in the
    same way, so a strategy is needed only for more.

    In a process that is one client of several (`tfgpipe.cluster.connect(...,
    replica=d, num_replicas=D)`) it is the strategy of replica d, on the workers of that
    replica. All replicas run the same program from the same weights, each on its part
    of every batch, in equally many steps. Gradients, losses and metrics of a
    `PipelinedModel`, and batch normalization with `synchronized=True`, are over all
    replicas; for a `PipelinedLayer` in another model gradients are, and metrics are of
    this replica. Moving averages without `synchronized` are those of the replica.

    Example:

    >>> strategy = tfgpipe.PipelineStrategy(num_stages=2)
    >>> with strategy.scope():
    ...     layers = [keras.layers.Dense(8) for _ in range(4)]
    ...     model = keras.Sequential([
    ...         keras.Input((8,)),
    ...         tfgpipe.PipelinedLayer(layers, num_microbatches=4),
    ...     ])
    ...     model.compile("adam", "mse")

    Args:
        num_stages: K, the number of stages.
        num_replicas: D, the number of copies of the pipeline, each fed its own share
            of every batch.
        num_shards: T, the number of devices of each stage, for layers that split their
            weights into as many shards.
        devices: Names of D * K * T devices, those of one replica next to each other,
            and among these the shards of each stage. Defaults to the visible GPUs, or
            without GPUs the logical CPUs; in a cluster to those of its workers.
        all_reduce: How gradients are summed over replicas: `"reduce"` on one device,
            another one for each weight; `"ring"`, in chunks around a ring, so that no
            link carries more than another; `"nccl"`, by NVIDIA's library.
        shard_replicas: What replicas share out instead of each having a copy:
            `"none"`; `"slots"`, what the optimizer keeps (ZeRO-1, Rajbhandari et al.
            2020, section 5.1); `"weights"`, the pipeline's weights as well (FSDP, ZeRO
            section 5.3), which replicas then copy for the time of a step. Each weight
            goes whole to one replica; the result is the same.
        cluster: Workers to run on, such as `"10.0.0.5:4000,10.0.0.6:4000"`: see
            `tfgpipe.cluster`. The devices of the last stage, where the loss runs, are
            on one of them.

    Raises:
        ValueError: If there are fewer than D * K * T devices, more are named, those of
            the last stage, where the loss is, are in different hosts, or `all_reduce`
            is not for them; if one client of several has more than one replica or
            shards weights over them; when training starts, if replicas have other
            weights.
        RuntimeError: If made inside the scope of another strategy.
        tfgpipe.cluster.ClusterError: If a worker is not there, or not fit.
    """

    def __init__(
        self,
        *,
        num_stages: int,
        num_replicas: int = 1,
        num_shards: int = 1,
        devices: Sequence[str] | None = None,
        all_reduce: AllReduce = "reduce",
        shard_replicas: ShardReplicas = "none",
        cluster: str | Sequence[str] | None = None,
    ) -> None:
        check_not_nested("PipelineStrategy")
        if cluster is not None:
            cluster_lib.connect(cluster)
        self._processes = _clients()
        if self._processes is not None and (
            num_replicas > 1 or shard_replicas != "none" or all_reduce != "reduce"
        ):
            raise ValueError(
                "Each client of several is one replica, and gradients are summed by "
                f"collective operations. Received num_replicas={num_replicas}, "
                f"all_reduce='{all_reduce}', shard_replicas='{shard_replicas}' in the "
                f"client of replica {self._processes.index}. Leave them out."
            )
        self._mesh = make_mesh(
            num_stages=num_stages,
            num_replicas=num_replicas,
            num_shards=num_shards,
            devices=devices,
            workers=None if self._processes is None else self._processes.tasks,
        )
        check_primary_devices(self._mesh)
        hint = " TensorFlow's hierarchical copy is wrong for odd numbers of replicas."
        argument_checks.check_choice("all_reduce", all_reduce, ALL_REDUCES, hint=hint)
        argument_checks.check_choice("shard_replicas", shard_replicas, SHARD_REPLICAS)
        kinds = {
            device_type(d) for replica in self._mesh.primary_devices for d in replica
        }
        if all_reduce == "nccl" and kinds != {"GPU"}:
            raise ValueError(
                "`all_reduce='nccl'` sums over GPUs. Received devices of type "
                f'{", ".join(sorted(kinds))}. Use "ring" or "reduce".'
            )
        if shard_replicas != "none" and all_reduce != "reduce":
            raise ValueError(
                "What is sharded over replicas is summed on its owner. Received "
                f"all_reduce='{all_reduce}' with shard_replicas='{shard_replicas}'. "
                "Leave one of them out."
            )
        self.all_reduce = all_reduce
        self.shard_replicas = shard_replicas
        self._zero = ZeroAssignment()
        # Optimizers whose weights are known to be equal in all processes.
        self._checked: weakref.WeakSet[keras.optimizers.Optimizer] = weakref.WeakSet()
        super().__init__(
            devices=list(self._mesh.replica_devices(num_stages - 1)),
            # All-reduces each gradient among its own devices; the default, one
            # collective over the strategy's own devices, knows only the last
            # stage's.
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )

    @property
    def mesh(self) -> Mesh:
        """The devices: `mesh.devices[replica][stage][shard]`, of this process."""
        return self._mesh

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas, in all processes."""
        num_processes = 1 if self._processes is None else self._processes.size
        return num_processes * self._mesh.num_replicas

    @property
    def first_replica(self) -> int:
        """The index among all replicas of the first in this process."""
        return 0 if self._processes is None else self._processes.index

    @property
    def stage_devices(self) -> tuple[tuple[str, ...], ...]:
        """For each stage, the devices of the replica whose computation is built."""
        return self._mesh.devices[static_replica_index()]

    def stage_scope(
        self, k: int, shard: int = 0
    ) -> contextlib.AbstractContextManager[None]:
        """Variables created inside are mirrored over the devices of stage `k`.

        Args:
            k: The stage.
            shard: Which of the stage's devices in each replica.
        """
        return device_scope(self._mesh.replica_devices(k, shard))

    def weight_scope(
        self, k: int, shard: int, weight: keras.Variable
    ) -> contextlib.AbstractContextManager[None]:
        """Like `stage_scope`, for a weight, which may be on its owner alone."""
        devices = self._mesh.replica_devices(k, shard)
        if self.shard_replicas == "weights":
            devices = (devices[self._owner(weight, devices)],)
        return device_scope(devices)

    def slot_scope(
        self, weight: tf.Variable
    ) -> contextlib.AbstractContextManager[None]:
        """Variables created inside are on the devices of a weight's slots."""
        devices = tuple(copy.device for copy in replica_copies(weight))
        if len(devices) > 1 and self.shard_replicas != "none":
            devices = (devices[self.owner_replica(weight)],)
        return device_scope(devices)

    def stage_group_key(
        self, key: int, device: str, num_sums: int, specs: Iterable[tf.TensorSpec]
    ) -> int:
        """Returns the group key of a stage's collectives, the same in all processes."""
        if self._processes is None:
            return key
        return self._processes.stage_group_key(device, num_sums, specs)

    def sum_over_replicas(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the sum of a small tensor over replicas, in the context of one."""
        if self._processes is None:
            return super().sum_over_replicas(tensor)
        return self._processes.sum(tensor, self._mesh.replica_devices(-1)[0])

    def apply_gradients(
        self,
        optimizer: keras.optimizers.Optimizer,
        weights: list[keras.Variable],
        gradients: list[Any],
    ) -> None:
        """Applies an optimizer on each replica, or on the owners of the weights."""

        def run(values: Sequence[Any]) -> None:
            update = ReplicaUpdate(optimizer, weights)
            local = local_tensors(values)
            if self.shard_replicas == "none":
                update.check_copies(self.mesh.num_replicas)
                update.on_replicas(self._sums(update, weights, values, local))
            else:
                update.on_owners(local, self.owner_replica)

        if self._processes is not None:
            if optimizer not in self._checked:
                self._checked.add(optimizer)
                device = self._mesh.replica_devices(-1)[0]
                self._processes.check_weights(weights, device)
            gradients = self._processes.all_reduce_gradients(
                optimizer, weights, gradients
            )
        merge(gradients, run)

    @property
    def spans_processes(self) -> bool:
        """Whether other processes hold part of the state of metrics."""
        return self._processes is not None

    def metrics_result(
        self,
        make: Callable[[], dict[str, Any]],
        metrics: Sequence[keras.metrics.Metric],
    ) -> dict[str, Any]:
        """Returns what all replicas together see, as each adds to the metrics."""
        if self._processes is not None:
            device = self._mesh.replica_devices(-1)[0]
            return self._processes.metrics_result(make, metrics, device)
        context = tf.distribute.get_replica_context()
        return make() if context is None else context.merge_call(lambda _: make())

    def _sums(
        self,
        update: ReplicaUpdate,
        weights: Sequence[keras.Variable],
        values: Sequence[Any],
        local: PerReplica,
    ) -> PerReplica:
        """Returns each gradient's sum, on all replicas' devices."""
        if self.all_reduce == "nccl":
            present = [value for value in values if value is not None]
            sums = iter(all_reduce.all_reduce_nccl(self, present))
            return [None if value is None else next(sums) for value in values]
        return [
            each
            and all_reduce.all_reduce(
                each,
                update.devices(weight),
                algorithm=self.all_reduce,
                reducer=i % len(each),
            )
            for i, (weight, each) in enumerate(zip(weights, local, strict=True))
        ]

    def owner_replica(self, weight: tf.Variable) -> int:
        """Returns the index of the replica that owns a weight."""
        copies = replica_copies(weight)
        return self._owner(copies[0], [copy.device for copy in copies])

    def _owner(
        self, variable: keras.Variable | tf.Variable, devices: Sequence[str]
    ) -> int:
        """Returns which of these devices is the owner's, as long as there are both."""
        if id(variable) not in self._zero:
            weakref.finalize(variable, self._zero.release, id(variable))
        return self._zero.owner(id(variable), devices, num_bytes(variable))


def _clients() -> ProcessGroup | None:
    """Returns the clients that are replicas, if this process is one of several."""
    current = cluster_lib.Cluster.current
    if current is None or current.num_replicas == 1:
        return None
    return ProcessGroup(
        size=current.num_replicas, index=current.replica, tasks=current.workers
    )


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
