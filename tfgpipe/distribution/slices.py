"""Weights in slices: each replica has one slice of a weight and of its slots.

        w [4, 6], Adam           replica 0                    replica 1
        at rest                  w[:2], m[:2], v[:2]          w[2:], m[2:], v[2:]
        in a step                w, gathered                  w, gathered
        gradients                g[:2], summed                g[2:], summed
        update                   of w[:2]                     of w[2:]

That is FSDP (Zhao et al. 2023), ZeRO-3 (Rajbhandari et al. 2020, section 5.3). Keras'
optimizer is applied once, and sees the slices of a weight as weights of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgpipe._compat import sliced_variables, tf_internals
from tfgpipe._util import num_bytes
from tfgpipe.distribution import all_reduce
from tfgpipe.distribution.all_reduce import Gradient

# Their updates of an entry read that entry alone, of weight, gradient and slots.
_BY_ELEMENT = (
    *(keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW),
    *(keras.optimizers.RMSprop, keras.optimizers.Adagrad, keras.optimizers.Adadelta),
    *(keras.optimizers.Adamax, keras.optimizers.Nadam, keras.optimizers.Ftrl),
    keras.optimizers.Lion,
)
# Smaller weights go whole to one replica: to send them takes as long as to start to.
MIN_BYTES = 2**16


class Cut(NamedTuple):
    """The cut of a weight into slices.

    Attributes:
        axis: The axis.
        sizes: The length of each replica's slice along the axis.
    """

    axis: int
    sizes: tuple[int, ...]


def find_cut(weight: keras.Variable, num_replicas: int) -> Cut | None:
    """Returns the cut of a weight into a slice for each replica, None to keep it whole.

    Slices are equally long along an axis, the first of those that D divides, or differ
    by one along the longest axis.

    Args:
        weight: The weight, initialized or not.
        num_replicas: D, the number of slices.
    """
    D, shape = num_replicas, tuple(weight.shape)
    is_small = num_bytes(weight) < max(MIN_BYTES, D) or max(shape) < D
    # A constraint may look at the whole.
    if D == 1 or is_small or weight.constraint is not None:
        return None
    equal = [axis for axis, n in enumerate(shape) if n % D == 0]
    axis = equal[0] if equal else shape.index(max(shape))
    n = shape[axis]
    return Cut(axis, tuple(n * (d + 1) // D - n * d // D for d in range(D)))


def check_by_element(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ValueError for an optimizer whose update may look at whole weights."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # One that only scales the learning rate of another names that.
    rule = getattr(inner, "rule", type(inner))
    if any(rule.update_step is known.update_step for known in _BY_ELEMENT):
        return
    raise ValueError(
        'With shard_replicas="weights" the slices of a weight are updated one by one, '
        "which is the same for optimizers that work by element. Received "
        f"{type(inner).__name__}, which has an `update_step` of its own. Use an "
        'optimizer such as Adam, or shard_replicas="whole_weights", by which each '
        "weight is on one replica."
    )


@contextlib.contextmanager
def slice_scope(devices: Sequence[str], cut: Cut) -> Iterator[None]:
    """Variables created inside a strategy's scope are in slices on these devices.

    Those that are too short for the cut, such as scalars, are on the first of them.

    Args:
        devices: One for each slice.
        cut: The cut.
    """
    places = [tf_internals.colocation((device,)) for device in devices]

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        initial = kwargs.pop("initial_value")
        value = tf.convert_to_tensor(
            initial() if callable(initial) else initial, kwargs.get("dtype")
        )
        axis, sizes = cut
        fits = value.shape.rank > axis and value.shape[axis] == sum(sizes)
        slices = tf.split(value, sizes, axis) if fits else [value]
        kwargs.pop("shape", None)
        variables = [
            next_creator(
                **{**kwargs, "initial_value": each, "colocate_with": places[d]}
            )
            for d, each in enumerate(slices)
        ]
        return (
            sliced_variables.SlicedVariable(variables, axis) if fits else variables[0]
        )

    with tf.variable_creator_scope(create):
        yield


def reduce_scatter(
    gradients: Sequence[Gradient], weight: sliced_variables.SlicedVariable
) -> list[Gradient]:
    """Returns the sum of gradients in slices, each on the device of a weight's slice.

    Args:
        gradients: One of each replica, of the whole weight.
        weight: The weight.
    """
    parts = []
    for gradient, home in zip(gradients, weight.slices, strict=True):
        with tf.device(home.device):
            dense = tf.convert_to_tensor(gradient)
            parts.append(tf.split(dense, weight.sizes, weight.axis))
    return [
        all_reduce.reduce_to([each[d] for each in parts], home.device)
        for d, home in enumerate(weight.slices)
    ]
