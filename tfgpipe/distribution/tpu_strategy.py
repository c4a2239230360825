"""Pipelines on TPUs: a distribution strategy whose stages are cores of a slice.

TensorFlow compiles a step for TPUs as one computation that all replicas run, each on K
logical cores; which physical core that is for each replica, a `DeviceAssignment` says.
In the computation logical core `k` is named `TPU_REPLICATED_CORE:k`, and operations go
where they are named to, as they go to devices elsewhere. (Lingvo pipelines in the same
way.) Only placement has been tested, on a slice that was not there, and today's
compilers of TPUs refuse such computations: see `docs/how-to/tpu.md`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import tf_internals
from tfgpipe.devices import Mesh, tpu_core_name, tpu_topology
from tfgpipe.distribution import replica_context
from tfgpipe.distribution.pipeline_strategy import check_not_nested
from tfgpipe.distribution.stage_strategy import StageStrategy


class TPUPipelineStrategy(tf.distribute.TPUStrategy, StageStrategy):
    """Synchronous training of pipelines over the cores of a TPU slice.

    What `PipelineStrategy` is for GPUs: build and compile a model inside its scope,
    then `fit`. Neighbouring stages are on one chip or on neighbouring chips. The number
    of rows in a batch must be known: `dataset.batch(size, drop_remainder=True)`.

    Today's compilers of TPUs (libtpu 0.0.52) refuse computations whose operations name
    their cores. They take those of `SPMDPipelineStrategy`, for stages that are alike.

    Example (which needs TPUs):

        resolver = tf.distribute.cluster_resolver.TPUClusterResolver("my-tpu")
        strategy = tfgpipe.TPUPipelineStrategy(resolver, num_stages=4, num_replicas=2)
        with strategy.scope():
            model = tfgpipe.PipelinedModel(layers, num_microbatches=16)
            model.compile("adam", "mse")

    Args:
        resolver: Says where the TPUs are: a `TPUClusterResolver`.
        num_stages: K, the number of stages, each on a core of its own.
        num_replicas: D, the number of copies of the pipeline, each fed its own share
            of every batch.
        slice_topology: What `tf.tpu.experimental.initialize_tpu_system(resolver)`
            returned. By default connects and initializes here, which clears the memory
            of the TPUs.
        torus: For x, y and z, whether the last chip is next to the first, as in v4
            slices of whole cubes and in a whole v5e pod. Helps only where chips are
            missing.

    Attributes:
        device_assignment: Which physical core each stage of each replica is on.

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
        check_not_nested("TPUPipelineStrategy")
        self.device_assignment = connect(
            resolver,
            slice_topology,
            num_stages=num_stages,
            num_replicas=num_replicas,
            torus=torus,
        )
        super().__init__(
            resolver, experimental_device_assignment=self.device_assignment
        )
        stages = []
        for k in range(num_stages):
            with self.stage_scope(k):
                stages.append(self.extended.worker_devices)
        self._mesh = Mesh(
            tuple(
                tuple((device,) for device in replica)
                for replica in zip(*stages, strict=True)
            )
        )
        tf_internals.patch_update_scope(self, self.update_scope)

    @property
    def mesh(self) -> Mesh:
        """The devices: `mesh.devices[replica][stage][0]`, one shard each."""
        return self._mesh

    @property
    def stage_devices(self) -> tuple[tuple[str, ...], ...]:
        """For each stage its core, by the name that all replicas have for theirs.

        Raises:
            RuntimeError: If no computation for TPUs is being built.
        """
        if tf.executing_eagerly():
            raise RuntimeError(
                "On TPUs a pipeline runs in a computation that is compiled as a whole. "
                "Received an eager call. Use `fit`, or call the model in "
                "`strategy.run(...)` inside a `tf.function`."
            )
        return tuple((tpu_core_name(k),) for k in range(self._mesh.num_stages))

    @contextlib.contextmanager
    def stage_scope(self, k: int, shard: int = 0) -> Iterator[None]:
        """Variables created inside are mirrored over the cores of stage `k`."""
        del shard
        with self.extended.experimental_logical_device(k):
            yield

    def slot_scope(
        self, weight: tf.Variable
    ) -> contextlib.AbstractContextManager[None]:
        """Variables created inside are on the core that holds the weight."""
        return self.update_scope(weight)

    @property
    def places_updates(self) -> bool:
        """Whether TensorFlow's own strategy places updates."""
        return True

    def apply_gradients(
        self,
        optimizer: keras.optimizers.Optimizer,
        weights: list[keras.Variable],
        gradients: list[Any],
    ) -> None:
        """Applies an optimizer, each weight on the core that holds it."""
        for i, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
            if gradient is not None:
                with self.update_scope(weight.value):
                    gradients[i] = replica_context.sum_over_replicas(gradient)
        type(optimizer).apply(optimizer, gradients, weights)

    def update_scope(
        self, variable: tf.Variable
    ) -> contextlib.AbstractContextManager[Any]:
        """Assignments to a variable, made inside, are on the core that holds it."""
        first, *_ = self.experimental_local_results(variable)
        return self.stage_scope(self._mesh.primary_devices[0].index(first.device))


def connect(
    resolver: tf.distribute.cluster_resolver.TPUClusterResolver,
    slice_topology: tf.tpu.experimental.Topology | None,
    *,
    num_stages: int,
    num_replicas: int,
    torus: tpu_topology.Torus,
) -> tf.tpu.experimental.DeviceAssignment:
    """Returns which core each stage of each replica is on.

    Args:
        resolver: Says where the TPUs are.
        slice_topology: The slice; None to connect to it and initialize it.
        num_stages: K.
        num_replicas: D.
        torus: For x, y and z, whether the last chip is next to the first.

    Raises:
        ValueError: If the slice is too small for K * D cores.
    """
    if slice_topology is None:
        tf.config.experimental_connect_to_cluster(resolver)
        slice_topology = tf.tpu.experimental.initialize_tpu_system(resolver)
    cores = tpu_topology.assign_cores(
        tuple(map(int, slice_topology.mesh_shape)),
        num_stages=num_stages,
        num_replicas=num_replicas,
        missing=[tuple(c) for c in slice_topology.missing_devices.tolist()],
        torus=torus,
    )
    return tf.tpu.experimental.DeviceAssignment(slice_topology, np.array(cores))
