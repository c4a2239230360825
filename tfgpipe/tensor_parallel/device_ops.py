"""Device-local operations: on one device, forward and backward.

TensorFlow runs the backward operations of a tape on no device in particular, whatever
device the forward ones were on. Here everything is one primitive: `on` copies tensors
to a device and computes there, and its gradient copies gradients there and computes
there as well. What crosses from device to device is always an `Identity` under the
device that it goes to, an operation of its own, so that it moves while others multiply.

A tensor that several devices read is copied where it is, so that its gradients are
summed there too, rather than wherever a tape would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe._compat import custom_gradients
from tfgpipe.capture import is_differentiable


def on(device: str, function: Callable[..., Any], *tensors: tf.Tensor) -> Any:
    """Returns a function of tensors, computed on a device.

    Each call is one `tf.custom_gradient` all of whose arguments are on one device: in a
    graph TensorFlow passes arguments and results through one operation together, which
    for arguments of several devices would bring them all to one.

    Args:
        device: The device of the function and of its gradient.
        function: Returns a tensor, or a list of tensors, of the tensors alone. What is
            differentiable comes of arguments that are.
        *tensors: Its arguments, on any device.
    """
    with tf.device(device):
        tensors = tuple(map(tf.identity, tensors))
        if not any(map(is_differentiable, tensors)):
            return function(*tensors)
        return _with_gradient_on(device, function)(*tensors)


def on_each(
    devices: Sequence[str], function: Callable[..., Any], *tensors: Sequence[tf.Tensor]
) -> list[Any]:
    """Returns a function of the tensors of each device, computed there, as by `on`."""
    return [
        on(device, function, *each)
        for device, *each in zip(devices, *tensors, strict=True)
    ]


def copy(x: tf.Tensor, device: str, num: int) -> list[tf.Tensor]:
    """Returns copies of a tensor on its device, whose gradients are summed there.

    Without that the tape of whoever trains would sum them on any device.
    """
    if num == 1 or not is_differentiable(x):
        return [x] * num
    return on(device, lambda x: [tf.identity(x) for _ in range(num)], x)


def split(
    x: tf.Tensor, device: str, sizes: Sequence[int], axis: int = -1
) -> list[tf.Tensor]:
    """Returns the parts of a tensor, on its device."""
    if len(sizes) == 1:
        return [x]
    return on(device, lambda x: tf.split(x, sizes, axis), x)


def gather(parts: Sequence[tf.Tensor], device: str, axis: int = -1) -> tf.Tensor:
    """Returns tensors concatenated, on a device."""
    return on(device, lambda *parts: tf.concat(parts, axis), *parts)


def reduce(parts: Sequence[tf.Tensor], device: str) -> tf.Tensor:
    """Returns the sum of tensors, on a device."""
    return on(device, lambda *parts: tf.add_n(parts), *parts)


def part_sizes(total: int, num: int) -> list[int]:
    """Returns the sizes of parts that differ by one at most.

    >>> part_sizes(10, 4)
    [3, 3, 2, 2]
    """
    return [total // num + (t < total % num) for t in range(num)]


def _with_gradient_on(device: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @custom_gradients.custom_gradient
    def run(*tensors: tf.Tensor) -> tuple[Any, Callable[..., Any]]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(list(filter(is_differentiable, tensors)))
            results = function(*tensors)

        def gradient(*upstream: Any) -> Any:
            with tf.device(device):
                received = [tf.identity(tf.convert_to_tensor(x)) for x in upstream]
                return tape.gradient(results, tensors, received)

        return results, gradient

    return run
