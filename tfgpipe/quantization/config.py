"""What of a layer is quantized: configurations, and layers annotated with one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfgpipe._compat import keras_internals
from tfgpipe._util import unique
from tfgpipe.capture import source_model
from tfgpipe.quantization.fake_quant import Observer
from tfgpipe.quantization.ranges import (
    AllValuesRange,
    LastValueRange,
    MovingAverageRange,
)

# As TFLite has 8 bits: the zero point of a weight is 0, of an activation any integer.
WEIGHTS = LastValueRange(symmetric=True, narrow_range=True)
ACTIVATIONS = MovingAverageRange()
INPUTS = AllValuesRange()


@keras.saving.register_keras_serializable(package="tfgpipe")
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """The quantized tensors of a layer, and their observers.

    Attributes:
        weights: Observers by name of a variable, such as `"kernel"`, of the layer and
            all layers inside it. Or names alone, for 8 bits, symmetric.
        activations: Observers by attribute that holds an activation function, such as
            `"activation"` or `"hidden.activation"`, of its argument or its result. Or
            names alone, for 8 bits and a moving average.
        output: The observer of the layer's outputs. True for 8 bits and a moving
            average; None or False if they are not quantized.

    Example:

    >>> config = tfgpipe.quantization.QuantizeConfig(weights=["kernel"], output=True)
    >>> config.output.bits
    8

    Raises:
        TypeError: If something else is given as an observer.
    """

    weights: Mapping[str, Observer] = dataclasses.field(default_factory=dict)
    activations: Mapping[str, Observer] = dataclasses.field(default_factory=dict)
    output: Observer | None = None

    def __init__(
        self,
        *,
        weights: Mapping[str, Observer] | Sequence[str] = (),
        activations: Mapping[str, Observer] | Sequence[str] = (),
        output: Observer | bool | None = None,
    ) -> None:
        if isinstance(output, bool):
            output = ACTIVATIONS if output else None
        # It is frozen.
        weights = _observers("weights", weights, WEIGHTS)
        object.__setattr__(self, "weights", weights)
        activations = _observers("activations", activations, ACTIVATIONS)
        object.__setattr__(self, "activations", activations)
        object.__setattr__(self, "output", output)
        for observer in (*self.weights.values(), *self.activations.values(), output):
            if observer is not None and not isinstance(observer, Observer):
                raise TypeError(
                    "Tensors are quantized by observers. Received "
                    f"{observer!r} of type {type(observer).__name__}. Use one of "
                    "`tfgpipe.quantization`, such as `MovingAverageRange()`, or "
                    "`tfgpipe.quantization.from_tfmot(...)` of a quantizer of tfmot's."
                )

    def weight_observers(
        self, layer: keras.layers.Layer
    ) -> list[tuple[keras.Variable, Observer]]:
        """Returns the variables of a built layer to quantize, with their observers.

        Raises:
            ValueError: If there is no variable of a name.
        """
        inner = keras_internals.layers.inner_layers(layer)
        variables = unique(v for each in inner for v in each.variables)
        names = [v.name for v in variables]
        for name in self.weights:
            if name not in names:
                raise ValueError(
                    f"A weight to quantize is a variable of the layer. Received "
                    f"'{name}' for layer '{layer.name}' of type "
                    f"{type(layer).__name__}, whose variables are "
                    f"{', '.join(names) or 'none'}."
                )
        return [(v, self.weights[v.name]) for v in variables if v.name in self.weights]

    def activation_observers(self, layer: keras.layers.Layer) -> dict[str, Observer]:
        """Returns the observers of activations, by path of attributes."""
        del layer
        return dict(self.activations)

    def output_observer(self, layer: keras.layers.Layer) -> Observer | None:
        """Returns the observer of the outputs, if they are quantized."""
        del layer
        return self.output

    def weights_only(self) -> QuantizeConfig:
        """Returns the configuration of a layer that is fused with the next one."""
        return QuantizeConfig(weights=self.weights)

    def without_output(self) -> QuantizeConfig:
        """Returns the configuration of a layer whose outputs the next one quantizes."""
        return dataclasses.replace(self, output=None)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return keras.saving.serialize_keras_object(dict(vars(self)))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizeConfig:
        """Creates a configuration from what `get_config` returned."""
        return cls(**keras.saving.deserialize_keras_object(config))


def _observers(
    argument: str, value: Mapping[str, Observer] | Sequence[str], default: Observer
) -> dict[str, Observer]:
    if isinstance(value, str):
        raise TypeError(
            f"`{argument}` is a list of names, or a dictionary of observers by name. "
            f"Received {value!r}. Use [{value!r}]."
        )
    if isinstance(value, Mapping):
        return dict(value)
    return dict.fromkeys(value, default)


# Of a layer that stays as it is.
NOTHING = QuantizeConfig()


class LayerWrapper(keras.layers.Wrapper):
    """A layer around another that is called, masked, cast and built like it.

    Args:
        layer: The layer.
        config: Its quantized tensors and their observers.
        **kwargs: Arguments of the base layer.
    """

    def __init__(
        self, layer: keras.layers.Layer, config: QuantizeConfig | None, **kwargs: Any
    ) -> None:
        kwargs.setdefault("dtype", layer.dtype_policy)
        # The layer casts for itself.
        super().__init__(layer, autocast=False, **kwargs)
        keras_internals.layers.take_call_arguments_of(self, layer)
        self.config = config
        # The layer puts the right masks on its outputs.
        self.supports_masking = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Applies the layer, building it first if need be."""
        if not self.layer.built:
            args_like, kwargs_like = source_model.to_symbolic((args, kwargs))
            self.layer(*args_like, **self._inner_arguments(**kwargs_like))
        return super().__call__(*args, **kwargs)

    def call(self, *args: Any, training: bool | None = None, **kwargs: Any) -> Any:
        """Applies the layer; arguments as of its own `call`, and `training`."""
        return self.layer(*args, **self._inner_arguments(training=training, **kwargs))

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """Infers the outputs' shapes and dtypes: those of the layer."""
        return self.layer.compute_output_spec(*args, **self._inner_arguments(**kwargs))

    def compute_output_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Infers the outputs' shapes: those of the layer."""
        return self.layer.compute_output_shape(*args, **kwargs)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Returns None: the layer has put the right masks on its outputs."""

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        config = keras.saving.serialize_keras_object(self.config)
        return {**super().get_config(), "config": config}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> LayerWrapper:
        """Creates a layer from what `get_config` returned."""
        deserialized = {
            key: keras.saving.deserialize_keras_object(
                config[key], custom_objects=custom_objects
            )
            for key in ("layer", "config")
        }
        return cls(**{**config, **deserialized})

    def _inner_arguments(self, **kwargs: Any) -> dict[str, Any]:
        """Returns keyword arguments as the layer takes them."""
        if "training" not in self.layer.call_signature_parameters:
            kwargs.pop("training", None)
        return kwargs


@keras.saving.register_keras_serializable(package="tfgpipe", name="Annotated")
class QuantizeAnnotation(LayerWrapper):
    """A layer with the configuration that `apply` is to use. See `annotate`."""

    def __init__(
        self, layer: keras.layers.Layer, config: QuantizeConfig | None, **kwargs: Any
    ) -> None:
        kwargs.setdefault("name", f"annotated_{layer.name}")
        super().__init__(layer, config, **kwargs)


def annotate(
    layer: keras.layers.Layer, config: QuantizeConfig | None = None
) -> keras.layers.Layer:
    """Returns a layer with a configuration for `apply`.

    It computes as the layer does.

    Example:

    >>> output = keras.layers.Dense(10)
    >>> layers = [
    ...     keras.layers.Dense(16),
    ...     tfgpipe.quantization.annotate(
    ...         output, tfgpipe.quantization.QuantizeConfig()
    ...     ),
    ... ]
    >>> quantized = tfgpipe.quantization.apply(layers)  # All but the last.
    >>> [layer.name.partition("_")[0] for layer in quantized]
    ['fake', 'quant', 'dense']

    Args:
        layer: Any layer.
        config: Its quantized tensors and their observers; an empty one for none. None
            for that of the scheme.

    Raises:
        TypeError: If it is no layer, or `config` is no configuration.
        ValueError: If it is annotated already.
    """
    if not isinstance(layer, keras.layers.Layer) or isinstance(layer, keras.Model):
        raise TypeError(
            "What is annotated is a layer. Received "
            f"{layer!r} of type {type(layer).__name__}. `apply` takes models as they "
            "are."
        )
    if not isinstance(config, QuantizeConfig | None):
        raise TypeError(
            "A layer is annotated with a `tfgpipe.quantization.QuantizeConfig`. "
            f"Received {config!r} of type {type(config).__name__} for layer "
            f"'{layer.name}'."
        )
    if isinstance(layer, QuantizeAnnotation):
        raise ValueError(
            f"Layer '{layer.layer.name}' is annotated already. Received it with "
            f"{layer.config}. Annotate the layer itself."
        )
    return QuantizeAnnotation(layer, config)


def without_annotation(layer: Any) -> Any:
    """Returns the layer inside an annotation, or the layer itself."""
    return layer.layer if isinstance(layer, QuantizeAnnotation) else layer
