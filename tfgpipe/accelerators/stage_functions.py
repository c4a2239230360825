"""The stage functions of a step, compiled for another device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfgpipe._compat import functions
from tfgpipe.accelerators import placement, steps
from tfgpipe.accelerators.compilers import Compiled, Compiler
from tfgpipe.accelerators.hlo import hlo
from tfgpipe.accelerators.platforms import Platform
from tfgpipe.accelerators.steps import Step
from tfgpipe.stage import owned_variables

# In-place operations, which XLA has no need of, and what it has instead.
_IN_PLACE = {
    "InplaceAdd": tf.raw_ops.TensorScatterAdd,
    "InplaceUpdate": tf.raw_ops.TensorScatterUpdate,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFunction:
    """A function that a training step calls, of tensors alone.

    Attributes:
        name: The action that it computes, such as `"forward"`, or `"update"`.
        device: The index of the first device that it runs on.
        calls: Number of its calls in a step.
        function: Computes tensors from tensors, in a graph of TensorFlow. An update
            takes weights, their gradients and slots, and returns weights and slots.
        specs: Shapes and types of these.
    """

    name: str
    device: int
    calls: int
    function: Callable[..., Any]
    specs: Sequence[tf.TensorSpec]


def step_functions(
    model: keras.Model, batch: Any, *, platform: Literal["GPU", "TPU"]
) -> Iterator[StepFunction]:
    """Yields the stage functions and updates of a step, traced and not run.

    Args:
        model: The model, as of `dry_run`.
        batch: The batch of a step, as of `dry_run`.
        platform: Type of the devices that they are traced for.

    Raises:
        ValueError: If the model has no pipeline or is not compiled, or if a size of the
            batch is not known.
    """
    step = steps.trace(model, batch, platform=platform)
    modules = StageModules(step)
    library = {f.signature.name: f for f in step.graph.as_graph_def().library.function}
    called: dict[str, list[tf.Operation]] = {}
    for op, function in stage_calls(step, library):
        called.setdefault(function, []).append(op)
    for function, calls in called.items():
        call, inputs = modules.callable(function)
        yield StepFunction(
            name=placement.without_number(calls[0].name).removeprefix("stage_"),
            device=step.devices.index(calls[0].device),
            calls=len(calls),
            function=call,
            specs=[tf.TensorSpec(x.shape, x.dtype) for x in inputs],
        )
    for index, weights in _trained(step):
        copies, optimizer = _copies_of(model.optimizer, weights)
        held = (*copies, *copies, *optimizer.variables)
        # Its first replica's, and of that the first shard.
        first = step.pipeline.mesh.devices[0][index][0]
        yield StepFunction(
            name="update",
            device=step.devices.index(first),
            calls=1,
            function=functools.partial(_assigned_update, copies, optimizer),
            specs=[tf.TensorSpec(v.shape, v.dtype) for v in held],
        )


def stage_calls(
    step: Step, library: Mapping[str, Any]
) -> Iterator[tuple[tf.Operation, str]]:
    """Yields the calls of stage functions in a step, each with the function's name.

    Args:
        step: The step.
        library: The functions of its graph.
    """
    for op in step.graph.get_operations():
        if op.name.startswith("stage_") and not placement.is_on_host(op.name):
            yield op, steps.innermost(op.node_def.attr["f"].func.name, library)


def _assigned_update(
    copies: Sequence[keras.Variable],
    optimizer: keras.optimizers.Optimizer,
    *given: tf.Tensor,
) -> list[Any]:
    """Returns weights and slots after an update: of them, gradients between."""
    n = len(copies)
    variables = [*copies, *optimizer.variables]
    for variable, x in zip(variables, given[:n] + given[2 * n :], strict=True):
        variable.assign(x)
    optimizer.apply(list(given[n : 2 * n]), copies)
    return [variable.value for variable in variables]


class StageModules:
    """The stage functions and updates of a step, each lowered once for all platforms.

    Attributes:
        step: The step.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self._lowered: dict[Hashable, bytes | Compiled] = {}

    def compile(
        self, names: Iterable[str], platform: Platform
    ) -> tuple[dict[str, Compiled], dict[int, Compiled]]:
        """Returns a compiler's reports on the functions and the optimizer's updates.

        The former are by name, the latter by the index of a stage.

        Args:
            names: Names of functions of the step's graph.
            platform: The platform to compile for.
        """
        with Compiler(platform) as compiler:

            def compiled(module: bytes | Compiled) -> Compiled:
                if isinstance(module, Compiled):
                    return module
                return compiler.compile(module)

            unique = dict.fromkeys(names)
            return (
                {name: compiled(self._function(name)) for name in unique},
                {k: compiled(self._update(v)) for k, v in _trained(self.step)},
            )

    @functools.cached_property
    def _graphs(self) -> dict[str, tf.Graph]:
        library = self.step.graph.as_graph_def().library
        return functions.graphs_of_functions(library)

    def callable(
        self, name: str
    ) -> tuple[Callable[..., list[tf.Tensor]], list[tf.Tensor]]:
        """Returns a function of the step's graph, and the tensors that it takes.

        Args:
            name: Its name in the graph's library.
        """
        graph = self._graphs[name]
        return _call_of(graph), graph.inputs

    def _function(self, name: str) -> bytes | Compiled:
        call, inputs = self.callable(name)
        return self._lower(name, lambda: call, inputs)

    def _update(self, weights: Sequence[keras.Variable]) -> bytes | Compiled:
        key = tuple((v.shape, v.dtype) for v in weights)
        optimizer = self.step.model.optimizer
        return self._lower(key, lambda: _update_of(optimizer, weights), weights)

    def _lower(
        self, key: Hashable, make: Callable[[], Any], arguments: Sequence[Any]
    ) -> bytes | Compiled:
        """Returns the HLO module of a function, or the error if it has none."""
        if key not in self._lowered:
            specs = [tf.TensorSpec(x.shape, x.dtype) for x in arguments]
            try:
                self._lowered[key] = hlo(make(), *specs)
            except ValueError as error:
                self._lowered[key] = Compiled(seconds=0.0, error=str(error))
        return self._lowered[key]


def _trained(step: Step) -> Iterator[tuple[int, list[keras.Variable]]]:
    """Yields each stage with the variables that it owns and trains, if any."""
    trained = {id(v) for v in step.model.trainable_variables}
    for stage, owned in owned_variables(step.pipeline.stages):
        variables = [v for v in owned if id(v) in trained]
        if variables:
            yield stage.index, variables


def _update_of(
    optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]
) -> Callable[..., None]:
    """Returns the update of copies of weights, all on one device, from gradients."""
    copies, other = _copies_of(optimizer, weights)

    def update(*gradients: tf.Tensor) -> None:
        other.apply(list(gradients), copies)

    return update


def _copies_of(
    optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]
) -> tuple[list[keras.Variable], keras.optimizers.Optimizer]:
    """Returns weights of zeros on one device, and an optimizer built for them."""
    with tf.device("CPU:0"):
        copies = [
            keras.Variable("zeros", shape=v.shape, dtype=v.dtype) for v in weights
        ]
        config = keras.optimizers.serialize(optimizer)
        other = keras.optimizers.deserialize(config)
        other.build(copies)
    return copies, other


def _call_of(graph: tf.Graph) -> Callable[..., list[tf.Tensor]]:
    """Returns a function that computes what a graph does, without in-place operations.

    Args:
        graph: One of `functions.graphs_of_functions`.
    """

    def call(*tensors: tf.Tensor) -> list[tf.Tensor]:
        made = dict(zip((x.ref() for x in graph.inputs), tensors, strict=True))
        segment: list[tf.Operation] = []
        for op in graph.get_operations():
            if op.type in _IN_PLACE:
                _import(segment, made)
                segment = []
                x, i, v = (made[each.ref()] for each in op.inputs)
                made[op.outputs[0].ref()] = _IN_PLACE[op.type](
                    tensor=x, indices=tf.reshape(i, [-1, 1]), updates=v
                )
            elif op.type != "Placeholder":
                segment.append(op)
        _import(segment, made)
        return [made[x.ref()] for x in graph.outputs]

    return call


def _import(operations: Sequence[tf.Operation], made: dict[Any, tf.Tensor]) -> None:
    """Adds operations to the current graph.

    Args:
        operations: Operations of another graph, in its order.
        made: The tensors of the current graph for those of the other, to add to.
    """
    if not operations:
        return
    known = {op.name for op in operations}
    graph_def = tf.compat.v1.GraphDef(
        node=[_among(op.node_def, known) for op in operations],
        library=operations[0].graph.as_graph_def().library,
    )
    inputs = {
        x.name: made[x.ref()]
        for op in operations
        for x in op.inputs
        if x.op.name not in known
    }
    wanted = [x for op in operations for x in op.outputs]
    found = tf.graph_util.import_graph_def(
        graph_def,
        input_map=inputs,
        return_elements=[x.name for x in wanted],
        name="",
    )
    made.update(zip((x.ref() for x in wanted), found, strict=True))


def _among(node: Any, known: set[str]) -> Any:
    """Returns a node that waits for none but known ones: the order is theirs here."""
    for name in [x for x in node.input if x.startswith("^") and x[1:] not in known]:
        node.input.remove(name)
    return node
