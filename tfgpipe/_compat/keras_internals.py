"""Private Keras API: variables, scopes, layers, graphs, optimizers, compiled state.

Public API is used wherever it suffices. Each function here wraps one private name, says
why, and has a contract test in `tests/_compat/test_keras_internals.py`, so that an
upgrade that moves one of them fails there, by name, rather than as a wrong gradient.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.common.variables import register_uninitialized_variable
from keras.src.models.functional import Functional

from tfgpipe._compat.tf_internals import eager_variables, without_strategy
from tfgpipe._util import IdentityMap

ScopeFactory = Callable[[], contextlib.AbstractContextManager[Any]]

# Held while a layer, a variable or the losses of a model are not as Keras left them: a
# thread that traces another step of the model waits. None waits for another thread
# while it holds the lock; replicas wait for one another outside.
substitution = threading.RLock()


def initialize_in_scope(
    variable: keras.Variable, scope: ScopeFactory, device: str | None
) -> None:
    """Has the `tf.Variable` behind a Keras variable created inside `scope()`.

    Keras creates the `tf.Variable` of a layer that is built in a `StatelessScope` when
    the outermost such scope ends, long after any `tf.device` the layer could have set,
    and has no public hook there. Should that fail, it is not tried again until the
    variable is given here again. A variable that already has its value is created anew
    inside the scope, with that value, unless it is on `device` as it is; an optimizer
    that was built for it still knows it.
    """
    if variable._value is not None:
        if variable._value.device == device:
            return
        old = variable._value
        with tf.init_scope(), scope():
            variable._initialize(tf.convert_to_tensor(old))
        # By this an optimizer knows the weights that it was built for.
        new = getattr(variable._value, "_primary", variable._value)
        new._unique_id = old._unique_id
        return
    # A pipeline that failed to build may have had it.
    again = "_initialize" in vars(variable)
    if again and not any(variable is v for v in _uninitialized()):
        register_uninitialized_variable(variable)

    def placed(value: Any) -> None:
        try:
            with scope():
                type(variable)._initialize(variable, value)
        except BaseException:
            _forget_uninitialized()
            raise
        del variable._initialize

    variable._initialize = placed


def _uninitialized() -> list[keras.Variable]:
    """Returns the variables that Keras creates when a `StatelessScope` ends."""
    return global_state.get_global_attribute("uninitialized_variables") or []


def _forget_uninitialized() -> None:
    """Has Keras create no variable when a `StatelessScope` ends.

    Keras empties the list only when all are created. After a failure it would try again
    at the end of each later scope, of whatever model.
    """
    for variable in _uninitialized():
        if variable._value is None:
            variable._initialize = variable._initialize  # Seen by the function above.
    global_state.set_global_attribute("uninitialized_variables", [])


@contextlib.contextmanager
def build_scope() -> Iterator[None]:
    """A `StatelessScope` that raises its first error, and leaves nothing after it.

    After an error inside Keras creates the variables nevertheless, which can fail too.
    """
    first: BaseException | None = None
    try:
        with keras.StatelessScope():
            try:
                yield
            except BaseException as error:
                first = error
                raise
    except BaseException as error:
        if current_stateless_scope() is None:
            _forget_uninitialized()
        if first is not None and error is not first:
            raise first from first.__cause__
        raise


@contextlib.contextmanager
def unmoved_on_error(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Variables that are created anew inside are the old ones again after an error."""
    values = [(variable, variable._value) for variable in variables]
    try:
        yield
    except BaseException:
        for variable, value in values:
            variable._value = value
        raise


def is_initialized(variable: keras.Variable) -> bool:
    """Returns whether a variable has a value yet.

    In the `StatelessScope` that its layer was built in it has not; reading it there
    would draw one.
    """
    return variable._value is not None


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Leaves the scope in which reading a variable casts it to the compute dtype.

    Keras enters that scope around a layer's `call`, and offers no public way out.
    """
    outer = global_state.get_global_attribute("autocast_scope")
    global_state.set_global_attribute("autocast_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("autocast_scope", outer)


def inner_layers(layer: Any) -> list[keras.layers.Layer]:
    """Returns a layer and each layer inside it.

    Layers other than models have no public list of the layers inside; operations have
    none inside.
    """
    if not isinstance(layer, keras.layers.Layer):
        return []
    return layer._flatten_layers()


def take_call_arguments_of(wrapper: keras.layers.Layer, layer: Any) -> None:
    """Has Keras bind the arguments of a wrapper's call to those of the layer in it.

    In the constructor Keras inspects the signature of `call`, to find tensors, their
    masks and shapes in a call. `call(self, *args, training=None, **kwargs)`, which
    passes all on, names none, and there is no public hook.
    """
    parameters = list(layer._call_signature.parameters.values())
    if "training" not in layer._call_signature.parameters:
        kind = inspect.Parameter.KEYWORD_ONLY
        num_after = sum(p.kind is p.VAR_KEYWORD for p in parameters)
        training = inspect.Parameter("training", kind, default=None)
        parameters.insert(len(parameters) - num_after, training)
    wrapper._call_signature = inspect.Signature(parameters)
    wrapper.call_signature_parameters = [p.name for p in parameters]
    wrapper._call_has_mask_arg = "mask" in wrapper.call_signature_parameters


@contextlib.contextmanager
def as_subclasses(layers: Sequence[tuple[Any, type]]) -> Iterator[None]:
    """Inside, each layer is an instance of the subclass that it is paired with.

    Python lets an object take a subclass of its class; its variables, and all else,
    stay. Keras has no hook at the calls of layers inside other layers.
    """
    with substitution:
        classes = [(layer, type(layer)) for layer, _ in layers]
        try:
            for layer, subclass in layers:
                layer.__class__ = subclass
            yield
        finally:
            for layer, own_class in classes:
                layer.__class__ = own_class


def is_trainable(layer: Any) -> tuple[bool, ...]:
    """Returns whether a layer, and each layer inside it, is trainable."""
    return tuple(inner.trainable for inner in inner_layers(layer))


def config_is_complete(layer: Any) -> bool:
    """Returns whether a Keras layer's configuration says all that it computes.

    That holds for all layers and operations in these packages but `Lambda` and those
    that `adapt` to data. Layers around other frameworks' functions are in others.
    """
    module = type(layer).__module__
    others = ("keras.src.layers.core.lambda_layer", "keras.src.layers.preprocessing.")
    if module.startswith(others):
        return False
    return module.startswith(("keras.src.layers.", "keras.src.ops."))


def inner_names(layer: Any) -> list[str]:
    """Returns the names of a layer and of all layers inside it."""
    return [inner.name for inner in inner_layers(layer)] or [layer.name]


def seed_states(layer: Any) -> list[keras.Variable]:
    """Returns the states of the seed generators of a layer, and of those inside it."""
    inner = inner_layers(layer)
    return [generator.state for each in inner for generator in each._seed_generators]


def own_metrics(layer: Any) -> list[keras.Variable]:
    """Returns the variables of the metrics of a layer, and of the layers inside it.

    Not those of the losses and metrics that models inside are compiled with.
    """
    metrics = [metric for inner in inner_layers(layer) for metric in inner._metrics]
    return [variable for metric in metrics for variable in metric.variables]


def layer_metrics(layers: Iterable[keras.layers.Layer]) -> list[keras.metrics.Metric]:
    """Returns the metrics of a model's layers as its `metrics` lists them.

    In the order in which Keras goes through the layers inside, and once for each layer
    that a metric is inside of, but not for models.

    Args:
        layers: Those of `model.layers`, or of which a Sequential would be made.
    """
    found: list[keras.metrics.Metric] = []
    remaining, seen = collections.deque(layers), set()
    while remaining:
        layer = remaining.popleft()
        if id(layer) not in seen:
            seen.add(id(layer))
            remaining.extendleft(layer._layers)
            if not isinstance(layer, keras.Model):
                found += layer.metrics
    return found


def step_state(layer: Any) -> list[keras.Variable]:
    """Returns the variables of a layer that a training step may change by itself.

    Seeds, metrics, and statistics of layers that are trainable. Keras' public list of
    variables that are not trained holds frozen weights as well.
    """
    inner = [x for x in inner_layers(layer) if x.trainable]
    return [
        *seed_states(layer),
        *own_metrics(layer),
        *(v for x in inner for v in x._non_trainable_variables),
    ]


@dataclasses.dataclass(frozen=True)
class Node:
    """One call in the graph of a Functional model.

    Attributes:
        operation: The layer or operation called.
        args: Its positional arguments, symbolic tensors in any structure.
        kwargs: Its keyword arguments.
        inputs: The symbolic tensors among the arguments.
        outputs: The symbolic tensors it returned, in flat order.
    """

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: Sequence[keras.KerasTensor]
    outputs: Sequence[keras.KerasTensor]


def functional_graph(layer: Any) -> keras.Model | None:
    """Returns the Functional model that a call of `layer` runs and nothing else.

    None for layers that are no models, models that are not built, and models with a
    `call` of their own. The Functional model of a Sequential one is private.
    """
    if isinstance(layer, keras.Sequential):
        if type(layer).call is not keras.Sequential.call:
            return None
        layer = layer._functional
    own = isinstance(layer, Functional) and type(layer).call is Functional.call
    return layer if own else None


def nodes(graph: keras.Model) -> Iterator[Node]:
    """Yields the calls of a Functional model in the order in which Keras runs them.

    Keras' public list of a model's operations lacks their arguments.
    """
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            if node.operation and not node.is_input:
                yield Node(
                    node.operation,
                    node.arguments.args,
                    node.arguments.kwargs,
                    node.input_tensors,
                    node.outputs,
                )


def standardize_inputs(graph: keras.Model, inputs: Any) -> list[tf.Tensor | None]:
    """Returns the inputs of a Functional model as it feeds them to its graph.

    In flat order, of the right type and rank, masks still on them. Only a call of the
    whole model does this publicly.
    """
    return graph._standardize_inputs(inputs)


def get_mask(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the Keras mask of a tensor."""
    return backend.get_keras_mask(tensor)


def set_mask(tensor: tf.Tensor, mask: tf.Tensor | None) -> None:
    """Sets the Keras mask of a tensor, which is lost at a function's boundary."""
    backend.set_keras_mask(tensor, mask)


def is_symbolic_call() -> bool:
    """Returns whether Keras calls a layer only to infer output shapes."""
    return in_symbolic_scope()


def current_stateless_scope() -> keras.StatelessScope | None:
    """Returns the innermost open `StatelessScope`, or None."""
    return backend.get_stateless_scope()


def calling_optimizer() -> keras.optimizers.Optimizer | None:
    """Returns the optimizer compiled into the model whose call is under way, if any.

    A layer has no public path to the model around it. Keras keeps the outermost layer
    of each call, so that inner ones inherit `training`; that is the path.
    """
    context = global_state.get_global_attribute("current_call_ctx")
    model = getattr(context, "entry_layer", None)
    return getattr(model, "optimizer", None)


def patch_apply(
    optimizer: keras.optimizers.Optimizer, strategy: Any, apply: Callable[..., None]
) -> None:
    """Makes an optimizer use `strategy` for devices, and `apply` in place of its own.

    Keras takes the distribution strategy that an optimizer was made under, and sums
    gradients over replicas amid `apply`, after it has clipped them. `apply` is to sum
    them before. An optimizer that has this `apply` already stays as it is.

    Args:
        optimizer: The optimizer.
        strategy: Has what an optimizer calls of a strategy: `colocate_vars_with`, the
            scope to create slots in, and `update`, which runs an update's arithmetic,
            both in `extended`.
        apply: Called with the optimizer and the arguments of its own `apply`.
    """
    patched = vars(optimizer).get("apply")
    if isinstance(patched, functools.partial) and patched.func is apply:
        return
    optimizer.apply = functools.partial(apply, optimizer)
    # A LossScaleOptimizer leaves the update to the optimizer inside it.
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if each is not None:
            each._distribution_strategy = strategy
            each._all_reduce_sum_gradients = list


def optimizer_weights(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the weights that an optimizer was built for."""
    return list(optimizer._trainable_variables)


def update_strategy(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the strategy by which an optimizer updates variables."""
    return optimizer._distribution_strategy


def optimizer_scalars(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns what the update of each weight reads: the step, and the learning rate."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    scalars = (inner._iterations, inner._learning_rate)
    return [v for v in scalars if isinstance(v, keras.Variable)]


def optimizer_slots(
    optimizer: keras.optimizers.Optimizer,
) -> IdentityMap[keras.Variable, list[keras.Variable]]:
    """Returns the slots of each weight that a built optimizer has any for.

    Keras' optimizers have lists of slots with one entry for each weight, in the order
    of the weights: `_momentums[i]` is of the weight `i`, or None if that has none.
    """
    found: IdentityMap[keras.Variable, list[keras.Variable]] = IdentityMap()
    inside = [getattr(optimizer, "inner_optimizer", None)]  # Of a LossScaleOptimizer.
    inside += getattr(optimizer, "_inner_optimizers", [])  # Of a MultiOptimizer.
    for each in filter(None, (optimizer, *inside)):
        weights = each._trainable_variables
        for name, slots in vars(each).items():
            if name in ("_variables", "_trainable_variables"):
                continue
            if isinstance(slots, list) and len(slots) == len(weights):
                for weight, slot in zip(weights, slots, strict=True):
                    if isinstance(slot, keras.Variable):
                        found.setdefault(weight, []).append(slot)
    return found


@contextlib.contextmanager
def view_as_copies(
    copies: Sequence[tuple[keras.Variable, tf.Variable | tf.Tensor]],
) -> Iterator[None]:
    """Inside, each Keras variable is one replica's copy of it, or a value to read."""
    with substitution:
        values = [(variable, variable._value) for variable, _ in copies]
        for variable, copy in copies:
            variable._value = copy
        try:
            yield
        finally:
            for variable, value in values:
                variable._value = value


@dataclasses.dataclass(frozen=True)
class CompiledState:
    """What a model was compiled with.

    Attributes:
        losses: Keras' container of losses, or None.
        metrics: Keras' container of metrics, or None.
        tracker: The metric of the total loss.
    """

    losses: Any
    metrics: Any
    tracker: keras.metrics.Metric

    @property
    def num_losses(self) -> int:
        """How many losses there are, once they are built."""
        return len(self.losses._flat_losses) if self.losses else 0

    @property
    def loss_trackers(self) -> list[keras.metrics.Metric]:
        """The metrics of the single losses, where there are several."""
        return self.losses.metrics if self.losses else []

    @property
    def compiled_metrics(self) -> list[keras.metrics.Metric]:
        """The metrics, once they are built."""
        return self.metrics.metrics if self.metrics else []

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of the metrics."""
        return self.metrics.variables if self.metrics else []


def compiled(model: keras.Model) -> CompiledState:
    """Returns what a model was compiled with.

    Keras' public methods evaluate all of it at once, on a whole batch.
    """
    return CompiledState(
        model._compile_loss, model._compile_metrics, model._loss_tracker
    )


def build_compiled(model: keras.Model, data: Any) -> None:
    """Creates the variables of a compiled model, its losses, metrics and optimizer.

    Keras creates them one by one while it traces a step on a whole batch. An error it
    reports as a model that should be called before `fit`, which would raise the same
    one: so the error itself is raised.
    """
    with eager_variables():
        try:
            model._symbolic_build(data_batch=data)
        except RuntimeError as error:
            raise error.__context__ or error from None


class Replicated(keras.Model):
    """A model that is built on the first replica's examples.

    Under a strategy Keras builds models before they are fitted, on the mean over
    replicas, which needs equally many examples on all, and one process (keras #20585).
    """

    def _maybe_symbolic_build(
        self, iterator: Any = None, data_batch: Any = None
    ) -> Any:
        strategy = self.distribute_strategy
        # Finding shapes takes a batch, which a generator yields but once, and which is
        # one more draw of the order of a `keras.utils.PyDataset`. Without a strategy
        # Keras finds them as it trains.
        if self._distribute_strategy is None or self._is_all_built():
            return
        if iterator is not None and isinstance(strategy, tf.distribute.Strategy):
            _, _, batches = next(iter(iterator))
            data_batch = keras.tree.map_structure(
                lambda x: strategy.experimental_local_results(x)[0], next(batches)
            )
        super()._maybe_symbolic_build(data_batch=data_batch)

    @property
    def logs_are_results(self) -> bool:
        """Whether metrics are what steps return rather than what metrics then hold."""
        return False

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        # Keras reads the metrics again, which know this process alone.
        if self.logs_are_results:
            return logs
        return super()._get_metrics_result_or_logs(logs)

    def _is_all_built(self) -> bool:
        compiled = (self._compile_loss, self._compile_metrics, self.optimizer)
        return self.built and all(x is None or x.built for x in compiled)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns arguments that compile another model alike, with the same objects.

    Keras' public `get_compile_config` serializes them, which users' functions cannot
    be. The optimizer is the one in use, which may scale the loss where the argument of
    `compile` did not.
    """
    arguments = dict(model._compile_config.config)
    return {**arguments, "optimizer": model.optimizer, "auto_scale_loss": False}


def evaluate_loss(
    compiled: CompiledState,
    evaluate: Callable[[int, keras.Loss, Any, Any, Any], tf.Tensor],
    targets: Any,
    outputs: Any,
    sample_weights: Any,
) -> tuple[tf.Tensor | None, list[tf.Tensor]]:
    """Returns the total loss, and each that is tracked, with each loss replaced.

    Keras alone pairs losses with targets and outputs, whatever their structures. Its
    losses are replaced while it applies them, and it sees no replicas, since it would
    divide means by their number.

    Args:
        compiled: The model's losses.
        evaluate: Called in place of each loss: with its index, the loss, and target,
            output and sample weights as the loss is called with.
        targets: Nested as Keras nests them.
        outputs: Likewise.
        sample_weights: Sample weights, likewise, or None.
    """
    container = compiled.losses
    if container is None:
        return None, []
    with substitution:
        losses, trackers = container._flat_losses, container._metrics
        recorders = [_LossRecorder() for _ in trackers]
        container._flat_losses = [
            each._replace(loss=functools.partial(evaluate, i, each.loss))
            for i, each in enumerate(losses)
        ]
        container._metrics = recorders
        try:
            with without_strategy():
                total = container(targets, outputs, sample_weights)
        finally:
            container._flat_losses, container._metrics = losses, trackers
    return total, [each.value for each in recorders if each.value is not None]


class _LossRecorder:
    """Has the place of the metric of a single loss."""

    value: tf.Tensor | None = None

    def update_state(self, value: tf.Tensor, sample_weight: Any = None) -> None:
        del sample_weight
        self.value = value


@dataclasses.dataclass(frozen=True)
class MetricTerm:
    """A compiled metric, and what it is updated with."""

    metric: keras.metrics.Metric
    target: Any
    output: Any
    weight: Any


def metric_terms(
    compiled: CompiledState, targets: Any, outputs: Any, sample_weights: Any
) -> list[MetricTerm]:
    """Returns each compiled metric with its target, output and sample weights.

    Keras' container updates all of them or none.
    """
    container = compiled.metrics
    if container is None:
        return []
    y, p = container._flatten_y(targets), container._flatten_y(outputs)
    w = [None] if sample_weights is None else container._flatten_y(sample_weights)
    w = w * len(y) if len(w) < len(y) else w
    none = [None] * len(y)
    return [
        MetricTerm(metric, *terms)
        for some, weighing in (
            (container._flat_metrics, none),
            (container._flat_weighted_metrics, w),
        )
        for metrics, *terms in zip(some, y, p, weighing, strict=False)
        for metric in (metrics.metrics if metrics else ())
    ]


def preferred_direction(
    metric: keras.metrics.Metric,
) -> Literal["lower", "higher"] | None:
    """Returns which of two values of a metric is better, None where Keras does not say.

    Keras' own callbacks use this; there is no public path to it.
    """
    direction = getattr(metric, "_direction", None)
    if direction == "up":
        return "higher"
    return "lower" if direction == "down" else None
