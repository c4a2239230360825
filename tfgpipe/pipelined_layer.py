"""`PipelinedLayer`, a Keras layer that runs other layers across devices."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Unpack

import keras
import tensorflow as tf

from tfgpipe import schedules
from tfgpipe._compat import keras_internals
from tfgpipe._util import IdentityMap, argument_checks
from tfgpipe.capture import (
    dtype_policies,
    input_checks,
    source_model,
    tracer,
)
from tfgpipe.devices import Mesh, names, sharding
from tfgpipe.distribution import (
    optimizer_slots,
    place_optimizer,
)
from tfgpipe.partition import (
    LayerOptions,
    PipelineConfig,
    Plan,
    check_memory,
    load_arguments,
    make_plan,
    plan_by_weights,
    resolve,
    takes_options,
)
from tfgpipe.runtime import (
    Pipeline,
    VariableUpdate,
    check_batch_independence,
    coupled_layers,
    make_stages,
)
from tfgpipe.schedules import Schedule, SchedulePolicy
from tfgpipe.stage import (
    Stage,
    layer_checks,
    normalization,
    owned_variables,
)


@keras.saving.register_keras_serializable(package="tfgpipe")
@takes_options(LayerOptions)
class PipelinedLayer(keras.layers.Layer):
    """Runs a stack of layers as a pipeline of stages on several devices.

    Outputs, gradients and state are those of the same layers in a plain Keras model.
    Each mini-batch is split into microbatches that follow one another through the
    stages, each stage on a device of its own (GPipe, Huang et al. 2019). Weights,
    optimizer slots and updates of a stage live on its device. What one stage makes goes
    straight to those that read it, skip connections and masks included.

    Batch normalization normalises each microbatch with its own statistics. What its
    moving averages move by is the choice of `batch_norm`;
    `docs/explanation/parallelism.md` tells what is normalised with what.

    Args:
        layers: A Functional or Sequential model, with models inside it opened; or
            Keras layers that each take what the one before returns. A layer may occur
            more than once: its weight is one, at the first stage that uses it, and its
            gradient the sum.
        name: The layer's name.
        trainable: True if its weights are trained.
        **options: Fields of `tfgpipe.PipelineConfig`.

    Attributes:
        config: The options, as a value.

    Call arguments:
        inputs: The inputs of the model or of the first layer, in its structure.
        training: True to run layers as in training.
        mask: Keras masks to put on the inputs. Masks on them already count as well.
        **kwargs: Side inputs of a list of layers, `(batch_size, ...)`, such as lengths
            or an attention mask: each goes to every layer whose `call` has an argument
            of its name. A Functional model takes them as inputs.

    Input shape:
        `(batch_size, ...)` for each tensor. Any batch size will do, unknown ones and
        such that M does not divide included.

    Output shape:
        `(batch_size, ...)`: whatever the model, or the last layer, gives.

    Example:

    >>> layers = [keras.layers.Dense(16, activation="relu") for _ in range(4)]
    >>> pipelined = tfgpipe.PipelinedLayer(layers, num_stages=2, num_microbatches=4)
    >>> pipelined(np.ones((8, 16), "float32")).shape
    TensorShape([8, 16])

    Raises:
        ValueError: If the layers cannot be partitioned so, or devices are missing.
        TypeError: If `layers` holds something that is no layer.
    """

    def __init__(
        self,
        layers: Sequence[keras.layers.Layer] | keras.Model,
        *,
        name: str | None = None,
        trainable: bool = True,
        _config: PipelineConfig | None = None,  # That of a PipelinedModel around it.
        **options: Unpack[LayerOptions],
    ) -> None:
        others: dict[str, Any] = {}
        if _config is None:
            _config, others = PipelineConfig.split(options, LayerOptions)
        # The layers inside cast what they are given, each to its own dtype.
        super().__init__(
            name=name,
            trainable=trainable,
            dtype=_config.dtype,
            autocast=False,
            **others,
        )
        self._source = source_model.make_source(layers)
        # A tuple: TensorFlow's checkpoints follow it, but not a Keras layer's lists.
        self.layers = self._source.layers
        for layer in self._source.calls:
            if isinstance(layer, PipelinedLayer):
                raise ValueError(
                    "A pipeline cannot hold another. Received PipelinedLayer "
                    f"'{layer.name}' among `layers`. Put its layers in its place."
                )
        layer_checks.check_not_stateful(self._source.calls)
        resolved = resolve(_config, self._source)
        dtype_policies.apply_policy(_config.dtype, layers)
        layer_checks.check_not_float8(self._source.calls)
        self.config = _config
        self.schedule = resolved.schedule
        self._strategy = resolved.strategy
        self._calls_per_stage = resolved.calls_per_stage
        self.supports_masking = True
        # One XLA cluster is one device; stages are compiled one by one instead.
        self.supports_jit = False
        self._state_checked = False
        self._call_specs: _CallSpecs | None = None
        self._pipeline: Pipeline | None = None
        if self._source.inputs is not None:  # A model, with all its weights.
            self._call_specs = _CallSpecs(
                source_model.to_symbolic(self._source.inputs), {}
            )
            self.build(None)
        if isinstance(layers, keras.Model):
            # What it has traced reads its weights where they were.
            layers.train_function = layers.test_function = None
            layers.predict_function = None

    @property
    def num_stages(self) -> int:
        """K."""
        return self.mesh.num_stages

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.config.num_microbatches

    @property
    def pipeline(self) -> Pipeline:
        """The layers in stages on devices, once the layer is built."""
        if self._pipeline is None:
            raise RuntimeError(
                f"The stages of layer '{self.name}' are known only when it is built. "
                "Call it on data, or `build(input_shape)`, first."
            )
        return self._pipeline

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, once the layer is built."""
        return self.pipeline.stages

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """The metrics of the layers inside, as a model of these layers lists them."""
        return keras_internals.layers.layer_metrics(self._source.listed_layers)

    @property
    def mesh(self) -> Mesh:
        """The devices: `mesh.devices[replica][stage][shard]`."""
        return self._strategy.mesh

    @property
    def named_layers(self) -> dict[str, keras.layers.Layer]:
        """The layers inside by name, those of models inside that are opened too."""
        return self._source.named_layers

    @property
    def symbolic_io(self) -> tuple[Any, Any]:
        """The symbolic inputs and outputs, nested, once the layer is built."""
        return self._source.symbolic_io(self.pipeline.captured)

    def __repr__(self) -> str:
        """Tells the name, K, M, and each stage's number of calls."""
        return self.describe(schedule="gpipe", of=self)

    def describe(self, *, schedule: str, of: keras.layers.Layer) -> str:
        """Returns the `repr` of this layer, or of the model that it is in.

        Args:
            schedule: The name of the schedule.
            of: The layer or model.
        """
        counts = self._calls_per_stage
        if self._pipeline is not None:
            counts = tuple(len(stage.segment.calls) for stage in self.stages)
        partition = f"balance={self.config.balance}"
        if counts is not None:
            partition = f"partition={list(counts) if len(counts) <= 8 else '...'}"
        return (
            f"<{type(of).__name__} name={of.name}, num_stages={self.num_stages}, "
            f"num_microbatches={self.num_microbatches}, schedule={schedule}, "
            f"{partition}, built={of.built}>"
        )

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies the layer, building it first if need be."""
        input_checks.check_dense((inputs, args, kwargs), self.name)
        named = {n: x for n, x in kwargs.items() if n not in ("training", "mask")}
        self.remember_specs(
            inputs, {name: x for name, x in named.items() if x is not None}
        )
        return super().__call__(inputs, *args, **kwargs)

    def remember_specs(self, inputs: Any, side_inputs: Mapping[str, Any]) -> None:
        """Stores shapes and dtypes of the first call's inputs.

        Keras tells `build` the inputs' shapes but not their types, which an embedding
        of integers needs to know, and nothing of the side inputs.
        """
        if self._call_specs is None and source_model.contains_only_tensors(
            (inputs, side_inputs)
        ):
            given = [x for x in keras.tree.flatten(inputs) if x is not None]
            input_checks.check_equal_batches(
                source_model.name_inputs(given, side_inputs)
            )
            symbolic = source_model.to_symbolic((inputs, dict(side_inputs)))
            self._call_specs = _CallSpecs(*symbolic)

    def build(self, input_shape: Any) -> None:
        """Partitions the layers into stages, and makes weights on their devices."""
        if self._call_specs is None:
            self._call_specs = _CallSpecs(self._specs(input_shape), {})
        # Inside the scope variables get a shape but no value yet, so the partition can
        # be decided on their sizes before any of them takes memory on a device.
        with (
            keras_internals.variables.build_scope(),
            dtype_policies.default_policy_scope(self.config.dtype),
        ):
            captured = self._source.capture(
                self._call_specs.inputs, self._call_specs.side_inputs
            )
            probed = check_batch_independence(
                captured, num_microbatches=self.num_microbatches
            )
            called = [call.layer for call in captured.graph.calls]
            self._strategy.check_shards(sharding.num_shards(called))
            if self._strategy.is_distributed:
                normalization.check_synchronized(called)
            if self.num_microbatches > 1:
                normalization.warn_of_batch_norm(called, self.config.batch_norm)
            stages = make_stages(captured.graph, self._partition(captured))
            self._strategy.check_is_current(self.name)
            for stage, variables in owned_variables(stages):
                self._place(stage, variables)
        self._pipeline = Pipeline(
            self._source,
            captured,
            stages,
            self._strategy,
            self.config.stage_options,
            probed=probed,
            added_losses=self.config.added_losses,
        )

    @contextlib.contextmanager
    def traced_for(self, platform: Literal["GPU", "TPU"] | None) -> Iterator[None]:
        """Steps traced inside are as on devices of another type, wherever stages are.

        Args:
            platform: `"GPU"` for the kernels that TensorFlow has for GPUs; `"TPU"` for
                functions that are all compiled by XLA; None for the kernels that
                TensorFlow has for the devices.
        """
        before = self.pipeline
        options = dataclasses.replace(before.options, jit_compile=platform == "TPU")
        self._pipeline = dataclasses.replace(before, options=options)
        try:
            with names.assumed_device_type(platform):
                yield
        finally:
            self._pipeline = before

    def plan(
        self, *, sample: Any = None, batch_size: int = 32, num_slots: int = 2
    ) -> Plan:
        """Returns the plan of the current partition: what each stage holds and costs.

        Args:
            sample: A mini-batch, where the sizes that the layer was built with leave
                something open.
            batch_size: Rows of the mini-batch, where there is no sample.
            num_slots: Optimizer slots a trained weight.

        Raises:
            RuntimeError: If the layer is not built.
        """
        return self._plan(
            self.pipeline.captured,
            [len(stage.segment.calls) for stage in self.stages],
            sample=sample,
            batch_size=batch_size,
            num_slots=num_slots,
        )

    def recut(
        self,
        partition: Sequence[int] | Sequence[str],
        *,
        optimizer: keras.optimizers.Optimizer | None = None,
    ) -> None:
        """Changes the partition, and moves weights and slots to their new devices.

        Values stay, so training goes on as it would have, to rounding: TensorFlow may
        fuse other operations where stages end elsewhere. Functions that were
        traced before hold the old variables: `tfgpipe.recut` renews those of a model;
        those of your own must be made again. If a device lacks the memory, all stays as
        it was.

        Args:
            partition: Each stage's number of calls, such as `plan.calls_per_stage`, or
                the names of the layers that end each stage but the last.
            optimizer: The optimizer whose slots are to move along.

        Raises:
            ValueError: If the layers cannot be partitioned so.
            RuntimeError: If the layer is not built.
        """
        config = self.config.with_partition(partition)
        assert config.partition is not None
        calls_per_stage = config.partition.calls_per_stage(self._source)
        if len(calls_per_stage) != self.num_stages:
            raise ValueError(
                "A new partition has as many stages as the old one. Received "
                f"partition={list(partition)} for {self.num_stages} stages. To change "
                "their number, save the weights and load them into a new pipeline."
            )
        before = IdentityMap(
            (variable, stage.index)
            for stage, variables in owned_variables(self.stages)
            for variable in variables
        )
        self._strategy.check_is_current(self.name)
        pipeline = self.pipeline.repartition(calls_per_stage)
        moved = [
            (stage, [v for v in variables if before[v] != stage.index])
            for stage, variables in owned_variables(pipeline.stages)
        ]
        weights = [v for _, variables in moved for v in variables]
        slots = []
        if optimizer is not None and optimizer.built:
            slots = optimizer_slots(optimizer, weights)
        with keras_internals.variables.unmoved_on_error([*weights, *slots]):
            for stage, variables in moved:
                self._place(stage, variables)
                if slots:
                    self._place(stage, variables, optimizer)
        self._calls_per_stage, self.config = calls_per_stage, config
        self._pipeline = pipeline

    def place_slots(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Moves an optimizer's slots to the devices of their weights."""
        for stage, variables in owned_variables(self.stages):
            self._place(stage, variables, optimizer)

    def call(
        self,
        inputs: Any,
        training: bool | None = None,
        mask: Any = None,
        **kwargs: tf.Tensor,
    ) -> Any:
        """Runs a mini-batch through the pipeline.

        Args:
            inputs: The inputs of the model, `[B, ...]` each.
            training: True to run layers as in training.
            mask: Keras masks of the inputs, in the same structure. Where one is None,
                the mask that the input has counts.
            **kwargs: Side inputs, `[B, ...]` each.
        """
        pipeline = self.pipeline
        self._strategy.check_is_current(self.name)
        if training or keras_internals.calls.is_symbolic_call():
            self._place_calling_optimizer()
        if mask is not None:
            input_checks.check_masks(inputs, mask)
            pairs = zip(*map(keras.tree.flatten, (inputs, mask)), strict=True)
            masked = [_with_mask(x, m) for x, m in pairs]
            inputs = keras.tree.pack_sequence_as(inputs, masked)
        if keras_internals.calls.is_symbolic_call():
            known = pipeline.static_output_spec(inputs, kwargs)
            if known is not None:
                return keras.tree.map_structure(_placeholder, known)
        given = pipeline.flatten_inputs(inputs, kwargs)
        # Weights and their gradients stay in the dtype they are stored in; each layer
        # casts for itself.
        with keras_internals.calls.without_autocast():
            coupled = coupled_layers(pipeline, training=training)
            result = coupled.run(given, schedule=self._gpipe(), training=training)
            for update in result.updates:
                update.variable.assign(update.value)
        if training:
            self.check_state(result.updates)
        if result.loss is not None:
            self.add_loss(result.loss)
        return pipeline.nest_outputs(result.outputs)

    def _place_calling_optimizer(self) -> None:
        """Has the optimizer of the model around this layer work where weights are.

        Keras tells a layer nothing of that model but while it calls the layer. Done
        once for each optimizer: see `place_optimizer`.
        """
        optimizer = keras_internals.calls.calling_optimizer()
        if optimizer is not None:
            place_optimizer(optimizer, on_host=self.config.offload_optimizer)

    def check_state(self, updates: Sequence[VariableUpdate]) -> None:
        """Warns, the first time, of variables that each microbatch changes."""
        if self.num_microbatches > 1 and not self._state_checked:
            self._state_checked = True
            moved = [update.variable for update in updates if not update.once_per_step]
            layer_checks.warn_of_state_per_microbatch(self._source.calls, moved)

    def compute_output_spec(
        self,
        inputs: Any,
        training: bool | None = None,
        mask: Any = None,
        **kwargs: keras.KerasTensor,
    ) -> Any:
        """Infers the outputs' shapes and dtypes."""
        if self._pipeline is not None and mask is None:
            known = self._pipeline.static_output_spec(inputs, kwargs)
            if known is not None:
                return known
        return self._source.output_spec(inputs, kwargs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Infers the outputs' shapes."""
        side_inputs = self._call_specs.side_inputs if self._call_specs else {}
        outputs = self._source.output_spec(self._specs(input_shape), side_inputs)
        return keras.tree.map_structure(lambda x: x.shape, outputs)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Returns None: the last layers have put the right masks on the outputs."""

    def unpipelined(self) -> keras.Model:
        """Returns a plain Keras model of the same layers, weights shared.

        The model that the pipeline was given, or of a list of layers a
        `keras.Sequential`. It saves to and loads from weight files of the plain model,
        whatever the number of stages: `layer.unpipelined().load_weights(...)`.

        Raises:
            RuntimeError: If the layer is not built.
        """
        _ = self.stages
        assert self._call_specs is not None  # Keras builds by calling.
        return self._source.unpipelined(
            self._call_specs.inputs, self._call_specs.side_inputs
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again."""
        options = self.config.saved_arguments()
        del options["schedule"]
        if self._calls_per_stage is not None:
            options["partition"] = list(self._calls_per_stage)
        return {
            **super().get_config(),
            "layers": self._source.get_config(),
            **options,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PipelinedLayer:
        """Makes a layer from what `get_config` returned."""
        return cls(**load_arguments(config))

    def get_build_config(self) -> dict[str, Any] | None:
        """Returns the configuration for `build_from_config` of the layer."""
        if self._call_specs is None:
            return None
        # Anew, without the memory of calls that Keras leaves on symbolic tensors.
        specs = source_model.to_symbolic(vars(self._call_specs))
        return keras.saving.serialize_keras_object(specs)

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Builds the layer as it was when it was saved."""
        self._call_specs = _CallSpecs(**keras.saving.deserialize_keras_object(config))
        self.build(None)
        self.built = True

    def _gpipe(self) -> Schedule:
        """Returns the order in which the layer runs by itself."""
        flow = self._pipeline.data_flow if self._pipeline else None
        return schedules.gpipe.on(self.mesh.placement, self.num_microbatches, flow)

    def _place(
        self,
        stage: Stage,
        variables: Sequence[keras.Variable],
        slots_of: keras.optimizers.Optimizer | None = None,
    ) -> None:
        """Moves variables, or an optimizer's slots for them, to a stage's devices."""
        shards = stage.shard_indices
        for variable in variables:
            shard = shards.get(variable, 0)
            if slots_of is None:
                self._strategy.place_variables(stage.index, [variable], shard)
            else:
                on_host = self.config.offload_optimizer
                self._strategy.place_slots(variable, slots_of, on_host=on_host)

    def _specs(self, shapes: Any) -> Any:
        """Returns symbolic inputs of these shapes, of the types known so far."""
        known = keras.tree.flatten(self._call_specs.inputs) if self._call_specs else []
        dtypes = iter([None if x is None else x.dtype for x in known])
        default = self.layers[0].compute_dtype if self.layers else None
        return keras.tree.map_shape_structure(
            lambda shape: keras.KerasTensor(shape, next(dtypes, default)), shapes
        )

    def _partition(self, captured: tracer.CapturedModel) -> tuple[int, ...]:
        """Returns the number of calls in each stage."""
        given = self._calls_per_stage
        if self.config.memory_limit is None:
            if given is not None:
                return given
            balance = self.config.balance
            if not balance.needs_trace and self.config.device_speeds is None:
                settings = self.config.plan_settings(self.schedule, 0)
                return plan_by_weights(captured, balance, settings)
        plan = self._plan(captured, given, order=self.config.schedule)
        return check_memory(plan).calls_per_stage

    def _plan(
        self,
        captured: tracer.CapturedModel,
        calls_per_stage: Sequence[int] | None,
        *,
        sample: Any = None,
        batch_size: int = 32,
        num_slots: int = 2,
        order: SchedulePolicy | Schedule | None = None,
    ) -> Plan:
        if sample is not None:
            sample = [*self._source.flatten_inputs(captured, sample, {}).values()]
        return make_plan(
            captured,
            calls_per_stage or self.config.balance,
            self.config.plan_settings(self.schedule, num_slots, order=order),
            sample=sample,
            batch_size=batch_size,
            devices=self.mesh.primary_devices[0][:1],
        )


@dataclasses.dataclass(frozen=True)
class _CallSpecs:
    """The symbolic inputs that the layer is called on."""

    inputs: Any
    side_inputs: dict[str, keras.KerasTensor]


def _with_mask(tensor: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Returns a tensor with a mask on it; the one given stays as it is."""
    if mask is None or keras_internals.calls.get_mask(tensor) is mask:
        return tensor
    copy = tf.identity(tensor)
    keras_internals.calls.set_mask(copy, mask)
    return copy


def _placeholder(spec: keras.KerasTensor) -> tf.Tensor:
    """Returns a placeholder of a shape and dtype that cannot be computed."""
    return tf.raw_ops.Placeholder(dtype=spec.dtype, shape=spec.shape)


def recut(model: keras.Model, partition: Sequence[int] | Sequence[str]) -> None:
    """Changes the layers of each stage of a model that is trained already.

    Training goes on as it would have, to rounding: TensorFlow may fuse or rewrite other
    operations where stages end elsewhere, which can differ in the last bit. With
    `tf.config.optimizer.set_experimental_options({"remapping": False,
    "arithmetic_optimization": False})` it does neither, and the bits are equal.

    Weights and optimizer slots move to the devices of their new stages. The functions
    that `fit`, `evaluate` and `predict` have traced are made again, so that a callback
    may call it during `fit`.

    Example:

    >>> layers = [keras.layers.Dense(8) for _ in range(4)]
    >>> layer = tfgpipe.PipelinedLayer(layers, num_stages=2, num_microbatches=2)
    >>> model = keras.Sequential([keras.Input((8,)), layer])
    >>> plan = layer.plan().rebalance(measured=[0.3, 0.1])  # In seconds.
    >>> tfgpipe.recut(model, plan.calls_per_stage)
    >>> [len(stage.layers) for stage in layer.stages]
    [1, 3]

    Args:
        model: A model that holds one `PipelinedLayer`.
        partition: Each stage's number of calls, or the names of the layers that end
            each stage but the last.

    Raises:
        ValueError: If the layers cannot be partitioned so, or the model does not hold
            exactly one pipeline.
    """
    pipelines = find_pipelines(model)
    if len(pipelines) != 1:
        raise ValueError(
            "`recut` partitions the pipeline of a model anew. Received a model "
            f"'{model.name}' that holds {len(pipelines)} of them. Use "
            "`PipelinedLayer.recut` on each."
        )
    pipelines[0].recut(partition, optimizer=getattr(model, "optimizer", None))
    if isinstance(model, keras.Model):
        for made, make in (
            (model.train_function, model.make_train_function),
            (model.test_function, model.make_test_function),
            (model.predict_function, model.make_predict_function),
        ):
            if made is not None:
                make(force=True)


def find_pipelines(layer: keras.layers.Layer) -> list[PipelinedLayer]:
    """Returns the pipelines in a model, or the one that is given."""
    argument_checks.check_instance("model", layer, keras.layers.Layer)
    if isinstance(layer, PipelinedLayer):
        return [layer]
    inner = layer.layers if isinstance(layer, keras.Model) else ()
    return [found for each in inner for found in find_pipelines(each)]
