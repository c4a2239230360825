"""Where the variables of a stage live: a distribution strategy with a stage scope.

`PipelineStrategy` is TensorFlow's MirroredStrategy with one addition. Its own devices
are those of the *last* stage, one a replica, so that a model's loss runs where its
logits are. Variables made in `stage_scope(k)` are mirrored over the devices of stage
`k` instead, and so are their optimizer slots, and Keras updates them there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import mesh as mesh_lib
from tfgpipe import seams


class PipelineStrategy(tf.distribute.MirroredStrategy):
    """Synchronous training of pipelines over a mesh of replicas and stages.

    Build and compile a model that holds a `PipelinedLayer` inside its scope; then
    `fit` as usual. With one replica a model made outside any strategy is placed in the
    same way, so a strategy is needed only for more.

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
        devices: Names of K * D devices, those of one replica next to each other.
            Defaults to the visible GPUs, or without GPUs the logical CPUs.

    Raises:
        ValueError: If there are fewer than K * D devices.
    """

    def __init__(
        self,
        *,
        num_stages: int,
        num_replicas: int = 1,
        devices: Sequence[str] | None = None,
    ) -> None:
        self._mesh = mesh_lib.make_mesh(
            num_stages=num_stages, num_replicas=num_replicas, devices=devices
        )
        super().__init__(
            devices=list(self._mesh.stage(num_stages - 1)),
            # Reduces each gradient among the devices that it lives on; the default,
            # one collective over the strategy's own devices, knows only the last
            # stage's.
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )

    @property
    def mesh(self) -> mesh_lib.Mesh:
        """The devices, `[replica][stage]`."""
        return self._mesh

    @contextlib.contextmanager
    def stage_scope(self, k: int) -> Iterator[None]:
        """Variables created inside are mirrored over the devices of stage `k`."""
        colocation = seams.Colocation(self._mesh.stage(k))

        def on_stage(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            return next_creator(**{**kwargs, "colocate_with": colocation})

        with tf.variable_creator_scope(on_stage):
            yield


def place_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes an optimizer keep slots, and update weights, where the weights are.

    Under `fit` a `PipelinedLayer` does this to the model's own optimizer. Call it on an
    optimizer of your own, for a custom training loop, before its first step.

    Example:

    >>> optimizer = keras.optimizers.Adam()
    >>> tfgpipe.place_optimizer(optimizer)
    """
    seams.update_in_place(optimizer)


def slots(
    optimizer: keras.optimizers.Optimizer, weights: Iterable[keras.Variable]
) -> list[keras.Variable]:
    """Returns what a built optimizer keeps for some weights."""
    # A slot's name starts with the path of its weight, slashes made underscores.
    prefixes = tuple(v.path.replace("/", "_") + "_" for v in weights if v.trainable)
    return [v for v in optimizer.variables if v.name.startswith(prefixes)]


def current_strategy() -> tf.distribute.Strategy | None:
    """Returns the distribution strategy whose scope we are in, or None."""
    return tf.distribute.get_strategy() if tf.distribute.has_strategy() else None


def current_num_replicas() -> int:
    """Returns how many replicas are being built side by side."""
    context = tf.distribute.get_replica_context()
    return 1 if context is None else context.num_replicas_in_sync


def current_replica() -> int:
    """Returns the number of the replica whose computation is being built."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0  # Across replicas, as when shapes are inferred.
    # A tensor, though of a number that is known here.
    return int(tf.get_static_value(context.replica_id_in_sync_group))
