"""Probes of losses and metrics: how they treat the examples of a batch.

Each is given some rows at once, and then a part of them and the rest.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe.runtime.probes import FailedProbe, Probe, verdicts

# What a loss returns: a value for each example, their mean, or their sum.
Reduction = Literal["values", "mean", "sum"]

# Rows to try losses and metrics on, and of these the first part.
_ROWS, _FIRST = 6, 4


class CoupledLossError(ValueError):
    """A loss couples the examples of a batch.

    Args:
        loss: Its name.

    Attributes:
        loss: Its name.
    """

    def __init__(self, loss: str) -> None:
        super().__init__(
            "Replicas each take the loss of their own examples, one microbatch at a "
            f"time. Received loss '{loss}', which mixes the examples of a batch: of "
            f"{_ROWS} it gives neither the values, nor the mean, nor the sum of what "
            f"it gives of {_FIRST} and of {_ROWS - _FIRST} of them. Use one replica."
        )
        self.loss = loss


def unreduced_values(loss: keras.Loss, target: Any, output: Any) -> tf.Tensor:
    """Returns the values of a loss before they are reduced."""
    if type(loss).__call__ is not keras.Loss.__call__:
        return loss(target, output)

    def converted(x: Any) -> tf.Tensor:
        return keras.ops.convert_to_tensor(x, dtype=loss.dtype)

    return loss.call(*keras.tree.map_structure(converted, (target, output)))


def probe_reductions(
    compiled: keras_internals.compiled.CompiledState, targets: Any, outputs: Any
) -> list[Reduction]:
    """Returns the reduction of each loss, found by calling it on noise.

    Args:
        compiled: The model's losses.
        targets: Shapes and types of the targets, nested as Keras nests them.
        outputs: Shapes and types of the outputs, nested in the same way.

    Raises:
        CoupledLossError: If a loss couples examples.
        ValueError: If a loss does not reduce its values.
    """
    found: list[Reduction] = ["values"] * compiled.num_losses
    probes: list[Probe[tuple[int, str], Reduction | None]] = []

    def examine(number: int, loss: keras.Loss, y: Any, p: Any, w: Any) -> tf.Tensor:
        del w
        if loss.reduction in (None, "none"):
            raise ValueError(
                "The loss of a mini-batch is the sum of its microbatches' parts. "
                f"Received loss '{loss.name}' with reduction=None, which gives no "
                'number. Use reduction="sum_over_batch_size" or "sum".'
            )
        try_it = functools.partial(_reduction, loss, y, p)
        probes.append(Probe((number, loss.name), loss.name, try_it))
        return tf.zeros([])

    with tf.init_scope():
        keras_internals.compiled.evaluate_loss(
            compiled, examine, targets, outputs, None
        )
        for (number, name), kind in verdicts(
            probes,
            "Whether each loss gives a value for each example of a batch",
            "It is taken to do so. If it mixes examples, training differs from that "
            "of the unpipelined model: compare them, or use `num_microbatches=1`.",
        ):
            if kind is None:
                raise CoupledLossError(name)
            if not isinstance(kind, FailedProbe):
                found[number] = kind
    return found


def full_batch_metrics(
    compiled: keras_internals.compiled.CompiledState,
    targets: Any,
    outputs: Any,
    *,
    num_replicas: int = 1,
) -> dict[int, str]:
    """Returns positions and names of full-batch metrics.

    Those whose state after two updates with parts of a batch is not that after one with
    all of it, as of correlations over the batch, or means that weigh batches equally.
    On several replicas also those whose state is not the sum of the states of parts, as
    of a maximum.

    Args:
        compiled: The model's metrics.
        targets: Shapes and types of the targets, nested as Keras nests them.
        outputs: Shapes and types of the outputs, nested in the same way.
        num_replicas: Over how many replicas their states are summed.
    """
    with tf.init_scope():
        terms = keras_internals.compiled.metric_terms(compiled, targets, outputs, None)
        needs = verdicts(
            (
                Probe(
                    (number, term.metric.name),
                    term.metric.name,
                    functools.partial(
                        _needs_full_batch, term, is_summed=num_replicas > 1
                    ),
                )
                for number, term in enumerate(terms)
            ),
            "Whether each metric can be updated with one microbatch after another",
            "It is updated so. If it weighs batches equally or mixes examples, its "
            "result differs from that of the unpipelined model: compare them, or use "
            "`num_microbatches=1`. Training does not depend on it.",
        )
        return dict(key for key, needed in needs if needed is True)


def _reduction(loss: keras.Loss, target: Any, output: Any) -> Reduction | None:
    """Returns the reduction of a loss, or None if it couples examples."""
    trials = [
        [
            np.asarray(unreduced_values(loss, *rows))
            for rows in _probe_batches(target, output, padded)
        ]
        for padded in (False, True)
    ]
    for kind, holds in _REDUCTION_TESTS.items():
        if all(holds(*values) for values in trials):
            return kind
    return None


def _needs_full_batch(
    term: keras_internals.compiled.MetricTerm, *, is_summed: bool
) -> bool:
    metric = term.metric
    clean = metric.stateless_reset_state()
    for padded in (False, True):
        whole, first, rest = _probe_batches(term.target, term.output, padded)
        once = metric.stateless_update_state(clean, *whole)
        states = [metric.stateless_update_state(clean, *x) for x in (first, rest)]
        twice = metric.stateless_update_state(states[0], *rest)
        if not all(_close(a, b) for a, b in zip(once, twice, strict=True)):
            return True
        if is_summed and not all(
            _close(whole, a + b)
            for v, whole, a, b in zip(metric.variables, once, *states, strict=True)
            if v.aggregation == "sum"
        ):
            return True
    return False


def _probe_batches(targets: Any, outputs: Any, padded: bool) -> list[tuple[Any, Any]]:
    """Returns rows to try a loss or a metric on: all of them, the first, the rest.

    Floats are noise between 0 and 1, larger from row to row, so that rows differ by
    more than chance, and integers 1. Targets and outputs go together
    place by place, so a size that is not known of one is that of the other.

    Args:
        targets: Shapes and types of the targets, in any structure.
        outputs: Shapes and types of the outputs, nested in the same way.
        padded: True to set some rows of the targets, unevenly spread, to zero.
    """
    specs = [x for x in keras.tree.flatten((targets, outputs)) if x is not None]
    known = {i: n for x in specs for i, n in enumerate(x.shape) if n is not None}
    seeds = itertools.count()

    def rows(spec: Any) -> tf.Tensor | None:
        if spec is None:
            return None
        sizes = [known.get(i, 3) if n is None else n for i, n in enumerate(spec.shape)]
        shape, dtype = [_ROWS, *sizes[1:]], tf.as_dtype(spec.dtype)
        if not dtype.is_floating:
            return tf.ones(shape, dtype)
        noise = tf.random.stateless_uniform(shape, seed=[next(seeds), 0])
        growing = tf.reshape(tf.linspace(0.1, 1.0, _ROWS), [-1, *[1] * len(sizes[1:])])
        return tf.cast(noise * growing, dtype)

    def with_padding(tensor: tf.Tensor | None) -> tf.Tensor | None:
        if tensor is None or not padded:
            return tensor
        gone = tf.zeros_like(tensor[:1])
        return tf.concat([tensor[:2], gone, tensor[3:4], gone, tensor[5:]], axis=0)

    targets, outputs = keras.tree.map_structure(rows, (targets, outputs))
    both = keras.tree.map_structure(with_padding, targets), outputs
    return [
        keras.tree.map_structure(lambda x, s=some: None if x is None else x[s], both)
        for some in (slice(None), slice(_FIRST), slice(_FIRST, None))
    ]


def _are_values(whole: np.ndarray, first: np.ndarray, rest: np.ndarray) -> bool:
    sizes = [x.shape[:1] for x in (whole, first, rest)]
    each = sizes == [(_ROWS,), (_FIRST,), (_ROWS - _FIRST,)]
    return each and _close(whole, np.concatenate([first, rest]))


def _is_mean(whole: np.ndarray, first: np.ndarray, rest: np.ndarray) -> bool:
    share = _FIRST / _ROWS
    alike = whole.shape == first.shape == rest.shape
    return alike and _close(whole, share * first + (1 - share) * rest)


def _is_sum(whole: np.ndarray, first: np.ndarray, rest: np.ndarray) -> bool:
    alike = whole.shape == first.shape == rest.shape
    return alike and _close(whole, first + rest)


def _close(a: Any, b: Any) -> bool:
    return np.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


# How to tell, from what a loss gives of all rows, of the first and of the rest.
_REDUCTION_TESTS: dict[Reduction, Callable[..., bool]] = {
    "values": _are_values,
    "mean": _is_mean,
    "sum": _is_sum,
}
