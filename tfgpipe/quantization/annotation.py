"""Annotation: which configuration `apply` is to use for a layer."""

from __future__ import annotations

from typing import Any

import keras

from tfgpipe._compat import keras_internals
from tfgpipe.capture import source_model
from tfgpipe.quantization.config import QuantizeConfig


class LayerWrapper(keras.layers.Wrapper):
    """A layer around another that is called, masked, cast and built like it.

    Args:
        layer: The layer.
        config: What of it is quantized, and how.
        **kwargs: Of the base layer.
    """

    def __init__(
        self, layer: keras.layers.Layer, config: QuantizeConfig | None, **kwargs: Any
    ) -> None:
        kwargs.setdefault("dtype", layer.dtype_policy)
        # The layer casts for itself.
        super().__init__(layer, autocast=False, **kwargs)
        keras_internals.take_call_arguments_of(self, layer)
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
        config = self.config and keras.saving.serialize_keras_object(self.config)
        return {**super().get_config(), "config": config}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> LayerWrapper:
        """Makes a layer from what `get_config` returned."""
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

    Until then it does what it did.

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
        config: What of it is quantized, and how; an empty one for nothing. None for
            what the scheme says.

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
