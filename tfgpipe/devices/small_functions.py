"""Operations between the functions of stages: small functions of a device.

TensorFlow's build for TPUs has few kernels, so there XLA compiles them as well; on
other devices they are operations of the step itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe._compat import functions
from tfgpipe.devices.names import device_type, host_device


def run_on(device: str, function: Callable[..., Any], *args: Any) -> Any:
    """Returns the results of a function on a device: a tensor, or several in a list.

    Args:
        device: The device.
        function: The function, which is pure.
        *args: Tensors, lists of tensors, or hashable values that are constants.
    """
    with tf.device(device):
        if device_type(device) != "TPU":
            return function(*args)
        flat = [x for a in args for x in (a if isinstance(a, list) else [a])]
        tensors = [x for x in flat if isinstance(x, tf.Tensor)]
        leaves = tuple(_Argument.of(x) if isinstance(x, tf.Tensor) else x for x in flat)
        sizes = tuple(len(x) if isinstance(x, list) else None for x in args)
        # Of others nobody knows what they hold, and for how long.
        keeps = inspect.ismethod(function) or (
            inspect.isfunction(function) and not function.__closure__
        )
        make = _compiled if keeps else _compiled.__wrapped__
        run, is_list = make(function, leaves, sizes)
        results = run(*tensors)
        return results if is_list else results[0]


def call_on(device: str, function: Callable[..., Any], *args: Any) -> Any:
    """Returns the results of a function on a device, as `run_on` does.

    It is traced where it is called, so tapes record it, inside and around it.

    Args:
        device: The device.
        function: The function, which is pure.
        *args: Its arguments.
    """
    if device_type(device) == "TPU":
        function = functions.compiled(function)
    with tf.device(device):
        return function(*args)


@contextlib.contextmanager
def scalars_scope(device: str) -> Iterator[None]:
    """Operations on a few numbers inside are on the host if a device is a TPU.

    Elsewhere they are where TensorFlow puts them.
    """
    if device_type(device) != "TPU":
        yield
        return
    with tf.device(host_device(device)), tf.name_scope("stage_host_scalars"):
        yield


@dataclasses.dataclass(frozen=True)
class _Argument:
    """Shape and dtype of a tensor among the arguments."""

    spec: tf.TensorSpec

    @classmethod
    def of(cls, tensor: tf.Tensor) -> _Argument:
        return cls(tf.TensorSpec(tensor.shape, tensor.dtype))


@functools.lru_cache(maxsize=1024)
def _compiled(
    function: Callable[..., Any], leaves: Sequence[Any], sizes: Sequence[int | None]
) -> tuple[functions.GraphFunction, bool]:
    """Returns a function that XLA compiles, and whether it returns a list.

    Args:
        function: The function.
        leaves: Its arguments, flat: an `_Argument` in place of each tensor.
        sizes: For each argument its length if it is a list.
    """
    is_list = []

    def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
        given = iter(tensors)
        flat = iter(next(given) if isinstance(x, _Argument) else x for x in leaves)
        args = [
            next(flat) if size is None else [next(flat) for _ in range(size)]
            for size in sizes
        ]
        results = function(*args)
        is_list.append(isinstance(results, (list, tuple)))
        return list(results) if is_list[-1] else [results]

    specs = [x.spec for x in leaves if isinstance(x, _Argument)]
    name = f"between_{getattr(function, '__name__', 'stages').strip('_<>')}"
    traced = functions.trace_function(functions.compiled(run), specs, name=name)
    return functions.GraphFunction(name, traced), is_list[-1]
