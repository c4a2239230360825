"""Running the calls of a part on tensors.

Keras lets a mask ride on a tensor, where neither a function's boundary nor a device's
lets it pass. Here masks travel as values of their own, put on their tensors before the
first call of a part and taken off after the last.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe.capture.ir import Call, Part, Value
from tfgpipe.capture.scope import Accumulator, Scope, check_assignments, differentiable


class Wire(NamedTuple):
    """What travels from part to part: a value of the network, or the mask on one."""

    number: int
    is_mask: bool = False


class Replay:
    """The calls of a part as a function of the tensors on its wires.

    Args:
        part: The calls.
        reads: The wires that are given. A value that the part reads and that is not
            among them is None, as an optional input of a model can be.
        training: Whether layers run as in training; None leaves it to each.
        per_layer: Whether a gradient recomputes each call from its inputs alone.
        borrowed: Variables that the calls use though those of other layers.

    Attributes:
        reads: The wires that are given.
        makes: The wires it makes, known once it has run.
        unmasked: Values that were given with a mask and lost it, as attention layers
            take it off their inputs.
    """

    def __init__(
        self,
        part: Part,
        reads: Sequence[Wire],
        *,
        training: bool | None,
        per_layer: bool,
        borrowed: Sequence[keras.Variable] = (),
    ) -> None:
        self._part = part
        self.reads = tuple(reads)
        self._training = training
        self._run = _run
        if per_layer:
            self._run = functools.partial(_rematerialised, borrowed=borrowed)
        self.makes: tuple[Wire, ...] = ()
        self.unmasked: tuple[int, ...] = ()

    def body(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Runs the calls, from the tensors of `reads` to those of `makes`."""
        given = dict(zip(self.reads, tensors, strict=True))
        values = {number: given.get(Wire(number)) for number in self._part.reads}
        masked = [wire.number for wire in given if wire.is_mask]
        for number in masked:
            keras_internals.set_mask(values[number], given[Wire(number, True)])
        for call in self._part.calls:
            outputs = self._run(call, values, self._training)
            values.update(zip(call.makes, outputs, strict=True))
        made: dict[Wire, tf.Tensor] = {}
        for number in self._part.makes:
            if values[number] is None:
                continue
            made[Wire(number)] = values[number]
            mask = keras_internals.get_mask(values[number])
            if mask is not None:
                made[Wire(number, True)] = mask
        self.makes = tuple(made)
        self.unmasked = tuple(
            n for n in masked if keras_internals.get_mask(values[n]) is None
        )
        return list(made.values())


def layer_variables(
    layers: Iterable[Any], borrowed: Sequence[keras.Variable] = ()
) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """Returns the trainable and the other variables of layers, each once.

    The others are statistics, seeds and frozen weights. Keras operations have neither.

    Args:
        layers: The layers.
        borrowed: Variables that they use though those of other layers.
    """
    owners = [layer for layer in layers if isinstance(layer, keras.layers.Layer)]
    trainable = {id(v): v for layer in owners for v in layer.trainable_variables}
    other = {id(v): v for layer in owners for v in layer.non_trainable_variables}
    for variable in borrowed:
        (trainable if variable.trainable else other)[id(variable)] = variable
    return list(trainable.values()), list(other.values())


def _run(
    call: Call, values: dict[int, tf.Tensor | None], training: bool | None
) -> list[tf.Tensor]:
    """Calls a layer on the tensors that its arguments stand for."""
    args, kwargs = keras.tree.map_structure(
        lambda leaf: values[leaf.number] if isinstance(leaf, Value) else leaf,
        (call.args, dict(call.kwargs)),
    )
    if isinstance(call.layer, keras.layers.Layer) and training is not None:
        kwargs["training"] = training
    return keras.tree.flatten(call.layer(*args, **kwargs))


def _rematerialised(
    call: Call,
    values: dict[int, tf.Tensor | None],
    training: bool | None,
    *,
    borrowed: Sequence[keras.Variable],
) -> list[tf.Tensor]:
    """Calls a layer so that its gradient recomputes it from its inputs alone.

    `tf.recompute_grad` differentiates only with respect to arguments, so the weights
    are passed as such. It runs `call` twice; what the layer assigns, adds as a loss or
    masks is taken from the first run, which is the forward pass.
    """
    scope = keras_internals.current_stateless_scope()
    assert isinstance(scope, Scope)  # `trace` runs this.
    weights, state = layer_variables([call.layer], borrowed)
    held = [(variable, scope.get_current_value(variable)) for variable in state]
    # Only what has a gradient is an argument: `tf.recompute_grad` adds to each of them.
    given = {n: values[n] for n in call.reads if values[n] is not None}
    read = [number for number, tensor in given.items() if differentiable(tensor)]
    if not read and not weights:
        return _run(call, values, training)
    masks = {
        number: keras_internals.get_mask(tensor) for number, tensor in given.items()
    }
    first: list[_FirstRun] = []

    def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
        inputs = {**given, **dict(zip(read, tensors, strict=False))}
        for number, tensor in inputs.items():
            keras_internals.set_mask(tensor, masks[number])
        inner = Scope(
            [*zip(weights, tensors[len(read) :], strict=True), *held], scope.replicas
        )
        with inner:
            outputs = _run(call, {**values, **inputs}, training)
        check_assignments(inner, [*weights, *state])
        scope.strangers.update(inner.strangers)
        first.append(
            _FirstRun(
                state=[inner.get_current_value(v) for v in state],
                statistics=inner.statistics,
                input_masks=[
                    keras_internals.get_mask(tensor) for tensor in inputs.values()
                ],
                output_masks=[keras_internals.get_mask(tensor) for tensor in outputs],
            )
        )
        return [*outputs, *inner.losses]

    results = tf.recompute_grad(run)(
        *(values[number] for number in read),
        *(scope.get_current_value(v) for v in weights),
    )
    outputs, losses = results[: len(call.makes)], results[len(call.makes) :]
    for variable, value in zip(state, first[0].state, strict=True):
        scope.add_update((variable, value))
    scope.statistics.extend(first[0].statistics)
    for loss in losses:
        scope.add_loss(loss)
    for tensor, mask in zip(given.values(), first[0].input_masks, strict=True):
        keras_internals.set_mask(tensor, mask)
    for tensor, mask in zip(outputs, first[0].output_masks, strict=True):
        keras_internals.set_mask(tensor, mask)
    return list(outputs)


class _FirstRun(NamedTuple):
    """What a call leaves behind beside its outputs and losses."""

    state: list[tf.Tensor]
    statistics: list[Accumulator]
    input_masks: list[tf.Tensor | None]
    output_masks: list[tf.Tensor | None]
