"""Quantizers and configurations of tensorflow-model-optimization (tfmot).

That library is written for Keras 2, `tf_keras`: its quantizers make variables with
`add_weight` of a layer, and assign them. Here they get an adapter of the layer, and for
each variable a tensor that assigns to it, so that they run unchanged in a Keras 3
layer, in a pipeline and under recomputation.

This is the only module that imports that library or `tf_keras`, and does so when it is
asked to, since importing them has side effects: see `library`.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from tfgpipe.quantization.config import QuantizeConfig
from tfgpipe.quantization.fake_quant import (
    ExternalQuantizer,
    FakeQuantNode,
    Observer,
    QuantContext,
)

_LEGACY = "TF_USE_LEGACY_KERAS"
_NAME = "tensorflow_model_optimization"
# Configurations around another one, which `tf_keras` would deserialize by itself.
_OF_ANOTHER = frozenset({"FixedQuantizeConfig", "OutputOnlyConfig"})


@functools.cache
def library() -> Any:
    """Returns `tensorflow_model_optimization.quantization.keras`, imported.

    Importing it asks TensorFlow to use Keras 2 from then on, in this process
    and in those it starts, unless TensorFlow knows its Keras already. So it is asked
    first, and the request is taken back.
    """
    before = os.environ.get(_LEGACY)
    _ = tf.keras.layers  # Looked up once, and then it stays.
    try:
        module = importlib.import_module(_NAME)
    finally:
        if before is None:
            os.environ.pop(_LEGACY, None)
        else:
            os.environ[_LEGACY] = before
    return module.quantization.keras


def from_tfmot(config_or_quantizer: Any) -> Any:
    """Returns a configuration or quantizer of tfmot's as one to use here.

    Layers that it quantizes need `range_update="per_call"`: such quantizers update
    their ranges themselves, in each call.

    Example:

    >>> from tfgpipe.quantization import tfmot
    >>> quantizer = tfmot.library().quantizers.LastValueQuantizer(
    ...     num_bits=4, per_axis=False, symmetric=True, narrow_range=True
    ... )
    >>> layer = tfgpipe.quantization.QuantizeWrapper(
    ...     keras.layers.Dense(3),
    ...     tfgpipe.quantization.QuantizeConfig(
    ...         weights={"kernel": tfgpipe.quantization.from_tfmot(quantizer)}
    ...     ),
    ...     range_update="per_call",
    ... )
    >>> layer(np.ones((2, 5), "float32")).shape
    TensorShape([2, 3])

    Args:
        config_or_quantizer: A `tfmot.quantization.keras.QuantizeConfig`, which gives a
            `QuantizeConfig`, or a `tfmot.quantization.keras.quantizers.Quantizer`,
            which gives an observer.

    Raises:
        TypeError: If it is neither.
    """
    if isinstance(config_or_quantizer, library().QuantizeConfig):
        return TfmotConfig(config_or_quantizer)
    if isinstance(config_or_quantizer, library().quantizers.Quantizer):
        return TfmotQuantizer(config_or_quantizer)
    raise TypeError(
        "`from_tfmot` takes a `QuantizeConfig` or a `Quantizer` of "
        f"tensorflow-model-optimization. Received {config_or_quantizer!r} of type "
        f"{type(config_or_quantizer).__name__}."
    )


@keras.saving.register_keras_serializable(package="tfgpipe")
class TfmotQuantizer(ExternalQuantizer):
    """A quantizer of tfmot's as an observer.

    Args:
        quantizer: The quantizer.
    """

    def __init__(self, quantizer: Any) -> None:
        self.quantizer = quantizer

    def make_node(
        self, layer: keras.layers.Layer, name: str, shape: Any
    ) -> FakeQuantNode:
        """Creates a node."""
        shape = None if shape is None else tf.TensorShape(shape)
        variables = self.quantizer.build(shape, name, _LayerAdapter(layer))
        return _TfmotNode(self.quantizer, variables or {})

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"quantizer": _serialized(self.quantizer)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TfmotQuantizer:
        """Creates an observer from what `get_config` returned."""
        return cls(_deserialized(config["quantizer"], library().quantizers.Quantizer))


@keras.saving.register_keras_serializable(package="tfgpipe")
class TfmotConfig(QuantizeConfig):
    """A configuration of tfmot's.

    Args:
        config: The configuration.
    """

    tfmot_config: Any

    def __init__(self, config: Any) -> None:
        super().__init__()
        object.__setattr__(self, "tfmot_config", config)  # It is frozen.

    def weights_only(self) -> QuantizeConfig:
        """Returns the same: it says itself what is quantized."""
        return self

    def without_output(self) -> QuantizeConfig:
        """Returns the same: it says itself what is quantized."""
        return self

    def weight_observers(
        self, layer: keras.layers.Layer
    ) -> list[tuple[keras.Variable, Observer]]:
        """Returns the weights that it names, with its quantizers."""
        pairs = self.tfmot_config.get_weights_and_quantizers(layer)
        return [(weight, TfmotQuantizer(quantizer)) for weight, quantizer in pairs]

    def activation_observers(self, layer: keras.layers.Layer) -> dict[str, Observer]:
        """Returns the attributes that hold its activations, with its quantizers."""
        pairs = self.tfmot_config.get_activations_and_quantizers(layer)
        names = _attributes(layer, [activation for activation, _ in pairs])
        quantizers = [TfmotQuantizer(quantizer) for _, quantizer in pairs]
        return dict(zip(names, quantizers, strict=True))

    def output_observer(self, layer: keras.layers.Layer) -> Observer | None:
        """Returns its quantizer of the output, if it has one."""
        quantizers = self.tfmot_config.get_output_quantizers(layer)
        return TfmotQuantizer(quantizers[0]) if quantizers else None

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"config": _serialized(self.tfmot_config)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TfmotConfig:
        """Creates a configuration from what `get_config` returned."""
        return cls(_deserialized(config["config"], library().QuantizeConfig))


class _LayerAdapter:
    """Offers a quantizer the `add_weight` of Keras 2."""

    def __init__(self, layer: keras.layers.Layer) -> None:
        self._layer = layer

    def add_weight(
        self,
        name: str,
        shape: Any = None,
        dtype: Any = None,
        initializer: Any = "zeros",
        trainable: bool = False,
        **_: Any,
    ) -> keras.Variable:
        """Adds a variable to the layer."""
        sizes = () if shape is None else tuple(tf.TensorShape(shape).as_list())

        def initial(shape: Any, dtype: Any) -> tf.Tensor:
            if isinstance(initializer, str):
                return keras.initializers.get(initializer)(shape, dtype)
            return initializer(shape, tf.as_dtype(dtype))

        return self._layer.add_weight(
            name=name,
            shape=sizes,
            dtype=keras.backend.standardize_dtype(dtype or "float32"),
            initializer=initial,
            trainable=trainable,
            autocast=False,
        )


class _TfmotNode(FakeQuantNode):
    """A node of a quantizer of tfmot's."""

    def __init__(self, quantizer: Any, variables: dict[str, keras.Variable]) -> None:
        self.variables = tuple(variables.values())
        self._quantizer = quantizer
        self._variables = variables

    def fake_quantize(self, x: tf.Tensor, context: QuantContext) -> tf.Tensor:
        """Returns the tensor rounded, in its own type."""
        references = {n: _reference(v) for n, v in self._variables.items()}
        result = self._quantizer(
            tf.cast(x, tf.float32), context.updates_ranges, weights=references
        )
        return context.delayed(tf.cast(result, x.dtype), x)


def _reference(variable: keras.Variable) -> tf.Tensor:
    """Returns the value of a variable, with the variable's methods to assign it."""
    value = tf.stop_gradient(tf.identity(variable.value))

    def assign(new: tf.Tensor, **_: Any) -> tf.Tensor:
        new = tf.stop_gradient(tf.cast(new, value.dtype))
        variable.assign(new)
        return new

    value.assign = assign
    value.assign_add = lambda delta, **_: assign(value + delta)
    value.assign_sub = lambda delta, **_: assign(value - delta)
    return value


def _attributes(layer: keras.layers.Layer, activations: Sequence[Any]) -> list[str]:
    """Returns the names of the attributes that hold activations of a layer.

    Raises:
        ValueError: If one is held by none.
    """
    names: list[str] = []
    for activation in activations:
        attributes = [
            name for name, value in vars(layer).items() if value is activation
        ]
        name = next((name for name in attributes if name not in names), None)
        if name is None:
            raise ValueError(
                "A configuration of tfmot's quantizes activations that attributes of "
                f"the layer hold. Received {activation!r} for layer '{layer.name}' of "
                f"type {type(layer).__name__}, which has no such attribute. Name the "
                "path of attributes with `tfgpipe.quantization.QuantizeConfig("
                "activations=[path])`."
            )
        names.append(name)
    return names


def _serialized(thing: Any) -> dict[str, Any]:
    kind = type(thing)
    return {
        "module": kind.__module__,
        "class_name": kind.__name__,
        "config": thing.get_config(),
    }


def _deserialized(config: Any, base: Any) -> Any:
    """Creates a quantizer or a configuration from what a file says.

    A file is not trusted: a class is looked up among those of tfmot's that are loaded,
    or that are registered with Keras, and no module is imported. Only then does its
    `from_config` run.

    Raises:
        ValueError: If it is of another class.
    """
    config = config if isinstance(config, dict) else {}
    module, name = config.get("module"), config.get("class_name")
    kind = None
    if isinstance(name, str):
        registered = keras.saving.get_registered_object(name)
        kind = registered or _library_class(module, name, base)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ValueError(
            "A saved quantizer of tensorflow-model-optimization is of a subclass of "
            f"its `{base.__name__}`. Received {name!r} of module {module!r}. If the "
            "class is your own, load the model in "
            f"`with keras.saving.custom_object_scope({{{name!r}: ...}}):`."
        )
    return cast(Any, kind).from_config(config.get("config", {}))


def _library_class(module: Any, name: str, base: Any) -> Any:
    """Returns a class of tfmot's that a file may name, or None."""
    subclasses = list(base.__subclasses__())
    for kind in subclasses:  # It grows as it is read.
        subclasses += kind.__subclasses__()
        found = (kind.__module__, kind.__name__) == (module, name)
        if found and module.partition(".")[0] == _NAME and name not in _OF_ANOTHER:
            return kind
    return None
