"""A distribution strategy whose replicas are processes, each on a host of its own.

             stage 0       stage 1
process 0     GPU:1         GPU:0      each process builds its own replica alone, and
process 1     GPU:1         GPU:0      takes part in the all-reduce of gradients
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import cluster
from tfgpipe._compat import tf_internals
from tfgpipe.devices import Mesh, local_device_type
from tfgpipe.distribution import replica_context
from tfgpipe.distribution.pipeline_strategy import check_not_nested, device_scope
from tfgpipe.distribution.process_all_reduce import ProcessGroup
from tfgpipe.distribution.replica_update import ReplicaUpdate, local_tensors, merge
from tfgpipe.distribution.stage_strategy import StageStrategy


class MultiWorkerPipelineStrategy(
    tf.distribute.MultiWorkerMirroredStrategy, StageStrategy
):
    """Synchronous training of pipelines, each replica a process of K local devices.

    One process per replica runs the same program; the variable `TF_CONFIG` has the
    index of each. A `PipelinedModel` made inside the scope trains
    under `fit`, on a `tf.data.Dataset` whose batches are those of all replicas.
    Gradients of a stage are summed by collective operations on its devices. When one
    process is gone the others end within seconds, with status 75: start all again.

    Example:

    ```python
    # TF_CONFIG={"cluster": {"worker": ["10.0.0.5:4000", "10.0.0.6:4000"]},
    #            "task": {"type": "worker", "index": 0}}
    strategy = tfgpipe.MultiWorkerPipelineStrategy(num_stages=2)
    with strategy.scope():
        model = tfgpipe.PipelinedModel(layers, num_microbatches=4)
        model.compile("adam", "mse")
    model.fit(dataset)
    ```

    Args:
        num_stages: K, the number of stages, at most that of this process' devices.

    Raises:
        ValueError: If there are fewer than K devices.
        RuntimeError: If made inside the scope of another strategy.
        tfgpipe.cluster.ClusterError: If another process is not there within two
            minutes, has another list, or runs another TensorFlow.
    """

    def __init__(self, *, num_stages: int) -> None:
        check_not_nested("MultiWorkerPipelineStrategy")
        resolver = _OneReplica()
        # Raises if there are too few, before anything waits for other processes.
        local = local_device_type(num_stages)
        workers = resolver.cluster_spec().as_dict().get("worker", [])
        if len(workers) > 1:
            cluster.rendezvous(workers, resolver.task_id)
            # Not before the rendezvous names the process that hangs, and ends this one.
            tf_internals.set_heartbeat_timeout(
                resolver.cluster_spec(), 2 * cluster.SILENCE_SECONDS
            )
        with _bind_server(resolver):
            super().__init__(cluster_resolver=resolver)
        # TensorFlow takes the first device for what is outside of stages.
        order = [*range(1, num_stages), 0]
        self._local = self.cluster_resolver.task_id
        self._processes = ProcessGroup(
            size=self.num_replicas_in_sync,
            index=self._local,
            tasks=range(self._local, self._local + 1),
        )
        self._mesh = Mesh(
            tuple(
                tuple(
                    (f"/job:worker/replica:0/task:{d}/device:{local}:{i}",)
                    for i in order
                )
                for d in range(self.num_replicas_in_sync)
            )
        )

    @property
    def mesh(self) -> Mesh:
        """The devices: `mesh.devices[replica][stage][0]`, one shard each."""
        return self._mesh

    @property
    def stage_devices(self) -> tuple[tuple[str, ...], ...]:
        """For each stage, the device of this process."""
        return self._mesh.devices[self._local]

    def stage_scope(
        self, k: int, shard: int = 0
    ) -> contextlib.AbstractContextManager[None]:
        """Variables created inside are on this process' device of stage `k`."""
        return device_scope((self.stage_devices[k][shard],))

    def slot_scope(
        self, weight: tf.Variable
    ) -> contextlib.AbstractContextManager[None]:
        """Variables created inside are where the weight is."""
        return device_scope(
            tuple(copy.device for copy in replica_context.replica_copies(weight))
        )

    def stage_group_key(
        self, key: int, device: str, num_sums: int, specs: Iterable[tf.TensorSpec]
    ) -> int:
        """Returns a key that is the same in all processes."""
        return self._processes.stage_group_key(device, num_sums, specs)

    def apply_gradients(
        self,
        optimizer: keras.optimizers.Optimizer,
        weights: list[keras.Variable],
        gradients: list[Any],
    ) -> None:
        """Applies an optimizer to sums over all processes."""
        sums = self._processes.all_reduce_gradients(optimizer, weights, gradients)

        def run(values: Sequence[Any]) -> None:
            update = ReplicaUpdate(optimizer, weights)
            update.check_copies(1)
            update.on_replicas(local_tensors(values))

        merge(sums, run)

    @property
    def spans_processes(self) -> bool:
        """Whether other processes hold part of the state of metrics."""
        return True

    def metrics_result(
        self,
        make: Callable[[], dict[str, Any]],
        metrics: Sequence[keras.metrics.Metric],
    ) -> dict[str, Any]:
        """Returns what all processes together see, so that Keras may take their mean.

        It does so along the first axis, which scalars do not have (keras #20585; it is
        fixed when `fit` returns metrics of a rank other than zero).
        """
        device = self.stage_devices[-1][0]
        results = self._processes.metrics_result(make, metrics, device)
        return {name: tf.expand_dims(value, 0) for name, value in results.items()}


def _bind_server(
    resolver: tf.distribute.cluster_resolver.ClusterResolver,
) -> contextlib.AbstractContextManager[None]:
    """TensorFlow's server, started inside, is reached as `TF_CONFIG` lists it."""
    spec = resolver.cluster_spec()
    if not spec.jobs:
        return contextlib.nullcontext()  # TensorFlow starts none.
    address = spec.task_address(resolver.task_type, resolver.task_id)
    (own,) = cluster.parse_addresses(address)
    return cluster.bind_server(own.port, loopback=own.is_loopback)


class _OneReplica(tf.distribute.cluster_resolver.TFConfigClusterResolver):
    """Says that a process has one device for replicas: the others are for stages."""

    def num_accelerators(self, *args: Any, **kwargs: Any) -> dict[str, int]:
        found = super().num_accelerators(*args, **kwargs)
        return {kind: min(1, count) for kind, count in found.items()}
