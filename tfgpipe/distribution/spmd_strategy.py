"""SPMD pipelines on TPUs: a strategy whose replicas are one program on K cores.

TensorFlow compiles a step for TPUs as one computation that all replicas run, and XLA
partitions it over the K cores of a replica. A variable that is made in `split_scope`
is split along its first axis, `[K, ...]`, with a row on each core, and so are its
slots. Each core has a copy of all others. See `docs/how-to/tpu.md`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfgpipe._compat import sliced_variables
from tfgpipe.devices import tpu_topology
from tfgpipe.distribution.replicated_strategy import check_not_nested


class SPMDPipelineStrategy(tf.distribute.TPUStrategy):
    """Synchronous training of models with an `SPMDPipeline` on a TPU slice.

    Build and compile a model inside its scope, then `fit`. Neighbouring stages are on
    one chip or on neighbouring chips. The number of rows in a batch must be known:
    `dataset.batch(size, drop_remainder=True)`.

    Example (which needs TPUs):

        resolver = tf.distribute.cluster_resolver.TPUClusterResolver("my-tpu")
        strategy = tfgpipe.SPMDPipelineStrategy(resolver, num_stages=4, num_replicas=2)
        with strategy.scope():
            blocks = [Block() for _ in range(24)]
            model = keras.Sequential([
                keras.layers.Embedding(1000, 512),
                tfgpipe.SPMDPipeline(blocks, num_stages=4, num_microbatches=16),
                keras.layers.Dense(1000),
            ])
            model.compile("adamw", "sparse_categorical_crossentropy")

    Args:
        resolver: Says where the TPUs are: a `TPUClusterResolver`.
        num_stages: K, the number of stages, each on a core of its own.
        num_replicas: D, the number of copies of the model, each fed its own share of
            every batch.
        slice_topology: The result of
            `tf.tpu.experimental.initialize_tpu_system(resolver)`. By default connects
            and initializes here, which clears the memory of the TPUs.
        torus: For x, y and z, whether the last chip is next to the first. Helps only
            where chips are missing.

    Attributes:
        num_stages: K.
        device_assignment: The physical core of each stage of each replica.

    Raises:
        ValueError: If the slice is too small for K * D cores.
    """

    def __init__(
        self,
        resolver: tf.distribute.cluster_resolver.TPUClusterResolver,
        *,
        num_stages: int,
        num_replicas: int = 1,
        slice_topology: tf.tpu.experimental.Topology | None = None,
        torus: tpu_topology.Torus = (False, False, False),
    ) -> None:
        check_not_nested("SPMDPipelineStrategy")
        self.num_stages = num_stages
        self.device_assignment = _connect(
            resolver,
            slice_topology,
            num_stages=num_stages,
            num_replicas=num_replicas,
            torus=torus,
        )
        super().__init__(
            resolver,
            experimental_device_assignment=self.device_assignment,
            experimental_spmd_xla_partitioning=True,
        )
        self._splits = False
        sliced_variables.split_variables(
            self, num_parts=num_stages, is_split=lambda: self._splits
        )

    @contextlib.contextmanager
    def split_scope(self) -> Iterator[None]:
        """Variables created inside, `[K, ...]`, are split over the cores."""
        outer, self._splits = self._splits, True
        try:
            yield
        finally:
            self._splits = outer


def _connect(
    resolver: tf.distribute.cluster_resolver.TPUClusterResolver,
    slice_topology: tf.tpu.experimental.Topology | None,
    *,
    num_stages: int,
    num_replicas: int,
    torus: tpu_topology.Torus,
) -> tf.tpu.experimental.DeviceAssignment:
    """Returns the core of each stage of each replica.

    Raises:
        ValueError: If the slice is too small for K * D cores.
    """
    if slice_topology is None:
        tf.config.experimental_connect_to_cluster(resolver)
        slice_topology = tf.tpu.experimental.initialize_tpu_system(resolver)
    cores = tpu_topology.assign_slice_cores(
        slice_topology, num_stages=num_stages, num_replicas=num_replicas, torus=torus
    )
    return tf.tpu.experimental.DeviceAssignment(slice_topology, np.array(cores))
