"""A layer around another that is called, masked, cast and built like it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras

from tfgpipe.capture import source_model


class Shell(keras.layers.Wrapper):
    """A layer around another that Keras and pipelines treat like it.

    Subclasses say what `run` does.

    Args:
        layer: The layer.
        **kwargs: Of the base layer.
    """

    def __init__(self, layer: keras.layers.Layer, **kwargs: Any) -> None:
        kwargs.setdefault("dtype", layer.dtype_policy)
        # Keras asks `call` what arguments it has, so each shell has one of its own.
        object.__setattr__(self, "call", _like(layer, self.run))
        # The layer casts for itself.
        super().__init__(layer, autocast=False, **kwargs)
        # The layer puts the right masks on its outputs.
        self.supports_masking = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Applies the layer, building it first if need be."""
        if not self.layer.built:
            args_like, kwargs_like = source_model.symbolic((args, kwargs))
            self.layer(*args_like, **self.inner_arguments(kwargs_like))
        return super().__call__(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Applies the layer; arguments as of its own `call`, and `training`."""
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Applies the layer."""
        return self.layer(*args, **self.inner_arguments(kwargs))

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """Infers the outputs' shapes and dtypes: those of the layer."""
        return self.layer.compute_output_spec(*args, **self.inner_arguments(kwargs))

    def compute_output_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Infers the outputs' shapes: those of the layer."""
        return self.layer.compute_output_shape(*args, **kwargs)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Returns None: the layer has put the right masks on its outputs."""

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Shell:
        """Makes a layer from what `get_config` returned, of a subclass."""
        deserialized = {
            key: keras.saving.deserialize_keras_object(
                config[key], custom_objects=custom_objects
            )
            for key in ("layer", "config")
        }
        return cls(**{**config, **deserialized})

    def inner_arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns arguments of `call` as the layer takes them."""
        if "training" in inspect.signature(self.layer.call).parameters:
            return kwargs
        return {name: x for name, x in kwargs.items() if name != "training"}


def _like(layer: keras.layers.Layer, call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with the signature of a layer's `call`, and `training`."""
    signature = inspect.signature(layer.call)
    parameters = dict(signature.parameters)
    if "training" not in parameters:
        named = inspect.Parameter(
            "training", inspect.Parameter.KEYWORD_ONLY, default=None
        )
        rest = [p for p in parameters.values() if p.kind is p.VAR_KEYWORD]
        parameters = {n: p for n, p in parameters.items() if p not in rest}
        parameters |= {p.name: p for p in (named, *rest)}

    def like(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    like.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
    return like
