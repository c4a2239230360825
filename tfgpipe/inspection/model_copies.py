"""Compiled copies of a model, for steps that leave it as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import argument_checks
from tfgpipe.devices import sharding
from tfgpipe.pipelined_model import PipelinedModel


def compiled_copies(
    model: keras.Model | Callable[[], keras.Model],
) -> Callable[[], keras.Model]:
    """Returns a function that returns compiled copies of a model, without metrics.

    Weights of a copy are new ones.

    Args:
        model: A compiled model, or a pipeline of one; or a function that returns one.

    Raises:
        TypeError: If it is neither, or not compiled.
    """
    if not isinstance(model, keras.Model):
        argument_checks.check_instance(
            "model",
            model,
            Callable,  # type: ignore[arg-type]
            hint=" Give a compiled Keras model, or a function that returns one.",
        )
        return model
    if not model.compiled or model.optimizer is None:
        raise TypeError(
            "Steps are trained with the optimizer and the loss of a model. Received "
            f"'{model.name}', which is not compiled. Call `compile` first."
        )

    def copy() -> keras.Model:
        plain = model.unpipelined() if isinstance(model, PipelinedModel) else model
        optimizer = model.optimizer
        arguments: Mapping[str, Any] = {
            **keras_internals.compiled.compile_arguments(model),
            "optimizer": type(optimizer).from_config(optimizer.get_config()),
            # They have state, and take little time.
            "metrics": None,
            "weighted_metrics": None,
        }
        with tf.device("CPU:0"), _uncompiled(plain):
            copied = keras.models.clone_model(plain)
        copied.compile(**arguments)
        return copied

    return copy


@contextlib.contextmanager
def _uncompiled(model: keras.Model) -> Iterator[None]:
    """Lets Keras clone a model whose loss is a function that cannot be saved."""
    compiled, model.compiled = model.compiled, False
    try:
        yield
    finally:
        model.compiled = compiled


def unsharded(model: keras.Model) -> keras.Model:
    """Returns a compiled model whose sharded layers have one shard each.

    That is the model itself, or a copy with weights of its own.

    Raises:
        ValueError: If a layer with sharded layers inside cannot be made anew.
    """
    if sharding.num_shards([model]) == 1:
        return model
    arguments = keras_internals.compiled.compile_arguments(model)

    def clone(layer: keras.layers.Layer) -> keras.layers.Layer:
        return type(layer).from_config(_with_one_shard(layer.get_config()))

    with _uncompiled(model):
        copied = keras.models.clone_model(model, clone_function=clone, recursive=True)
    copied.compile(**arguments)
    return copied


def _with_one_shard(config: Any) -> Any:
    """Returns the arguments of a layer with one shard in place of several."""
    if isinstance(config, list | tuple):
        return type(config)(map(_with_one_shard, config))
    if not isinstance(config, Mapping):
        return config
    own = {name: _with_one_shard(value) for name, value in config.items()}
    if isinstance(own.get("num_shards"), int):
        own["num_shards"] = 1
        if "devices" in own:
            own["devices"] = None
    return own


def copy_state(source: keras.Model, target: keras.Model) -> None:
    """Gives a copy the weights, statistics and seeds of a model.

    Args:
        source: The model.
        target: The copy, whose layers may be in other numbers of shards.
    """
    for ours, theirs in zip(state(source), state(target), strict=True):
        theirs.assign(ours.full(), target.name)


def state(model: keras.Model) -> list[sharding.ShardedWeight]:
    """Returns the variables of a model's layers, as if it had no shards."""
    return sharding.full_variables(model, variables(model))


def values(variables: Iterable[keras.Variable]) -> list[tf.Tensor]:
    """Returns the values that variables have now."""
    return [tf.identity(x.value) for x in variables]


def variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of a model's layers, in the order of the layers."""
    of_metrics = {id(variable) for variable in model.metrics_variables}
    return [x for x in model.variables if id(x) not in of_metrics]
