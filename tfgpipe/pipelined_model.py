"""`PipelinedModel`, a Keras model that computes its loss inside the pipeline."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfgpipe import cluster, schedules
from tfgpipe._compat import functions, keras_internals
from tfgpipe._util import IdentityMap, argument_checks, some_of, unique
from tfgpipe.capture import source_model, tracer
from tfgpipe.devices import Mesh, sharding
from tfgpipe.distribution import (
    StageStrategy,
    place_optimizer,
    replica_context,
    warn_of_sharded_updates,
)
from tfgpipe.partition import Plan, Quantity, check_feasible, resolve
from tfgpipe.pipelined_layer import PipelinedLayer, arguments_from_config
from tfgpipe.remat import RematLike
from tfgpipe.report import print_summary
from tfgpipe.runtime import LossPipeline, Pipeline, StepTimer, TimingRecorder
from tfgpipe.schedules import Action, Schedule, kinds
from tfgpipe.stage import Stage, TransferDtype, normalization, owned_variables


@keras.saving.register_keras_serializable(package="tfgpipe")
class PipelinedModel(keras_internals.Replicated):
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
        num_stages: K. With `schedule="interleaved"`, counting each of several on one
            device.
        num_microbatches: M.
        schedule: In which order devices run forwards and backwards: `"gpipe"`,
            `"1f1b"`, `"interleaved"`, `"zero_bubble"` (see `tfgpipe.schedules`), or a
            `tfgpipe.Schedule`.
        balance: As for `PipelinedLayer`.
        memory_limit: Likewise.
        remat: Likewise. `"except_last"` keeps activations wherever a backward follows
            its forward at once.
        jit_compile: Likewise.
        batch_norm: Likewise.
        transfer_dtype: Likewise.
        devices: Names of the P devices, to which stages are dealt round robin. Defaults
            to the first K that there are, or for `"interleaved"` to as many as divide
            K. Not to be given under a `PipelineStrategy`.
        name: The model's name.
        dtype: As for `PipelinedLayer`.

    Attributes:
        schedule: The order in which actions run.
        recorder: Records the times of actions in train steps that are traced while it
            is set: see `tfgpipe.TimelineCallback`.

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

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuses arguments by their names in other libraries."""
        argument_checks.check_argument_names(cls.__init__, kwargs)
        return super().__new__(cls, *args, **kwargs)

    def __init__(
        self,
        layers: Sequence[keras.layers.Layer] | keras.Model,
        *,
        num_stages: int | None = None,
        num_microbatches: int,
        schedule: schedules.Name | Schedule = "gpipe",
        balance: Quantity | Sequence[int] | Sequence[str] = "params",
        memory_limit: float | None = None,
        remat: RematLike = "stage",
        jit_compile: bool | Literal["auto"] = "auto",
        batch_norm: normalization.BatchNorm = "microbatch",
        transfer_dtype: TransferDtype | None = None,
        devices: Sequence[str] | None = None,
        name: str | None = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        # The layers inside cast what they are given, each to its own dtype.
        super().__init__(name=name, dtype=dtype, autocast=False, **kwargs)
        given = source_model.make_source(layers)
        _check_methods(layers)
        check_feasible(given.calls, num_stages, given.opaque_calls)
        resolved = resolve(
            schedule,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            balance=balance,
            devices=devices,
            num_shards=sharding.num_shards(given.calls),
        )
        self._requested_schedule = schedule
        self._requested_devices = argument_checks.check_device_names(devices)
        self.schedule = resolved.schedule
        self.pipelined = PipelinedLayer(
            layers,
            num_stages=num_stages or self.schedule.num_stages,
            num_microbatches=num_microbatches,
            balance=balance,
            memory_limit=memory_limit,
            remat=remat,
            jit_compile=jit_compile,
            batch_norm=batch_norm,
            transfer_dtype=transfer_dtype,
            devices=resolved.devices,
            dtype=dtype,
            _schedule=self.schedule,
        )
        # One XLA cluster is one device; stages are compiled one by one instead.
        self.supports_jit = False
        graph = keras_internals.functional_graph(layers)
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
        self._loss_pipelines: dict[str, tuple[Pipeline, LossPipeline]] = {}
        self.recorder: TimingRecorder | None = None

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
        return self.pipelined.describe(schedule=self.schedule.name, of=self)

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
            positions: Where each column ends, as a fraction of the width.
            print_fn: What to call with the text. Defaults to printing it.
            expand_nested: Whether layers inside layers have rows of their own.
            show_trainable: Whether a column tells which layers are trainable.
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
            filepath: Where to write it.
            *args: Further arguments of `keras.Model.export`.
            **kwargs: Likewise.

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
    def logs_are_results(self) -> bool:
        """Whether metrics are what steps return, as over replicas of processes."""
        strategy = self.distribute_strategy
        return isinstance(strategy, StageStrategy) and strategy.spans_processes

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
            place_optimizer(self.optimizer)

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
            self.train_function, cluster.needs_others
        )

    def make_test_function(self, force: bool = False) -> None:
        """Makes the function that `evaluate` calls on each batch."""
        super().make_test_function(force)
        self.test_function = functions.without_grappler(
            self.test_function, cluster.needs_others
        )

    def make_predict_function(self, force: bool = False) -> None:
        """Makes the function that `predict` calls on each batch."""
        super().make_predict_function(force)
        self.predict_function = functions.without_grappler(self.predict_function)

    def train_step(self, data: Any) -> dict[str, Any]:
        """Trains on a mini-batch: runs the schedule, and updates the weights."""
        keras_internals.build_compiled(self, data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        scale = self.optimizer.scale_loss(tf.ones([]))
        timer = None if self.recorder is None else StepTimer()
        with keras_internals.without_autocast():
            result = self._loss_pipeline(y, sample_weight).train(
                self.pipelined.pipeline.flatten_inputs(x, {}),
                y,
                sample_weight,
                schedule=self.schedule,
                loss_grad=scale,
                timer=timer,
            )
        if self.recorder is not None and timer is not None:
            self.recorder.record(timer, replica_context.static_replica_index())
        metrics = IdentityMap(
            (v, None) for v in keras_internals.compiled(self).variables
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
        keras_internals.build_compiled(self, data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with keras_internals.without_autocast():
            loss, added = self._loss_pipeline(y, sample_weight).evaluate(
                self.pipelined.pipeline.flatten_inputs(x, {}),
                y,
                sample_weight,
                schedule=self.schedule,
            )
        penalties = [p.loss for p in self._weight_regularization()]
        self._track(x, loss, [added, *penalties], training=False)
        return self._results()

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
        config = self.pipelined.get_config()
        schedule = self._requested_schedule
        return {
            **{key: config[key] for key in _SHARED_ARGUMENTS},
            "name": self.name,
            "trainable": self.trainable,
            "devices": self._requested_devices and list(self._requested_devices),
            "schedule": schedule
            if isinstance(schedule, str)
            else _schedule_config(schedule),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], **_: Any) -> PipelinedModel:
        """Makes a model from what `get_config` returned."""
        schedule = config["schedule"]
        if not isinstance(schedule, str):
            schedule = _schedule_from_config(schedule)
        return cls(**{**arguments_from_config(config), "schedule": schedule})

    def get_build_config(self) -> dict[str, Any] | None:
        """Returns what `build_from_config` needs to build the model again."""
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
        return replica_context.metrics_result(self)

    def _loss_pipeline(self, targets: Any, weights: Any) -> LossPipeline:
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
            compiled = keras_internals.compiled(self)
            known = pipeline, LossPipeline(pipeline, compiled, targets, weights)
            self._loss_pipelines[repr(present)] = known
        return known[1]

    def _weights_of_others(self, values: Iterable[Any]) -> str:
        """Returns names of trainable variables among values that are not its own."""
        own = IdentityMap((variable, None) for variable in self.variables)
        variables = unique(x for x in values if isinstance(x, keras.Variable))
        return some_of([v.path for v in variables if v.trainable and v not in own])

    def _weight_regularization(self) -> list[_WeightRegularization]:
        """Returns the losses of weights' regularizers, each on its weight's device."""
        penalties = []
        devices = self.pipelined.pipeline.placement.shard_devices
        for stage, variables in owned_variables(self.stages):
            shards = stage.shard_indices
            for variable in variables:
                if variable.regularizer is None or not variable.trainable:
                    continue
                with tf.device(devices[stage.index][shards.get(variable, 0)]):
                    value = tf.convert_to_tensor(variable.value)
                    with tf.GradientTape() as tape:
                        tape.watch(value)
                        loss = variable.regularizer(value)
                    gradient = (
                        tape.gradient(loss, value)
                        / replica_context.current_num_replicas()
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
            training: Whether layers ran as in training.
        """
        first = next(i for i in keras.tree.flatten(x) if i is not None)
        compiled = keras_internals.compiled(self)
        # Added losses that are sums over examples are in the compiled loss.
        sums = self.pipelined.pipeline.summed_losses.get(training)
        if not (compiled.num_losses or sums) and all(loss is None for loss in others):
            raise ValueError(
                "No loss to compute. Provide a `loss` argument in `compile()`."
            )
        # The mean over replicas weighs by examples.
        compiled_loss = tf.math.divide_no_nan(
            main, tf.cast(replica_context.batch_fraction(first), main.dtype)
        )
        losses = [compiled_loss, *others]
        total = tf.add_n([tf.cast(x, main.dtype) for x in losses if x is not None])
        compiled.tracker.update_state(total, sample_weight=tf.shape(first)[0])


@argument_checks.checks_argument_names("schedule")
def pipeline(
    model: keras.Model, *, num_microbatches: int, **arguments: Any
) -> PipelinedModel:
    """Returns a pipeline of a Functional or Sequential model.

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
        model: A Functional model, or a Sequential one that is built.
        num_microbatches: M, into how many microbatches each mini-batch is split.
        **arguments: The other arguments of `PipelinedModel`.

    Raises:
        TypeError: If `model` has a `call` of its own.
        ValueError: If it cannot be partitioned so, or devices are missing.
    """
    argument_checks.check_instance(
        "model",
        model,
        keras.Model,
        hint=" Give a list of layers to `tfgpipe.PipelinedModel`.",
    )
    if isinstance(model, keras.Sequential) and not model.built:
        raise ValueError(
            "A Sequential model is pipelined once it is built. Received "
            f"'{model.name}', which is not. Begin it with `keras.Input(shape)`, or "
            "give its layers as a list to `tfgpipe.PipelinedModel`."
        )
    name = arguments.pop("name", model.name)
    pipelined = PipelinedModel(
        model, num_microbatches=num_microbatches, name=name, **arguments
    )
    if model.compiled:
        # Where XLA compiles the model, it compiles the stages instead.
        compiled = {**keras_internals.compile_arguments(model), "jit_compile": "auto"}
        pipelined.compile(**compiled)
        pipelined.pipelined.place_slots(model.optimizer)
    return pipelined


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


def _schedule_config(schedule: Schedule) -> dict[str, Any]:
    """Returns the configuration of a schedule: names of kinds, and those of its own."""
    actions = [[vars(action) for action in order] for order in schedule.orders]
    used = {action["kind"] for order in actions for action in order}
    return {
        **{x.name: getattr(schedule, x.name) for x in dataclasses.fields(schedule)},
        "orders": [[{**x, "kind": x["kind"].name} for x in order] for order in actions],
        "kinds": {
            kind.name: keras.saving.serialize_keras_object(kind)
            for kind in used.difference(kinds.KINDS)
        },
    }


def _schedule_from_config(config: dict[str, Any]) -> Schedule:
    """Returns the schedule of a configuration."""
    own = {
        name: keras.saving.deserialize_keras_object(kind)
        for name, kind in config.get("kinds", {}).items()
    }
    orders = tuple(
        tuple(Action(**{**x, "kind": own.get(x["kind"], x["kind"])}) for x in order)
        for order in config["orders"]
    )
    values = {name: value for name, value in config.items() if name != "kinds"}
    return Schedule(**{**values, "orders": orders})


@dataclasses.dataclass(frozen=True)
class _WeightRegularization:
    """What the regularizer of a weight adds to the loss."""

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

# What the configuration of the model has in common with that of the layer.
_SHARED_ARGUMENTS = (
    "layers",
    "num_stages",
    "num_microbatches",
    "balance",
    "memory_limit",
    "remat",
    "jit_compile",
    "batch_norm",
    "transfer_dtype",
    "dtype",
)
