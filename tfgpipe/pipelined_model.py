"""`PipelinedModel`, a Keras model that computes its loss inside the pipeline."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

import keras
import tensorflow as tf

from tfgpipe import cluster
from tfgpipe._compat import functions, keras_internals
from tfgpipe._util import IdentityMap, argument_checks, first_names, unique
from tfgpipe.capture import functional, tracer
from tfgpipe.devices import Mesh, sharding, small_functions
from tfgpipe.distribution import (
    StageStrategy,
    current_strategy,
    place_optimizer,
    warn_of_sharded_updates,
)
from tfgpipe.partition import (
    ModelOptions,
    PipelineConfig,
    Plan,
    load_arguments,
    takes_options,
)
from tfgpipe.pipelined_layer import PipelinedLayer
from tfgpipe.report import print_summary
from tfgpipe.runtime import (
    CoupledLossPipeline,
    Generator,
    LossPipeline,
    Pipeline,
    Recorder,
    make_loss_pipeline,
)
from tfgpipe.schedules import DataFlow, Schedule
from tfgpipe.stage import Stage, owned_variables


@keras.saving.register_keras_serializable(package="tfgpipe")
@takes_options(ModelOptions)
class PipelinedModel(keras_internals.replicated_model.Replicated):
    """Trains a model as a pipeline that includes the loss.

    Compiled and fitted like any Keras model, with the results of the plain one: loss,
    metrics, gradients and state. The loss of each microbatch is computed on the last
    stage, so full-batch outputs are never materialised, and a backward can start before
    the last forward, as schedules other than GPipe's require.

    `fit`, `evaluate` and `train_on_batch` run the schedule. A call of the model, and
    `predict`, do what `PipelinedLayer` does, also in a `tf.GradientTape`.

    Args:
        layers: A Functional or Sequential model, or a list of layers, as for
            `PipelinedLayer`.
        name: The model's name.
        trainable: True if its weights are trained.
        **options: Fields of `tfgpipe.PipelineConfig`.

    Attributes:
        recorder: Recorder of train steps that are traced while it is set: see
            `tfgpipe.TimelineCallback` and `tfgpipe.ActionCallback`.

    Input shape:
        As the model, or the first layer, takes it.

    Output shape:
        As the model, or the last layer, gives it.

    Example:

    >>> layers = [keras.layers.Dense(16, activation="relu") for _ in range(4)]
    >>> model = tfgpipe.PipelinedModel(
    ...     layers, num_stages=2, num_microbatches=4, schedule="1f1b"
    ... )
    >>> model.compile("sgd", "mse")
    >>> x = np.ones((8, 16), "float32")
    >>> history = model.fit(x, x, verbose=0)

    Raises:
        ValueError: If the layers cannot be partitioned so, devices are missing, or the
            schedule is not for these stages and microbatches.
        TypeError: If `layers` holds something that is no layer.
    """

    train_function: Any
    test_function: Any
    predict_function: Any

    def __init__(
        self,
        layers: Sequence[keras.layers.Layer] | keras.Model,
        *,
        name: str | None = None,
        trainable: bool = True,
        **options: Unpack[ModelOptions],
    ) -> None:
        config, others = PipelineConfig.split(options, ModelOptions)
        # The layers inside cast what they are given, each to its own dtype.
        super().__init__(
            name=name, trainable=trainable, dtype=config.dtype, autocast=False, **others
        )
        _check_methods(layers)
        self.pipelined = PipelinedLayer(
            layers, num_microbatches=config.num_microbatches, _config=config
        )
        # One XLA cluster is one device; stages are compiled one by one instead.
        self.supports_jit = False
        graph = keras_internals.functional.functional_graph(layers)
        if graph is not None:
            # Losses and metrics go by these.
            self.output_names = list(graph.output_names)
            self.built = True
            constants = self.pipelined.pipeline.captured.constants
            names = self._weights_of_others(constants)
            if names:
                raise ValueError(
                    "A model trains the weights of its layers. Received a graph that "
                    f"reads {names}, which no layer of it owns: no training would "
                    "change it. Put it into a layer that the model calls, or set "
                    "`trainable = False` on it, if it is to stay as it is."
                )
        self._loss_pipelines: dict[
            str, tuple[Pipeline, LossPipeline | CoupledLossPipeline]
        ] = {}
        self.recorder: Recorder | None = None
        self._generator: Generator | None = None
        # The data flow and the partition that the schedule is for.
        self._ordered_for: tuple[DataFlow, tuple[int, ...]] | None = None

    @property
    def config(self) -> PipelineConfig:
        """The options, as a value."""
        return self.pipelined.config

    @property
    def schedule(self) -> Schedule:
        """The order in which actions run, for the data flow between the stages.

        That is taken for a line until the model is built.
        """
        layer = self.pipelined
        if layer.built:
            placement, flow = layer.schedule.placement, layer.pipeline.data_flow
            cut = flow, tuple(len(stage.segment.calls) for stage in layer.stages)
            if cut != self._ordered_for:
                order = self.config.schedule.fitted(
                    lambda: layer.plan().costs, self.config.memory_limit
                )
                layer.schedule = order.on(placement, layer.num_microbatches, flow)
                self._ordered_for = cut
        return layer.schedule

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, once the model is built."""
        return self.pipelined.stages

    @property
    def mesh(self) -> Mesh:
        """The devices: `mesh.devices[replica][stage][shard]`."""
        return self.pipelined.mesh

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """Metrics of losses, of `compile`, then of layers, as of the plain model."""
        inside = self.pipelined.metrics
        of_layers = IdentityMap((metric, None) for metric in inside)
        return [*(x for x in super().metrics if x not in of_layers), *inside]

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies the model, building it first if need be."""
        self.pipelined.remember_specs(inputs, {})
        return super().__call__(inputs, *args, **kwargs)

    def __repr__(self) -> str:
        """Tells the name, K, M, the schedule, and each stage's number of calls."""
        return self.pipelined.describe(schedule=self.config.schedule.name, of=self)

    @property
    def input(self) -> Any:
        """The symbolic inputs, nested as the model takes them, once it is built."""
        return self._tensors("input")[0]

    @property
    def output(self) -> Any:
        """The symbolic outputs, nested as the model gives them, once it is built."""
        return self._tensors("output")[1]

    @property
    def inputs(self) -> list[keras.KerasTensor]:
        """The symbolic inputs, in flat order, once the model is built."""
        return keras.tree.flatten(self._tensors("inputs")[0])

    @property
    def outputs(self) -> list[keras.KerasTensor]:
        """The symbolic outputs, in flat order, once the model is built."""
        return keras.tree.flatten(self._tensors("outputs")[1])

    @property
    def input_shape(self) -> Any:
        """The shape of the input, of several a list, once the model is built."""
        return tracer.unpack_single([x.shape for x in self.inputs])

    @property
    def output_shape(self) -> Any:
        """The shape of the output, of several a list, once the model is built."""
        return tracer.unpack_single([x.shape for x in self.outputs])

    def get_layer(
        self, name: str | None = None, index: int | None = None
    ) -> keras.layers.Layer:
        """Returns a layer of the pipeline by its name.

        Args:
            name: The name of a layer, also of one inside a model that is opened.
            index: A position in `layers`, which holds the `PipelinedLayer` alone.

        Raises:
            ValueError: If there is no such layer.
        """
        named = self.pipelined.named_layers
        if index is not None or name in (None, self.pipelined.name):
            return super().get_layer(name, index)
        if name not in named:
            raise ValueError(
                f"A layer is found by the name that it has. Received '{name}', which "
                f"no layer has. The layers are {', '.join(named)}. Use one of their "
                "names."
            )
        return named[name]

    def summary(
        self,
        line_length: int | None = None,
        positions: Sequence[float] | None = None,
        print_fn: Callable[[str], Any] | None = None,
        expand_nested: bool = False,
        show_trainable: bool = False,
        layer_range: Sequence[str] | None = None,
    ) -> None:
        """Prints a table of the layers, with the stage and the device of each.

        Args:
            line_length: Width of the table. Defaults to that of the terminal, at most
                100.
            positions: The end of each column, as a fraction of the width.
            print_fn: Function that is called with the text. Defaults to `print`.
            expand_nested: True to give layers inside layers rows of their own.
            show_trainable: True to show in a column which layers are trainable.
            layer_range: Names, or patterns of names, of the first and last layer.
        """
        print_summary(
            self,
            line_length=line_length,
            positions=positions,
            print_fn=print_fn,
            expand_nested=expand_nested,
            show_trainable=show_trainable,
            layer_range=layer_range,
        )

    def export(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Writes the model for inference, as `keras.Model.export` does.

        Written is the unpipelined model with these weights, so that the artifact runs
        where the devices of the stages are not, in every format that Keras has. A
        subclass with a `call` of its own is written with its stages, which TensorFlow's
        SavedModel alone can hold.

        Args:
            filepath: The file or folder to write.
            *args: Further arguments of `keras.Model.export`.
            **kwargs: Further keyword arguments of `keras.Model.export`.

        Raises:
            RuntimeError: If the model is not built.
        """
        if type(self).call is not PipelinedModel.call:
            super().export(filepath, *args, **kwargs)
        else:
            self.unpipelined().export(filepath, *args, **kwargs)

    def build(self, input_shape: Any) -> None:
        """Partitions the layers into stages, and makes weights on their devices."""
        if not self.pipelined.built:
            self.pipelined.build(input_shape)

    @property
    def metrics_are_reduced(self) -> bool:
        """True if steps return metrics that are reduced over processes."""
        strategy = self.distribute_strategy
        return isinstance(strategy, StageStrategy) and strategy.metrics_are_reduced

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Runs a mini-batch forward, and joins the outputs."""
        return self.pipelined(inputs, training=training, mask=mask)

    def compute_output_spec(self, inputs: Any, **arguments: Any) -> Any:
        """Infers the outputs' shapes and dtypes."""
        return self.pipelined.compute_output_spec(inputs, **arguments)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Infers the outputs' shapes."""
        return self.pipelined.compute_output_shape(input_shape)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Configures the model for training, as `keras.Model.compile` does."""
        super().compile(*args, **kwargs)
        self._loss_pipelines = {}
        if self.optimizer is not None:
            warn_of_sharded_updates(self.optimizer, sharding.num_shards([self]))
            place_optimizer(self.optimizer, on_host=self.config.offload_optimizer)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles the model as it was when it was saved.

        By itself Keras does not where `compile` is overridden.
        """
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)

    def make_train_function(self, force: bool = False) -> None:
        """Makes the function that `fit` calls on each batch."""
        super().make_train_function(force)
        self.train_function = functions.without_grappler(
            self.train_function, cluster.collective_step
        )

    def make_test_function(self, force: bool = False) -> None:
        """Makes the function that `evaluate` calls on each batch."""
        super().make_test_function(force)
        self.test_function = functions.without_grappler(
            self.test_function, cluster.collective_step
        )

    def make_predict_function(self, force: bool = False) -> None:
        """Makes the function that `predict` calls on each batch."""
        super().make_predict_function(force)
        self.predict_function = functions.without_grappler(self.predict_function)

    def train_step(self, data: Any) -> dict[str, Any]:
        """Trains on a mini-batch: runs the schedule, and updates the weights."""
        keras_internals.compiled.build_compiled(self, data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        scale = self.optimizer.scale_loss(tf.ones([]))
        timer = None if self.recorder is None else self.recorder.step()
        with keras_internals.calls.without_autocast():
            result = self._loss_pipeline(y, sample_weight).train(
                self.pipelined.pipeline.flatten_inputs(x, {}),
                y,
                sample_weight,
                schedule=self.schedule,
                loss_grad=scale,
                timer=timer,
            )
        if self.recorder is not None and timer is not None:
            self.recorder.record(timer, current_strategy().replica_index)
        metrics = IdentityMap(
            (v, None) for v in keras_internals.compiled.compiled(self).variables
        )
        updates = [x for x in result.updates if x.variable not in metrics]
        self.pipelined.check_state(updates)
        penalties = self._weight_regularization()
        gradients = IdentityMap(result.gradients.items())
        for penalty in penalties:
            with tf.device(penalty.gradient.device):
                gradient = penalty.gradient * tf.cast(scale, penalty.gradient.dtype)
                before = gradients.get(penalty.variable)
                gradients[penalty.variable] = (
                    gradient if before is None else before + gradient
                )
        others = [result.loss, *(penalty.loss for penalty in penalties)]
        self._track(x, result.compiled_loss, others, training=True)
        names = self._weights_of_others(gradients)
        if names:
            warnings.warn(
                f"The model or its loss reads {names}, which no layer of the model "
                "owns, so it is not trained, as in plain Keras. Put it into a layer "
                "that the model calls, or set `trainable = False` on it, which also "
                "spares its gradient.",
                stacklevel=2,
            )
        if self.recorder is not None:
            for k, stage in enumerate(self.stages):
                found = {weight.path: gradients.get(weight) for weight in stage.weights}
                self.recorder.record_gradients(k, found, scale)
        weights = self.trainable_weights
        if weights:
            self.optimizer.apply_gradients(
                [(gradients.get(variable), variable) for variable in weights]
            )
        else:
            warnings.warn(
                "The model does not have any trainable weights.", stacklevel=2
            )
        return self._results()

    def test_step(self, data: Any) -> dict[str, Any]:
        """Evaluates a mini-batch: runs the forwards of the schedule."""
        keras_internals.compiled.build_compiled(self, data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with keras_internals.calls.without_autocast():
            loss, added = self._loss_pipeline(y, sample_weight).evaluate(
                self.pipelined.pipeline.flatten_inputs(x, {}),
                y,
                sample_weight,
                schedule=self.schedule,
            )
        penalties = [p.loss for p in self._weight_regularization()]
        self._track(x, loss, [added, *penalties], training=False)
        return self._results()

    def generate(
        self,
        prompts: Any,
        *,
        max_length: int | None = None,
        sampler: Any = "greedy",
        stop_token_ids: Sequence[int] | None = None,
        preprocessor: Any = None,
        num_microbatches: int = 1,
    ) -> Any:
        """Returns prompts, and the tokens that a decoder generates after them.

        Keys and values of earlier positions stay on the devices of the stages, and a
        position is computed once.

        Tokens are those of the plain model, which is called on all positions for each
        token; for models of keras-hub, those of its `generate` with this sampler.

        >>> tokens = keras.Input((None,), dtype="int32")
        >>> x = keras.layers.Embedding(11, 8)(tokens)
        >>> for _ in range(2):
        ...     attention = keras.layers.MultiHeadAttention(2, 4)
        ...     x = x + attention(x, x, use_causal_mask=True)
        >>> model = keras.Model(tokens, keras.layers.Dense(11)(x))
        >>> model = tfgpipe.pipeline(model, num_stages=2, num_microbatches=2)
        >>> model.generate([[1, 2, 3], [4, 5]], max_length=6).shape
        (2, 6)

        Args:
            prompts: Lists of tokens; with a preprocessor what it takes, such as texts.
            max_length: L, the number of positions of prompt and answer. Defaults to
                the length that the model, or the preprocessor, has.
            sampler: `"greedy"`; a sampler of keras-hub that chooses one token after
                another, such as `keras_hub.samplers.TopKSampler(k=5, seed=0)`; or a
                function from logits, `[B, V]`, to tokens, `[B]`.
            stop_token_ids: Tokens that end an example; after them is 0. Defaults to the
                end token of the preprocessor, or none.
            preprocessor: One of keras-hub for a causal model.
            num_microbatches: Number of parts of the mini-batch that are in stages at
                the same time. More than one pays where a part is large enough to keep
                a device busy: reading the weights takes as long for fewer examples.

        Returns:
            Tokens, `[B, L]`, or what the preprocessor makes of them.

        Raises:
            ValueError: If the model is no decoder of tokens, has a layer whose keys and
                values cannot be stored, or replicas; or if prompts are no tokens.
        """
        pipeline = self.pipelined.pipeline
        if self._generator is None or self._generator.pipeline is not pipeline:
            self._generator = Generator(pipeline)
        return self._generator.generate(
            prompts,
            max_length=max_length,
            sampler=sampler,
            stop_token_ids=stop_token_ids,
            preprocessor=preprocessor,
            num_microbatches=num_microbatches,
        )

    def unpipelined(self) -> keras.Model:
        """Returns a plain Keras model of the same layers, weights shared.

        Raises:
            RuntimeError: If the model is not built.
        """
        return self.pipelined.unpipelined()

    def plan(self, **arguments: Any) -> Plan:
        """Returns the plan of the partition as it is, as `PipelinedLayer.plan` does."""
        return self.pipelined.plan(**arguments)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this model again."""
        layer, config = self.pipelined.get_config(), self.config.saved_arguments()
        return {
            **{name: layer.get(name, config[name]) for name in config},
            "layers": layer["layers"],
            "num_stages": self.pipelined.num_stages,
            "name": self.name,
            "trainable": self.trainable,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], **_: Any) -> PipelinedModel:
        """Makes a model from what `get_config` returned."""
        return cls(**load_arguments(config))

    def get_build_config(self) -> dict[str, Any] | None:
        """Returns the configuration for `build_from_config` of the model."""
        return self.pipelined.get_build_config()

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Builds the model as it was when it was saved."""
        self.pipelined.build_from_config(config)
        self.built = True

    def _tensors(self, attribute: str) -> tuple[Any, Any]:
        """Returns the symbolic inputs and outputs.

        Raises AttributeError where there are none, so that `hasattr` is false.
        """
        if not self.pipelined.built:
            raise AttributeError(
                f"`{attribute}` is known once a model is built. Received "
                f"'{self.name}', which is not. Call it on data first."
            )
        return self.pipelined.symbolic_io

    def _results(self) -> dict[str, Any]:
        make = self.get_metrics_result
        return current_strategy().metrics_result(make, self.metrics)

    def _loss_pipeline(
        self, targets: Any, weights: Any
    ) -> LossPipeline | CoupledLossPipeline:
        """Returns the pipeline that ends in the loss, for such targets and weights."""
        for name in ("compute_loss", "compute_metrics"):
            if getattr(type(self), name) is not getattr(keras.Model, name):
                raise TypeError(
                    "A PipelinedModel takes loss and metrics of one microbatch at a "
                    f"time, which a `{name}` of your own does not see. Received "
                    f"{type(self).__name__}, which has one. Pass losses and metrics to "
                    "`compile`, or use `tfgpipe.PipelinedLayer` in a model of your own."
                )
        pipeline = self.pipelined.pipeline
        present = keras.tree.map_structure(lambda x: x is not None, (targets, weights))
        known = self._loss_pipelines.get(repr(present))
        if known is None or known[0] is not pipeline:
            compiled = keras_internals.compiled.compiled(self)
            known = pipeline, make_loss_pipeline(pipeline, compiled, targets, weights)
            self._loss_pipelines[repr(present)] = known
        return known[1]

    def _weights_of_others(self, values: Iterable[Any]) -> str:
        """Returns names of trainable variables among values that are not its own."""
        own = IdentityMap((variable, None) for variable in self.variables)
        variables = unique(x for x in values if isinstance(x, keras.Variable))
        return first_names([v.path for v in variables if v.trainable and v not in own])

    def _weight_regularization(self) -> list[_WeightRegularization]:
        """Returns the losses of weights' regularizers, each on its weight's device."""
        penalties = []
        strategy = self.pipelined.pipeline.strategy
        devices, num_replicas = strategy.stage_devices, strategy.num_replicas
        for stage, variables in owned_variables(self.stages):
            shards = stage.shard_indices
            for variable in variables:
                if variable.regularizer is None or not variable.trainable:
                    continue
                device = devices[stage.index][shards.get(variable, 0)]
                penalize = functools.partial(_penalize, variable.regularizer)
                with tf.device(device):
                    value = tf.convert_to_tensor(variable.value)
                loss, gradient = small_functions.call_on(
                    device, penalize, value, num_replicas
                )
                penalties.append(_WeightRegularization(variable, loss, gradient))
        return penalties

    def _track(
        self,
        x: Any,
        main: tf.Tensor,
        others: Sequence[tf.Tensor | None],
        *,
        training: bool,
    ) -> None:
        """Updates the mean of the loss over mini-batches.

        Args:
            x: The inputs.
            main: The compiled loss, this replica's part of the sum over replicas.
            others: Losses of layers and weights.
            training: True if layers ran as in training.
        """
        first = next(i for i in keras.tree.flatten(x) if i is not None)
        compiled = keras_internals.compiled.compiled(self)
        # Added losses that are sums over examples are in the compiled loss.
        sums = self.pipelined.pipeline.summed_losses.get(training)
        if not (compiled.num_losses or sums) and all(loss is None for loss in others):
            raise ValueError(
                "No loss to compute. Provide a `loss` argument in `compile()`."
            )
        with small_functions.scalars_scope(
            self.pipelined.pipeline.strategy.primary_devices[-1]
        ):
            # The mean over replicas weighs by examples.
            compiled_loss = tf.math.divide_no_nan(
                main, tf.cast(current_strategy().batch_fraction(first), main.dtype)
            )
            losses = [compiled_loss, *others]
            total = tf.add_n([tf.cast(x, main.dtype) for x in losses if x is not None])
            rows = tf.shape(first)[0]
        compiled.tracker.update_state(total, sample_weight=rows)


def _penalize(
    regularizer: Callable[[tf.Tensor], tf.Tensor], weight: tf.Tensor, num_replicas: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the penalty of a weight, and its gradient's share of a replica."""
    with tf.GradientTape() as tape:
        tape.watch(weight)
        loss = regularizer(weight)
    return loss, tape.gradient(loss, weight) / num_replicas


@takes_options(ModelOptions)
def pipeline(
    model: keras.Model,
    *,
    sample: Any = None,
    name: str | None = None,
    **options: Unpack[ModelOptions],
) -> PipelinedModel:
    """Returns a pipeline of a model.

    Inputs, outputs and their names are those of the model. Weights are shared, and move
    to the devices of their stages; so do the slots of the optimizer, if the model is
    compiled, and the pipeline is compiled alike. To build a model that fits no single
    device, make it under `tf.device("CPU:0")`.

    Example:

    >>> inputs = keras.Input((8,))
    >>> hidden = keras.layers.Dense(8, activation="relu")(inputs)
    >>> outputs = keras.layers.Dense(1)(hidden + inputs)
    >>> model = keras.Model(inputs, outputs)
    >>> pipelined = tfgpipe.pipeline(model, num_stages=2, num_microbatches=4)
    >>> pipelined(np.ones((8, 8), "float32")).shape
    TensorShape([8, 1])

    Args:
        model: A Functional model, a Sequential one that is built, or, with a sample,
            one with a `call` of its own.
        sample: A mini-batch as such a model takes it, on which its `call` is recorded:
            see `tfgpipe.functional`.
        name: The pipeline's name. Defaults to that of the model.
        **options: Fields of `tfgpipe.PipelineConfig`.

    Raises:
        TypeError: If `model` has a `call` of its own and there is no sample, or it
            cannot be recorded.
        ValueError: If it cannot be partitioned so, or devices are missing.
    """
    argument_checks.check_instance(
        "model",
        model,
        keras.Model,
        hint=" Give a list of layers to `tfgpipe.PipelinedModel`.",
    )
    recorded = _recorded(model, sample, options.get("num_stages"))
    pipelined = PipelinedModel(recorded, name=name or model.name, **options)
    if model.compiled:
        # Where XLA compiles the model, it compiles the stages instead.
        compiled = {
            **keras_internals.compiled.compile_arguments(model),
            "jit_compile": "auto",
        }
        pipelined.compile(**compiled)
        pipelined.pipelined.place_slots(model.optimizer)
    return pipelined


def _recorded(model: keras.Model, sample: Any, num_stages: int | None) -> keras.Model:
    """Returns a model whose calls are known: recorded on a sample, if there is one."""
    if isinstance(model, keras.Sequential) and not model.built:
        raise ValueError(
            "A Sequential model is pipelined once it is built. Received "
            f"'{model.name}', which is not. Begin it with `keras.Input(shape)`, or "
            "give its layers as a list to `tfgpipe.PipelinedModel`."
        )
    if sample is None:
        return model
    _check_methods(model)
    return functional(model, sample, num_calls=num_stages or 1)


def _check_methods(model: Any) -> None:
    """Raises TypeError if a model has methods of training that would not be called."""
    if not isinstance(model, keras.Model):
        return
    for name in _UNUSED_METHODS:
        method = getattr(model, name)
        if getattr(method, "__func__", method) is not getattr(keras.Model, name):
            raise TypeError(
                "A pipeline trains a model by what `compile` is given, and calls no "
                f"method of it. Received `{name}` of {type(model).__name__} "
                f"'{model.name}', which differs from that of `keras.Model`. If it is "
                "not needed, give `keras.Model(model.input, model.output)`; else use "
                "`tfgpipe.PipelinedLayer` in a model of your own with this method."
            )


@dataclasses.dataclass(frozen=True)
class _WeightRegularization:
    """The loss that the regularizer of a weight adds."""

    variable: keras.Variable
    loss: tf.Tensor
    gradient: tf.Tensor


# Methods of a model given that `PipelinedModel` has its own of.
_UNUSED_METHODS = (
    "train_step",
    "test_step",
    "predict_step",
    "compute_loss",
    "compute_metrics",
    "make_train_function",
    "make_test_function",
    "make_predict_function",
)
