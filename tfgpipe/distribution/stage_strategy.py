"""The interface of a distribution strategy that places stages.

A pipeline asks its strategy, `current_strategy()`, for everything that depends on
replicas: devices and variables of stages, collectives, results of metrics. Without a
strategy of `tf.distribute` that is a `SingleReplica`.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals, sliced_variables
from tfgpipe.devices import Mesh, host_device


class StageStrategy(abc.ABC):
    """A strategy as a pipeline sees it, beside TensorFlow's own interface.

    Attributes:
        is_distributed: True if a strategy of `tf.distribute` decides the devices.
    """

    is_distributed = True

    @property
    @abc.abstractmethod
    def mesh(self) -> Mesh:
        """The devices: `mesh.devices[replica][stage][shard]`."""

    @property
    @abc.abstractmethod
    def stage_devices(self) -> tuple[tuple[str, ...], ...]:
        """For each stage, the devices of the replica whose computation is built."""

    @property
    def primary_devices(self) -> tuple[str, ...]:
        """For each stage, the primary device of the replica being built."""
        return tuple(primary for primary, *_ in self.stage_devices)

    # Scope.

    @abc.abstractmethod
    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Makes this the strategy in scope, as `tf.distribute.Strategy.scope` does."""

    @property
    def title(self) -> str:
        """The name in messages."""
        return type(self).__name__

    @property
    def is_current(self) -> bool:
        """True if this is the strategy whose scope we are in."""
        return tf.distribute.get_strategy() is self

    def for_pipeline(
        self, num_stages: int | None, devices: Sequence[str] | None, num_shards: int = 1
    ) -> StageStrategy:
        """Returns the strategy of a new pipeline in this scope, with its mesh.

        Args:
            num_stages: K, or None for as many stages as there are devices.
            devices: Names of devices, or None for the default ones.
            num_shards: T, how many shards its layers are split into.

        Raises:
            ValueError: If devices are missing, are named under a strategy, or the
                strategy is not for pipelines, or for another number of shards.
        """
        if devices is not None or num_stages not in (None, self.mesh.num_stages):
            raise ValueError(
                f"Under a {self.title} the strategy decides stages and "
                f"devices. Received num_stages={num_stages}, devices={devices} under a "
                f"strategy of {self.mesh.num_stages} stages. Leave both out, or change "
                "the strategy."
            )
        if num_shards not in (1, self.mesh.num_shards):
            raise ValueError(
                "Under a PipelineStrategy the strategy decides how many devices a "
                f"stage has. Received layers in {num_shards} shards under a strategy "
                f"of {self.mesh.num_shards}. Make them with "
                f"num_shards={self.mesh.num_shards}, or the strategy: "
                f"`tfgpipe.PipelineStrategy(num_shards={num_shards}, ...)`."
            )
        return self

    def check_is_current(self, name: str) -> None:
        """Raises RuntimeError if a layer is used under another strategy."""
        if self.is_current:
            return
        way_out = (
            "Call it inside `with strategy.scope():` as well."
            if self.is_distributed
            else "Create the model inside `with strategy.scope():`, or leave the "
            "strategy out."
        )
        received = "no strategy"
        if tf.distribute.has_strategy():
            received = type(tf.distribute.get_strategy()).__name__
        raise RuntimeError(
            f"Layer '{name}' must be made, built and called under the same "
            f"distribution strategy. Expected {self.title}, under which "
            f"it was made; received {received}. {way_out}"
        )

    def check_shards(self, num_shards: int) -> None:
        """Raises ValueError if the built layers' shard count differs from the mesh's.

        Layers that create other layers in `build` show them only after that.
        """
        if num_shards < self.mesh.num_shards:
            warnings.warn(
                f"No layer is in shards. Received {self.mesh.num_shards} devices for "
                "each stage, of which all but the first do nothing. Use layers such "
                "as `tfgpipe.layers.TPDense`, or leave `num_shards` out.",
                stacklevel=2,
            )
        if num_shards not in (1, self.mesh.num_shards):
            raise ValueError(
                f"Stages here have {self.mesh.num_shards} devices each. Received "
                f"layers that turn out to be in {num_shards} shards when they are "
                "built. Have them make their layers in `__init__`, or make the "
                "pipeline under `tfgpipe.PipelineStrategy(num_shards="
                f"{num_shards}, ...)`."
            )

    # Variables.

    @abc.abstractmethod
    def stage_scope(
        self, k: int, shard: int = 0
    ) -> contextlib.AbstractContextManager[Any]:
        """Variables created inside are mirrored over the devices of stage `k`."""

    def weight_scope(
        self, k: int, shard: int, weight: keras.Variable
    ) -> contextlib.AbstractContextManager[Any]:
        """A weight created inside is on the devices of a shard of stage `k`.

        Unless replicas shard weights, that is `stage_scope`.
        """
        del weight
        return self.stage_scope(k, shard)

    @abc.abstractmethod
    def slot_scope(self, weight: tf.Variable) -> contextlib.AbstractContextManager[Any]:
        """Variables created inside are on the devices of a weight's slots."""

    def place_variables(
        self, k: int, variables: Iterable[keras.Variable], shard: int = 0
    ) -> None:
        """Places variables, initialized or not, on the devices of stage `k`."""
        there = None if self.is_distributed else self.mesh.shard_devices(0, k)[shard]
        for variable in variables:
            scope = functools.partial(self.stage_scope, k, shard)
            if variable.trainable:
                scope = functools.partial(self.weight_scope, k, shard, variable)
            keras_internals.variables.initialize_in_scope(variable, scope, there)

    def place_slots(
        self,
        weight: keras.Variable,
        optimizer: keras.optimizers.Optimizer,
        *,
        on_host: bool,
    ) -> None:
        """Moves an optimizer's slots for a weight to the weight's devices, or host."""
        scope, there = functools.partial(self.slot_scope, weight.value), None
        if not self.is_distributed:
            there = slot_device(weight.value, on_host=on_host)
            scope = functools.partial(tf.device, there)
        for slot in optimizer_slots(optimizer, [weight]):
            keras_internals.variables.initialize_in_scope(slot, scope, there)

    def copies(self, variable: tf.Variable) -> tuple[tf.Variable, ...]:
        """Returns the copies of a variable, one per replica, or the variable itself.

        Of one in slices, these.
        """
        if isinstance(variable, sliced_variables.SlicedVariable):
            return variable.slices
        return tf.distribute.get_strategy().experimental_local_results(variable)

    def is_on_one_replica(self, variable: keras.Variable) -> bool:
        """Returns whether this process has replicas without a copy of a variable."""
        return len(self.copies(variable.value)) == 1 < self.mesh.num_replicas

    # Replicas.

    @property
    def num_replicas(self) -> int:
        """The number of replicas that a mini-batch is divided among.

        One across replicas, as when shapes are inferred.
        """
        context = tf.distribute.get_replica_context()
        return 1 if context is None else context.num_replicas_in_sync

    @property
    def replica_index(self) -> int | tf.Tensor:
        """The index of the replica being built, as a tensor where it is not static."""
        return _replica_index()

    def stage_group_key(
        self, key: int, device: str, num_sums: int, specs: Iterable[tf.TensorSpec]
    ) -> int:
        """Returns the key of the group of a stage's replicas.

        Args:
            key: A key that is unique in this process.
            device: The stage's.
            num_sums: The number of collectives that a microbatch takes part in.
            specs: Shapes and types of the stage's variables.
        """
        del device, num_sums, specs
        return key

    def sum_over_replicas(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the sum of a small tensor over replicas."""
        if self.num_replicas == 1:
            return tensor
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tensor)

    def batch_fraction(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns this replica's fraction of the global batch `[B, ...]`, `[]`."""
        rows = tf.cast(tf.shape(tensor)[0], tf.float64)
        if self.num_replicas == 1:
            return tf.ones_like(rows)
        return tf.math.divide_no_nan(rows, self.sum_over_replicas(rows))

    # Updates and metrics.

    def check_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Raises ValueError for an optimizer that cannot work on sums of gradients."""
        if isinstance(optimizer, keras.optimizers.MultiOptimizer):
            raise ValueError(
                "Under a distribution strategy one optimizer updates all weights. "
                f"Received MultiOptimizer '{optimizer.name}'. Use one of those inside "
                "it, or leave the strategy out."
            )

    def check_offload(self, *, on_host: bool) -> None:
        """Raises ValueError if slots of replicas are to be on the host."""
        if on_host and self.is_distributed:
            raise ValueError(
                "The slots of an optimizer are on the host where there is one replica, "
                "under no strategy. Received offload_optimizer=True, or on_host=True, "
                f"under a {self.title}. Have replicas divide the slots instead: "
                '`tfgpipe.PipelineStrategy(shard_replicas="slots")`.'
            )

    @abc.abstractmethod
    def apply_gradients(
        self,
        optimizer: keras.optimizers.Optimizer,
        weights: Sequence[keras.Variable] | None,
        gradients: list[Any],
    ) -> None:
        """Applies an optimizer to the sums of all replicas' gradients.

        Args:
            optimizer: The optimizer.
            weights: The weights, or None for those that the optimizer was built for.
            gradients: Gradients of the replica being built, None for weights without
                one.
        """

    def metrics_result(
        self,
        make: Callable[[], dict[str, Any]],
        metrics: Sequence[keras.metrics.Metric],
    ) -> dict[str, Any]:
        """Returns results over all replicas, in the form that Keras takes of one."""
        del metrics
        return make()

    @property
    def metrics_are_reduced(self) -> bool:
        """True if steps return results that no later reading of metrics can give.

        So it is where other processes hold part of the state of metrics.
        """
        return False


def slot_device(weight: tf.Variable, *, on_host: bool) -> str:
    """Returns the device of a weight's slots and update, where it has no replicas."""
    return host_device(weight.device) if on_host else weight.device


def optimizer_slots(
    optimizer: keras.optimizers.Optimizer, weights: Iterable[keras.Variable]
) -> list[keras.Variable]:
    """Returns the slots of a built optimizer for some weights."""
    slots = keras_internals.optimizers.optimizer_slots(optimizer)
    return [slot for weight in weights for slot in slots.get(weight, ())]


def static_replica_index() -> int:
    """Returns the index in this process of the replica whose computation is built."""
    index = _replica_index()
    assert isinstance(index, int)
    return index


def _replica_index() -> int | tf.Tensor:
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0  # Across replicas, as when shapes are inferred.
    index = context.replica_id_in_sync_group
    known = tf.get_static_value(index)
    return index if known is None else int(known)
