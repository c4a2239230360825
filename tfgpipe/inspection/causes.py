"""Layers whose results depend on the microbatches, in plain Keras as well."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe.capture import (
    CallGraph,
    Interpreter,
    TensorKey,
    TracingScope,
    layer_variables,
    source_model,
)
from tfgpipe.inspection import model_copies
from tfgpipe.inspection.comparison import deviation
from tfgpipe.inspection.recorded_steps import microbatches, num_rows


@dataclasses.dataclass(frozen=True)
class Cause:
    """A layer whose results depend on the microbatches, in plain Keras as well.

    Attributes:
        layer: Its name, or that of an option of the pipeline.
        why: `"draws random numbers"`, `"mixes examples"`, `"moves statistics"`,
            or `"compresses"`.
        deviation: The largest of its outputs, or statistics, on the same inputs; NaN
            where they are not compared.
    """

    layer: str
    why: str
    deviation: float

    def __str__(self) -> str:
        explained = {
            "draws random numbers": "draws its random numbers for each microbatch",
            "mixes examples": "computes from the examples of a microbatch together",
            "moves statistics": "moves its statistics once a microbatch",
            "compresses": "changes what is sent between stages",
        }
        how_much = "" if math.isnan(self.deviation) else f" ({self.deviation:.1e})"
        return f"{self.layer} {explained[self.why]}{how_much}"


def find_causes(
    model: keras.Model,
    batch: tuple[Any, ...],
    *,
    num_microbatches: int,
    num_replicas: int,
    tolerance: float,
) -> list[Cause]:
    """Returns the layers whose results depend on the microbatches.

    Each call is run on the same inputs, those of the mini-batch, at once and one
    microbatch after another.
    """
    source = source_model.make_source(model)
    captured = source.capture(source.inputs, {})
    inputs = source.flatten_inputs(captured, batch[0], {}).values()
    values: dict[TensorKey, tf.Tensor] = {
        TensorKey(number): tf.convert_to_tensor(x)
        for number, x in zip(captured.graph.input_ids, inputs, strict=True)
        if x is not None
    }
    replicas = microbatches(num_rows(batch[0]), num_microbatches, num_replicas)
    rows = list(itertools.chain.from_iterable(replicas))
    known = {id(x): x.value for x in model_copies.variables(model)}
    causes: dict[str, Cause] = {}
    for i, call in enumerate(captured.graph.calls):
        one = _OneCall(captured.graph, i)
        given = {key: values[key] for key in values if key.value_id in call.input_ids}
        whole, after = one.run(given, known)
        before, made = known, []
        for some in rows:
            piece = {key: x[some] for key, x in given.items()}
            results, before = one.run(piece, before)
            made.append(results)
        joined = {
            key: tf.concat([x[key] for x in made], axis=0)
            for key in whole
            if made[0][key].shape.rank
        }
        output = max((deviation(x, whole[key]) for key, x in joined.items()), default=0)
        moved = max((deviation(before[v], after[v]) for v in after), default=0.0)
        why = _why(call.layer, output > tolerance, moved > tolerance)
        if why is not None:
            name = call.layer.name
            causes.setdefault(name, Cause(name, why, output or moved))
        values |= whole
        known = {**known, **after}
    return list(causes.values())


def _why(layer: Any, differs: bool, moves: bool) -> str | None:
    """Returns the reason for which results of a layer depend on the microbatches."""
    draws = bool(keras_internals.layers.seed_states(layer))
    if differs:
        return "draws random numbers" if draws else "mixes examples"
    return "moves statistics" if moves and not draws else None


class _OneCall:
    """A call of a model, to be run by itself."""

    def __init__(self, graph: CallGraph, index: int) -> None:
        self._segment = graph.segment(slice(index, index + 1))
        trained, others = layer_variables(self._segment.layers)
        self._variables, self._others = [*trained, *others], others

    def run(
        self, given: Mapping[TensorKey, tf.Tensor], known: Mapping[int, tf.Tensor]
    ) -> tuple[dict[TensorKey, tf.Tensor], dict[int, tf.Tensor]]:
        """Returns its outputs, and the values of other variables than weights."""
        interpreter = Interpreter(self._segment, list(given), training=True)
        pairs = [(v, known.get(id(v), v.value)) for v in self._variables]
        with TracingScope(pairs, None) as scope:
            made = interpreter.run(list(given.values()))
        outputs = {key: x for key, x in made.items() if x is not None}
        return outputs, {id(v): scope.get_current_value(v) for v in self._others}
