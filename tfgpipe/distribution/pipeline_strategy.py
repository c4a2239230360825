"""A distribution strategy with a stage scope, which places variables by stage.

`PipelineStrategy` is TensorFlow's MirroredStrategy with one addition. Its own devices
are those of the *last* stage, one a replica, so that a model's loss runs where its
logits are. Variables made in `stage_scope(k)` are mirrored over the devices of stage
`k` instead, and so are their optimizer slots: see `tfgpipe.distribution.optimizer`.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfgpipe import cluster as cluster_lib
from tfgpipe._compat import tf_internals
from tfgpipe._util import argument_checks
from tfgpipe.devices import Mesh, check_primary_devices, device_type, make_mesh
from tfgpipe.distribution.all_reduce import ALL_REDUCES, AllReduce
from tfgpipe.distribution.process_group import ProcessGroup
from tfgpipe.distribution.replicas import LocalReplicas
from tfgpipe.distribution.replicated_strategy import (
    SHARD_REPLICAS,
    Replicas,
    ReplicatedStrategy,
    ShardReplicas,
    check_not_nested,
)


class PipelineStrategy(tf.distribute.MirroredStrategy, ReplicatedStrategy):
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
            and among these the shards of each stage. Defaults to the visible TPUs,
            else GPUs, else logical CPUs; in a cluster to those of its workers.
        all_reduce: The sum of gradients over replicas: `"reduce"` on one device,
            another one for each weight; `"ring"`, in chunks around a ring, so that no
            link carries more than another; `"nccl"`, by NVIDIA's library.
        shard_replicas: State that is spread over replicas instead of copied to each:
            `"none"`; `"slots"`, those of the optimizer (ZeRO-1, Rajbhandari et al.
            2020, section 5.1); `"weights"`, the pipeline's weights as well (FSDP, Zhao
            et al. 2023; ZeRO-3, section 5.3), which replicas gather for the time of a
            step, or for some passes at a time: see `tfgpipe.schedules.Gather`.
            Weights of 64 KiB or more are in slices, one on each replica, and smaller
            ones whole on one; with `"whole_weights"` all are, as optimizers need that
            do not work by element. The result is the same.
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
        client = cluster_lib.Cluster.current
        if client is not None and client.num_replicas == 1:
            client = None  # One whose workers have all replicas.
        if client is not None and (
            num_replicas > 1 or shard_replicas != "none" or all_reduce != "reduce"
        ):
            raise ValueError(
                "Each client of several is one replica, and gradients are summed by "
                f"collective operations. Received num_replicas={num_replicas}, "
                f"all_reduce='{all_reduce}', shard_replicas='{shard_replicas}' in the "
                f"client of replica {client.replica}. Leave them out."
            )
        mesh = make_mesh(
            num_stages=num_stages,
            num_replicas=num_replicas,
            num_shards=num_shards,
            devices=devices,
            workers=None if client is None else client.workers,
        )
        check_primary_devices(mesh)
        _check_sums(mesh, all_reduce, shard_replicas)
        replicas: Replicas = LocalReplicas()
        if client is not None:
            replicas = ProcessGroup(
                size=client.num_replicas,
                index=client.replica,
                tasks=client.workers,
                device=mesh.primary_devices[0][-1],
            )
        self.set_replicas(
            mesh, replicas, all_reduce=all_reduce, shard_replicas=shard_replicas
        )
        super().__init__(
            devices=list(mesh.replica_devices(num_stages - 1)),
            # All-reduces each gradient among its own devices; the default, one
            # collective over the strategy's own devices, knows only the last
            # stage's.
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
        if cluster_lib.Cluster.current is not None:
            tf_internals.read_datasets_here(self)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas, in all processes."""
        return self._replicas.num_processes * self._mesh.num_replicas


def _check_sums(
    mesh: Mesh, all_reduce: AllReduce, shard_replicas: ShardReplicas
) -> None:
    """Raises ValueError if gradients cannot be summed so."""
    hint = " TensorFlow's hierarchical copy is wrong for odd numbers of replicas."
    argument_checks.check_choice("all_reduce", all_reduce, ALL_REDUCES, hint=hint)
    argument_checks.check_choice("shard_replicas", shard_replicas, SHARD_REPLICAS)
    kinds = {device_type(d) for replica in mesh.primary_devices for d in replica}
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
