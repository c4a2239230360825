"""`SPMDPipeline`, a Keras layer of alike stages that XLA partitions over TPU cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import argument_checks
from tfgpipe.distribution import (
    SPMDPipelineStrategy,
    StageStrategy,
    warn_of_stacked_updates,
)
from tfgpipe.spmd import loop
from tfgpipe.spmd.partitioning import Cores, OneDevice, Partitioning
from tfgpipe.spmd.stacking import StackedStages
from tfgpipe.stage import normalization


@keras.saving.register_keras_serializable(package="tfgpipe")
class SPMDPipeline(keras.layers.Layer):
    """Runs a stack of alike layers as a pipeline that XLA's compilers for TPUs accept.

    These compile one program for all cores, so stages must compute the same, each with
    weights of its own, as the blocks of a transformer do. Each weight of all K stages
    is one variable `[K, ...]`, split over the cores along its first axis, and so are
    its gradient and its optimizer slots. `tfgpipe.spmd.loop` tells how microbatches
    move. The rest of the model is ordinary Keras: all cores have its weights, and
    each computes it for its own part of the batch, if K divides that.

    Outputs, gradients and updates are those of the same layers in a plain model, for
    optimizers that update each element by itself, as SGD, Adam and AdamW. Layers that
    draw random numbers or keep statistics do so microbatch by microbatch. The backward
    pass recomputes each stage (`remat="stage"`, as other pipelines call it).

    Elsewhere than on TPUs the layer computes the same stage after stage on one device,
    to try a model out, evaluate it, or export it.

    Args:
        layers: Keras layers of which each takes what the one before returns, in the
            shape and dtype that all have. K divides their number, and each stage has
            the same sequence of classes and configurations. Layers that are built
            give the values of their weights.
        num_stages: K. Under an `SPMDPipelineStrategy` that of the strategy.
        num_microbatches: M, into how many microbatches each mini-batch is split; it
            divides the batch size. Cores compute in vain for (K - 1) / (M + K - 1) of
            the time.
        partitioned: True to compile the computation for K cores. `"auto"` does so under
            an `SPMDPipelineStrategy`.
        name: The layer's name.
        **kwargs: Further arguments of `keras.layers.Layer`.

    Call arguments:
        inputs: A tensor of floats.
        training: True to run layers as in training.
        mask: Not supported: must be None.

    Input shape:
        `(batch_size, ...)`.

    Output shape:
        The same as the input shape.

    Example:

    >>> layers = [keras.layers.Dense(16, activation="relu") for _ in range(4)]
    >>> pipelined = tfgpipe.SPMDPipeline(layers, num_stages=2, num_microbatches=4)
    >>> pipelined(np.ones((8, 16), "float32")).shape
    TensorShape([8, 16])

    Raises:
        ValueError: If stages are not known to be alike.
        TypeError: If `layers` holds something that is no layer.
    """

    def __init__(
        self,
        layers: Sequence[keras.layers.Layer],
        *,
        num_stages: int,
        num_microbatches: int,
        partitioned: bool | Literal["auto"] = "auto",
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        # The layers inside cast what they are given, each to its own dtype.
        super().__init__(name=name, autocast=False, **kwargs)
        self._stacked = StackedStages(layers, num_stages)
        self.num_stages = num_stages
        self.num_microbatches = argument_checks.check_num_microbatches(num_microbatches)
        self.partitioned = argument_checks.check_choice(
            "partitioned", partitioned, ("auto", True, False)
        )

    @property
    def layers(self) -> tuple[keras.layers.Layer, ...]:
        """The layers as they were given, without what training has changed since."""
        return self._stacked.layers

    def build(self, input_shape: Any) -> None:
        """Builds the layers on the host, and stacks their variables."""
        strategy = _spmd_strategy(self.num_stages)
        if strategy is not None and normalization.any_synchronized(self.layers):
            raise ValueError(
                "On TPUs layers in a pipeline cannot sum over replicas. Received "
                f"`synchronized=True` in layer '{self.name}'. Leave it out."
            )
        # Inside the scope variables get a shape but no value yet, so it can be said
        # where they are to be.
        with keras_internals.variables.build_scope():
            for stack in self._stacked.build(tuple(input_shape)):
                stack.variable = self.add_weight(
                    name=stack.name,
                    shape=(self.num_stages, *stack.rows[0].shape),
                    dtype=stack.rows[0].dtype,
                    initializer=lambda *_, stack=stack, **__: stack.read_rows(),
                    trainable=stack.is_weight,
                    regularizer=getattr(stack.rows[0], "regularizer", None),
                    autocast=False,
                )
                if strategy is not None:
                    keras_internals.variables.initialize_in_scope(
                        stack.variable, strategy.split_scope
                    )

    def unstack(self) -> tuple[keras.layers.Layer, ...]:
        """Returns the layers that were given, with the values that weights have now.

        A plain model of them computes the same, and runs anywhere.

        Raises:
            RuntimeError: If the layer is not built.
        """
        if not self.built:
            raise RuntimeError(
                f"Layer '{self.name}' has no weights before it is built. Call it on "
                "data, or `build(input_shape)`, first."
            )
        for stack in self._stacked.stacks:
            stack.write_rows()
        return self.layers

    def call(
        self, inputs: tf.Tensor, training: bool | None = None, mask: Any = None
    ) -> tf.Tensor:
        """Runs a mini-batch through the pipeline.

        Args:
            inputs: The inputs of the first layer, `[B, ...]`.
            training: True to run layers as in training.
            mask: Must be None.

        Raises:
            ValueError: If there is a mask, M does not divide B, or the inputs are not
                floats.
        """
        if mask is not None:
            raise ValueError(
                "An SPMD pipeline passes one tensor from stage to stage, and no Keras "
                f"mask. Layer '{self.name}' received inputs with a mask. Leave out "
                "`mask_zero=True`, and give padding no weight in the loss."
            )
        if not inputs.dtype.is_floating:
            raise ValueError(
                "An SPMD pipeline passes floats from stage to stage. Layer "
                f"'{self.name}' received {inputs.dtype.name}. Put embeddings before it."
            )
        optimizer = keras_internals.calls.calling_optimizer()
        if training and optimizer is not None:
            warn_of_stacked_updates(optimizer)
        partitioning = self._partitioning()
        inputs = partitioning.split_batch(tf.cast(inputs, self._stacked.dtype))
        weights, constants, state = self._stacked.variables
        # [B, ...] -> [M, B/M, ...]
        outputs, state_after = loop.run(
            self._stacked.stage_function(training=training),
            tf.reshape(inputs, self._microbatch_shape(inputs)),
            loop.StackedValues(*map(_read, (weights, constants, state))),
            partitioning=partitioning,
        )
        if training:
            for variable, value in zip(state, state_after, strict=True):
                variable.assign(value)
        # [M, B/M, ...] -> [B, ...]
        return partitioning.split_batch(tf.reshape(outputs, tf.shape(inputs)))

    def compute_output_spec(
        self, inputs: Any, training: Any = None, mask: Any = None
    ) -> keras.KerasTensor:
        """Infers the outputs' shape and dtype."""
        del training, mask
        return keras.KerasTensor(inputs.shape, self._stacked.dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Infers the outputs' shape."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor, for saving."""
        return {
            **super().get_config(),
            "layers": [keras.saving.serialize_keras_object(x) for x in self.layers],
            "num_stages": self.num_stages,
            "num_microbatches": self.num_microbatches,
            "partitioned": self.partitioned,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SPMDPipeline:
        """Makes the layer anew from `get_config()`."""
        layers = [keras.saving.deserialize_keras_object(x) for x in config["layers"]]
        return cls(**{**config, "layers": layers})

    def _partitioning(self) -> Partitioning:
        partitioned = self.partitioned
        if partitioned == "auto":
            partitioned = _spmd_strategy(self.num_stages) is not None
        kind = Cores if partitioned and self.num_stages > 1 else OneDevice
        return kind(self.num_stages)

    def _microbatch_shape(self, inputs: tf.Tensor) -> list[int | tf.Tensor]:
        M, B = self.num_microbatches, inputs.shape[0]
        if B is not None and B % M:
            raise ValueError(
                "In an SPMD pipeline all microbatches have the same size. Received a "
                f"mini-batch of {B} examples for num_microbatches={M}. Use a batch "
                "size that M divides, and `dataset.batch(size, drop_remainder=True)`."
            )
        size = tf.shape(inputs)[0] // M if B is None else B // M
        return [M, size, *inputs.shape[1:]]


def _read(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(variable.value) for variable in variables]


def _spmd_strategy(num_stages: int) -> SPMDPipelineStrategy | None:
    """Returns the strategy in scope if it partitions computations.

    Raises:
        ValueError: If it is for another number of stages, or for other pipelines.
    """
    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, SPMDPipelineStrategy):
        if strategy.num_stages != num_stages:
            raise ValueError(
                "An SPMD pipeline has as many stages as its strategy. Received "
                f"num_stages={num_stages} under a strategy of {strategy.num_stages}."
            )
        return strategy
    if isinstance(strategy, StageStrategy):
        raise ValueError(
            "An SPMD pipeline runs under `tfgpipe.SPMDPipelineStrategy`, or on one "
            f"device. Received a {type(strategy).__name__}. Use "
            "`tfgpipe.PipelinedModel` there."
        )
    return None
