"""The Keras face of a pipeline: a layer that runs a stack of layers across devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfgpipe import checks, partition, program, seams
from tfgpipe import mesh as mesh_lib
from tfgpipe.pipeline import Pipeline
from tfgpipe.stage import REMAT_MODES, Remat, Stage
from tfgpipe.strategy import PipelineStrategy, current_replica, current_strategy


@keras.saving.register_keras_serializable(package="tfgpipe")
class PipelinedLayer(keras.layers.Layer):
    """Runs a stack of layers as a pipeline of stages on several devices.

    Outputs, gradients and state are those of the same layers in a
    `keras.Sequential`. Each mini-batch is cut into microbatches that follow one
    another through the stages, each stage on a device of its own (GPipe, Huang et al.
    2019). Weights, optimizer slots and updates of a stage live on its device.

    Batch statistics (`BatchNormalization`) are taken over each microbatch, and moving
    averages updated once for each, in order.

    Args:
        layers: Keras layers, each from one tensor to one, or a `keras.Sequential`.
        num_stages: K, the number of stages. Defaults to the length of `balance` if
            that is a list, else to that of the `PipelineStrategy` in scope, else to
            the number of `devices`, or of visible GPUs or logical CPUs.
        num_microbatches: M, into how many microbatches each mini-batch is cut. Should
            be several times K: devices idle for (K - 1) / (M + K - 1) of the time. A
            mini-batch of fewer rows than M is cut into single rows.
        balance: `"params"` to cut the stack so that the stage with the most parameters
            has as few as possible, or a list with each stage's number of layers.
        remat: What the backward pass recomputes instead of keeping. `"stage"` keeps
            the inputs of each stage; `"layer"` recomputes layer by layer as well,
            never holding a whole stage's activations; `"except_last"` is `"stage"`
            except for the last microbatch, whose backward follows at once; `"none"`
            keeps all activations.
        jit_compile: Whether XLA compiles each stage's programs. `"auto"` does so on
            GPUs and not on CPUs.
        devices: Names of K devices, such as `["GPU:0", "GPU:1"]`. Not to be given
            under a `PipelineStrategy`, which has devices of its own.
        name: The layer's name.
        dtype: The layer's dtype or dtype policy. Layers inside keep their own.

    Input shape:
        `(batch_size, ...)`: whatever the first layer takes. Any batch size will do,
        unknown ones and such that M does not divide included.

    Output shape:
        `(batch_size, ...)`: whatever the last layer gives.

    Example:

    >>> layers = [keras.layers.Dense(16, activation="relu") for _ in range(4)]
    >>> pipelined = tfgpipe.PipelinedLayer(layers, num_stages=2, num_microbatches=4)
    >>> pipelined(np.ones((8, 16), "float32")).shape
    TensorShape([8, 16])

    Raises:
        ValueError: If the layers cannot be cut as asked, or devices are missing.
        TypeError: If `layers` holds something that is no layer.
    """

    def __init__(
        self,
        layers: Sequence[keras.layers.Layer] | keras.Sequential,
        *,
        num_stages: int | None = None,
        num_microbatches: int,
        balance: Literal["params"] | Sequence[int] = "params",
        remat: Remat = "stage",
        jit_compile: bool | Literal["auto"] = "auto",
        devices: Sequence[str] | None = None,
        name: str | None = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        # The layers inside cast what they are given, each to its own dtype.
        super().__init__(name=name, dtype=dtype, autocast=False, **kwargs)
        if isinstance(layers, keras.Sequential):
            layers = layers.layers
        # A tuple: TensorFlow's checkpoints follow it, but not a Keras layer's lists.
        self.layers = tuple(checks.layer_list(layers))
        for layer in self.layers:
            if isinstance(layer, PipelinedLayer):
                raise ValueError(
                    "A pipeline cannot hold another. Received PipelinedLayer "
                    f"'{layer.name}' among `layers`. Put its layers in its place."
                )
        self.num_microbatches = checks.num_microbatches(num_microbatches)
        self.remat = checks.choice("remat", remat, REMAT_MODES)
        self.jit_compile = checks.choice(
            "jit_compile", jit_compile, ("auto", True, False)
        )
        self.devices = None if devices is None else tuple(devices)
        if isinstance(balance, str):
            checks.choice("balance", balance, ("params",))
        else:
            balance = partition.check_counts(list(balance), len(self.layers))
            if num_stages not in (None, len(balance)):
                raise ValueError(
                    "A `balance` list holds one number a stage. Received num_stages="
                    f"{num_stages} and balance={list(balance)}, which has "
                    f"{len(balance)}. Leave `num_stages` out."
                )
            num_stages = len(balance)
        self.balance = balance
        self._given_num_stages = num_stages
        strategy = current_strategy()
        self._mesh = _mesh_for(strategy, num_stages, self.devices)
        self.num_stages = self._mesh.num_stages
        partition.check_num_stages(self.num_stages, len(self.layers))
        self.supports_masking = True
        # One XLA cluster is one device; stages are compiled one by one instead.
        self.supports_jit = False
        self._pipeline: _Built | None = None
        self._input_dtype: str | None = None

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, once the layer is built."""
        if self._pipeline is None:
            raise RuntimeError(
                f"The stages of layer '{self.name}' are known only when it is built. "
                "Call it on data, or `build(input_shape)`, first."
            )
        return self._pipeline.stages

    @property
    def mesh(self) -> mesh_lib.Mesh:
        """The devices, `[replica][stage]`."""
        return self._mesh

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies the layer, building it first if need be."""
        checks.one_tensor(inputs, self.name)
        # Keras tells `build` the input's shape but not its type, which an embedding
        # of integers needs to know.
        if self._input_dtype is None:
            self._input_dtype = keras.backend.standardize_dtype(inputs.dtype)
        return super().__call__(inputs, *args, **kwargs)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Cuts the stack into stages and makes their weights on their devices."""
        dtype = self._input_dtype or self.layers[0].compute_dtype
        self._input_shape = tuple(input_shape)
        # Inside the scope variables get a shape but no value yet, so the cut can be
        # decided on their sizes before any of them takes memory on a device.
        with keras.StatelessScope():
            steps = list(self._walk(keras.KerasTensor(input_shape, dtype)))
            checks.batch_is_kept(steps)
            counts = self.balance
            if counts == "params":
                costs = [layer.count_params() for layer in self.layers]
                counts = partition.balanced(costs, self.num_stages)
            library: program.Library = {}  # Shared, so that equal stages share.
            stages = tuple(
                Stage(k, self.layers[span], library)
                for k, span in enumerate(partition.spans(counts))
            )
            strategy = current_strategy()
            for stage, variables in checks.owned_variables(stages):
                scope = _variable_scope(strategy, self._mesh, stage.index)
                device = None if strategy else self._mesh.grid[0][stage.index]
                for variable in variables:
                    seams.place(variable, scope, device)
        self._pipeline = _Built(stages, strategy)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Runs a mini-batch `[B, ...]` through the pipeline."""
        built = self._pipeline
        assert built is not None  # Keras builds before it calls.
        self._check_strategy(built.strategy)
        optimizer = seams.calling_optimizer()
        if optimizer is not None:
            seams.update_in_place(optimizer)
        devices = self._mesh.grid[current_replica()]
        pipeline = Pipeline(
            stages=built.stages,
            devices=devices,
            num_microbatches=self.num_microbatches,
            remat=self.remat,
            jit_compile=[self._compiles(device) for device in devices],
        )
        mask = seams.get_mask(inputs)
        # Weights and their gradients stay in the dtype they are stored in; each layer
        # casts for itself.
        with seams.without_autocast():
            result = pipeline.run(
                [inputs] if mask is None else [inputs, mask], training=bool(training)
            )
            for variable, value in result.new_state:
                variable.assign(value)
        if result.loss is not None:
            self.add_loss(result.loss)
        output, *masks = result.outputs
        for mask in masks:
            seams.set_mask(output, mask)
        return output

    def compute_output_spec(
        self, inputs: keras.KerasTensor, training: bool | None = None
    ) -> keras.KerasTensor:
        """Infers the output's shape and dtype."""
        *_, (_, _, output) = self._walk(inputs)
        return output

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        """Infers the output's shape."""
        dtype = self._input_dtype or self.layers[0].compute_dtype
        return self.compute_output_spec(keras.KerasTensor(input_shape, dtype)).shape

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Returns None: the last layer has put the right mask on the output."""

    def unpipelined(self) -> keras.Sequential:
        """Returns a plain `keras.Sequential` of the same layers, weights shared.

        Saves to and loads from the weight files of such a Sequential, whatever the
        number of stages: `layer.unpipelined().load_weights("plain.weights.h5")`.

        Raises:
            RuntimeError: If the layer is not built.
        """
        _ = self.stages
        inputs = keras.Input(batch_shape=self._input_shape, dtype=self._input_dtype)
        return keras.Sequential([inputs, *self.layers])

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again."""
        config = super().get_config()
        config.update(
            layers=[keras.saving.serialize_keras_object(la) for la in self.layers],
            num_stages=self._given_num_stages,
            num_microbatches=self.num_microbatches,
            balance=self.balance if self.balance == "params" else list(self.balance),
            remat=self.remat,
            jit_compile=self.jit_compile,
            devices=None if self.devices is None else list(self.devices),
        )
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PipelinedLayer:
        """Makes a layer from what `get_config` returned."""
        layers = [
            keras.saving.deserialize_keras_object(layer) for layer in config["layers"]
        ]
        return cls(**{**config, "layers": layers})

    def get_build_config(self) -> dict[str, Any] | None:
        """Returns what `build_from_config` needs to build the layer again."""
        config = super().get_build_config()
        return config and {**config, "input_dtype": self._input_dtype}

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Builds the layer as it was when it was saved."""
        self._input_dtype = config.pop("input_dtype", None)
        super().build_from_config(config)

    def _walk(self, spec: keras.KerasTensor) -> Iterator[checks.LayerStep]:
        """Infers each layer's output, building layers that are not yet built."""
        for layer in self.layers:
            output = layer(spec)
            if not isinstance(output, keras.KerasTensor):
                raise TypeError(
                    "Every layer in a pipeline maps one tensor to one tensor. Layer "
                    f"'{layer.name}' returned {type(output).__name__}. Return a "
                    "single tensor, or keep the layer outside the pipeline."
                )
            yield layer, spec, output
            spec = output

    def _compiles(self, device: str) -> bool:
        if self.jit_compile == "auto":
            return mesh_lib.kind(device) == "GPU"
        return bool(self.jit_compile)

    def _check_strategy(self, built_under: tf.distribute.Strategy | None) -> None:
        strategy = current_strategy()
        if strategy is not built_under:
            way_out = (
                "Create the model inside `with strategy.scope():`, or leave the "
                "strategy out."
                if built_under is None
                else "Call it inside `with strategy.scope():` as well."
            )
            raise RuntimeError(
                f"Layer '{self.name}' must be built and called under the same "
                f"distribution strategy. Expected {_describe(built_under)}, under "
                f"which it was built; received {_describe(strategy)}. {way_out}"
            )


class _Built:
    """What is known once the layer is built. A class of its own, so untracked."""

    def __init__(
        self, stages: tuple[Stage, ...], strategy: tf.distribute.Strategy | None
    ) -> None:
        self.stages = stages
        self.strategy = strategy


def _mesh_for(
    strategy: tf.distribute.Strategy | None,
    num_stages: int | None,
    devices: Sequence[str] | None,
) -> mesh_lib.Mesh:
    if isinstance(strategy, PipelineStrategy):
        mesh = strategy.mesh
        if devices is not None or num_stages not in (None, mesh.num_stages):
            raise ValueError(
                "Under a PipelineStrategy the strategy decides stages and devices. "
                f"Received num_stages={num_stages}, devices={devices} under a strategy "
                f"of {mesh.num_stages} stages. Leave both out, or change the strategy."
            )
        return mesh
    if strategy is not None:
        raise ValueError(
            "A PipelinedLayer runs under `tfgpipe.PipelineStrategy` or under no "
            f"strategy at all. Received {_describe(strategy)}. Use "
            "`tfgpipe.PipelineStrategy(num_stages=..., num_replicas=...)`."
        )
    if num_stages is None:
        num_stages = len(devices) if devices else mesh_lib.num_default_devices()
    return mesh_lib.make_mesh(num_stages=num_stages, devices=devices)


def _variable_scope(
    strategy: tf.distribute.Strategy | None, mesh: mesh_lib.Mesh, k: int
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    if isinstance(strategy, PipelineStrategy):
        return lambda: strategy.stage_scope(k)
    return lambda: tf.device(mesh.grid[0][k])


def _describe(strategy: tf.distribute.Strategy | None) -> str:
    return "no strategy" if strategy is None else type(strategy).__name__
