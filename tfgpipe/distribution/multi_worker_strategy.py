"""A strategy whose processes, each a replica on a host of its own, `TF_CONFIG` lists.

             stage 0       stage 1
process 0     GPU:1         GPU:0      each process builds its own replica alone, and
process 1     GPU:1         GPU:0      takes part in the all-reduce of gradients
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import cluster
from tfgpipe._compat import tf_internals
from tfgpipe.devices import Mesh, names
from tfgpipe.distribution.process_group import ProcessGroup
from tfgpipe.distribution.replicated_strategy import (
    ReplicatedStrategy,
    check_not_nested,
)


class MultiWorkerPipelineStrategy(
    tf.distribute.MultiWorkerMirroredStrategy, ReplicatedStrategy
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
        local = names.local_device_type(num_stages)
        workers = resolver.cluster_spec().as_dict().get("worker", [])
        if len(workers) > 1:
            cluster.rendezvous(workers, resolver.task_id)
            # Not before the rendezvous names the process that hangs, and ends this one.
            tf_internals.set_heartbeat_timeout(
                resolver.cluster_spec(), 2 * cluster.SILENCE_SECONDS
            )
        with _bind_server(resolver):
            super().__init__(cluster_resolver=resolver)
        task = self.cluster_resolver.task_id
        # TensorFlow takes the first device for what is outside of stages.
        stages = tuple(
            (f"/job:worker/replica:0/task:{task}/device:{local}:{i}",)
            for i in (*range(1, num_stages), 0)
        )
        replicas = ProcessGroup(
            size=self.num_replicas_in_sync,
            index=task,
            tasks=range(task, task + 1),
            device=stages[-1][0],
            checks_weights=False,  # TensorFlow gives all the initial ones of the first.
        )
        self.set_replicas(Mesh((stages,)), replicas)

    def metrics_result(
        self,
        make: Callable[[], dict[str, Any]],
        metrics: Sequence[keras.metrics.Metric],
    ) -> dict[str, Any]:
        """Returns the results over all processes, so that Keras may take their mean.

        It does so along the first axis, which scalars do not have (keras #20585; it is
        fixed when `fit` returns metrics of a rank other than zero).
        """
        results = self._replicas.metrics_result(make, metrics)
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
