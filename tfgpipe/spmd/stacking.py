"""Stacks the variables of K alike stages into one variable each, `[K, ...]`.

The layers that a user gives stay on the host, as they would be in a plain model. They
say what a stage computes, draw the first values of the weights, and take the trained
values back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals, tf_internals
from tfgpipe._util import IdentityMap, unique
from tfgpipe.capture import TracingScope
from tfgpipe.spmd.loop import StageFunction
from tfgpipe.stage import layer_checks

# Regularizers whose value for a stack is the sum of those for its rows.
_SUMMABLE = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


@dataclasses.dataclass
class Stack:
    """The same variable of all stages.

    Attributes:
        name: Its name in stage 0, below that of its layer.
        rows: The variables, stage by stage.
        is_weight: True if it is trained.
        is_state: True if a microbatch may change it.
        variable: The variable `[K, ...]` of all.
    """

    name: str
    rows: tuple[keras.Variable, ...]
    is_weight: bool
    is_state: bool
    variable: keras.Variable | None = None

    def read_rows(self) -> np.ndarray:
        """Returns the values of the stages' own variables, stacked."""
        return np.stack([keras.ops.convert_to_numpy(row) for row in self.rows])

    def write_rows(self) -> None:
        """Assigns the value of the variable of all to the stages' own."""
        values = keras.ops.convert_to_numpy(self.variable)
        for row, value in zip(self.rows, values, strict=True):
            row.assign(value)


class StackedStages:
    """K alike stages, as one function of a row of stacked variables.

    Keras does not find the layers in this object, so their own variables are no
    weights of the layer that holds it.

    Args:
        layers: The layers of all stages, in order.
        num_stages: K.

    Attributes:
        layers: The same.
        stacks: Their variables, once they are built.
        dtype: Dtype of the tensors between stages.

    Raises:
        TypeError, ValueError: If these cannot be alike stages.
    """

    def __init__(self, layers: Sequence[keras.layers.Layer], num_stages: int) -> None:
        self._stages = _group(layers, num_stages)
        self.layers = tuple(layers)
        self.dtype = self.layers[0].compute_dtype
        self.stacks: list[Stack] = []

    def build(self, shape: tuple[int | None, ...]) -> list[Stack]:
        """Builds all layers, with variables on the host, and returns these as stacks.

        To be called in a `keras.StatelessScope`: at its end the variables get their
        values.

        Raises:
            ValueError: If stages are not known to be alike, or one cannot follow
                another.
        """
        for k, layers in enumerate(self._stages):
            self._build_stage(k, layers, shape)
        self.stacks = _make_stacks(self._stages)
        return self.stacks

    @property
    def variables(self) -> tuple[list[keras.Variable], ...]:
        """The stacked variables: weights, constants, and state."""
        groups: tuple[list[keras.Variable], ...] = ([], [], [])
        for stack in self.stacks:
            assert stack.variable is not None
            groups[0 if stack.is_weight else 2 if stack.is_state else 1].append(
                stack.variable
            )
        return groups

    def stage_function(self, *, training: bool | None) -> StageFunction:
        """Returns the function of a stage, of the values of its variables."""
        own = [stack.rows[0] for stack in self.stacks]
        known = [v for x in self._stages[0] for v in x.variables]
        kept = IdentityMap((x.rows[0], None) for x in self.stacks if x.is_state)

        def run(
            inputs: tf.Tensor,
            weights: Sequence[tf.Tensor],
            constants: Sequence[tf.Tensor],
            state: Sequence[tf.Tensor],
        ) -> tuple[tf.Tensor, list[tf.Tensor]]:
            groups = (iter(weights), iter(constants), iter(state))
            values = [
                next(groups[0 if s.is_weight else 2 if s.is_state else 1])
                for s in self.stacks
            ]
            scope = TracingScope(zip(own, values, strict=True), None)
            x = inputs
            with scope:
                for layer in self._stages[0]:
                    x = layer(x, training=training)
            scope.check_assignments(known)
            for variable in scope.assigned_variables:
                if variable not in kept:
                    raise ValueError(
                        "An SPMD pipeline keeps what layers assign to their state, not "
                        "to weights or to frozen layers. Received a layer that assigns "
                        f"'{variable.path}'. Put it before or behind the pipeline."
                    )
            self._check_outputs(x, scope)
            after = [
                scope.get_current_value(stack.rows[0])
                for stack in self.stacks
                if stack.is_state
            ]
            return x, after

        return run

    def _build_stage(
        self,
        k: int,
        layers: Sequence[keras.layers.Layer],
        shape: tuple[int | None, ...],
    ) -> None:
        x = keras.KerasTensor(shape, self.dtype)
        for layer in layers:
            x = layer(x)
        received = keras.tree.map_structure(lambda t: (tuple(t.shape), t.dtype), x)
        if received != (shape, self.dtype):
            raise ValueError(
                "In an SPMD pipeline outputs of a stage have the shape and dtype of "
                f"its inputs. Stage {k} takes {(shape, self.dtype)} and returned "
                f"{received}. Put layers that change them before or behind the "
                "pipeline, where all cores share them."
            )
        for layer in layers:
            for variable in layer.variables:
                if not keras_internals.variables.is_initialized(variable):
                    keras_internals.variables.initialize_in_scope(
                        variable, tf_internals.host_variables
                    )

    def _check_outputs(self, x: tf.Tensor, scope: keras.StatelessScope) -> None:
        if scope.losses or keras_internals.calls.get_mask(x) is not None:
            what = "a loss" if scope.losses else "a Keras mask"
            raise ValueError(
                "An SPMD pipeline passes one tensor from stage to stage, and nothing "
                f"else. Received layers that add {what}. Put them before or behind "
                "the pipeline."
            )


def _group(
    layers: Sequence[keras.layers.Layer], num_stages: int
) -> tuple[tuple[keras.layers.Layer, ...], ...]:
    """Returns the layers of each stage.

    Raises:
        TypeError: If something is no layer.
        ValueError: If K does not divide the number of layers, or a layer occurs twice.
    """
    layers = tuple(layers)
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise TypeError(
                f"`layers` must be Keras layers. Received {layer!r} among them."
            )
    if len(unique(layers)) < len(layers):
        raise ValueError(
            "A layer of an SPMD pipeline is in one stage. Received a layer twice. Make "
            "a layer of its own for each place."
        )
    if num_stages < 1 or not layers or len(layers) % num_stages:
        raise ValueError(
            "The stages of an SPMD pipeline have equally many layers. Received "
            f"{len(layers)} layers for {num_stages} stages. Use a number of stages "
            "that divides the number of layers."
        )
    layer_checks.check_not_stateful(layers)
    layer_checks.check_not_float8(layers)
    each = len(layers) // num_stages
    return tuple(layers[i : i + each] for i in range(0, len(layers), each))


def _make_stacks(stages: Sequence[Sequence[keras.layers.Layer]]) -> list[Stack]:
    """Returns the variables of built stages, those of the same place as one."""
    for k, layers in enumerate(stages):
        for first, layer in zip(stages[0], layers, strict=True):
            layer_checks.check_alike(first, layer, stage=k)
    stacks = []
    for position, first in enumerate(stages[0]):
        state = IdentityMap(
            (v, None) for v in keras_internals.layers.mutable_state(first)
        )
        trained = IdentityMap((v, None) for v in first.trainable_variables)
        each = [layers[position].variables for layers in stages]
        for rows in zip(*each, strict=True):
            _check_stackable(rows[0])
            stacks.append(
                Stack(
                    _name(rows[0], first, position if len(stages[0]) > 1 else None),
                    rows,
                    is_weight=rows[0] in trained,
                    is_state=rows[0] in state,
                )
            )
    return stacks


def _check_stackable(first: keras.Variable) -> None:
    constraint = getattr(first, "constraint", None)
    regularizer = getattr(first, "regularizer", None)
    if constraint is not None:
        raise ValueError(
            "Constraints apply to a variable as a whole, and an SPMD pipeline has one "
            f"variable for all stages. Received {constraint} on '{first.path}'. Leave "
            "it out."
        )
    if regularizer is not None and not isinstance(regularizer, _SUMMABLE):
        raise ValueError(
            "An SPMD pipeline has one variable for all stages, so the penalty of a "
            "regularizer must be a sum over elements. Received "
            f"{regularizer} on '{first.path}'. Use L1, L2 or L1L2."
        )


def _name(
    variable: keras.Variable, layer: keras.layers.Layer, position: int | None
) -> str:
    """Returns a name without slashes, from below the layer, that ends as the old one.

    With the position of the layer in its stage, if there are others.
    """
    path = variable.path.split("/")
    below = path[path.index(layer.name) + 1 :] if layer.name in path else []
    name = "_".join(below) or variable.name
    return name if position is None else f"layer{position}_{name}"
