"""Layers that quantize: one around another layer, and one alone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import check_choice
from tfgpipe.capture import dtype_policies, source_model
from tfgpipe.quantization import activations, substitution
from tfgpipe.quantization.activations import QuantizedActivation
from tfgpipe.quantization.config import INPUTS, QuantizeConfig
from tfgpipe.quantization.points import (
    RANGE_UPDATES,
    Guest,
    Observation,
    Observer,
    Point,
    RangePoint,
    RangeUpdate,
    Timing,
    point,
)
from tfgpipe.quantization.shell import Shell


@keras.saving.register_keras_serializable(package="tfgpipe")
class QuantizeWrapper(Shell):
    """Runs a layer on quantized weights, and quantizes what it computes.

    It is called, masked, cast, built and saved like the layer, and its variables are
    those of the layer and the ranges.

    Args:
        layer: Any layer.
        config: What of it is quantized, and how.
        range_update: When ranges move: `"per_step"` for once a step, by all that was
            seen in it, so that a pipeline computes the same as the layer alone; or
            `"per_call"` for with each call, before it quantizes, the order of
            tensorflow-model-optimization.
        delay: After how many steps of training quantizing starts. Until then ranges
            are only observed: they should fit before anything is rounded to them.
        freeze_after: After how many steps ranges stay as they are, so that the last
            steps train the very numbers that are deployed. None for never.
        **kwargs: Of the base layer. `name` defaults to `quant_` and the layer's.

    Attributes:
        num_updates: The variable that counts how often the ranges have moved.
        ranges: The variables of the ranges, the low end of each before the high one.

    Input shape:
        As the layer's.

    Output shape:
        As the layer's.

    Example:

    >>> config = tfgpipe.quantization.QuantizeConfig(weights=["kernel"], output=True)
    >>> layer = keras.layers.Dense(4, name="dense")
    >>> quantized = tfgpipe.quantization.QuantizeWrapper(layer, config)
    >>> _ = quantized(np.ones((2, 3), "float32"), training=True)
    >>> quantized.name, int(quantized.num_updates)
    ('quant_dense', 1)
    >>> [variable.name for variable in quantized.non_trainable_variables]
    ['num_updates', 'kernel_min', 'kernel_max', 'output_min', 'output_max']

    Raises:
        TypeError: If it is no layer, or `config` is no configuration.
        ValueError: If the layer is quantized already, or an argument is out of bounds.
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        config: QuantizeConfig,
        *,
        range_update: RangeUpdate = "per_step",
        delay: int = 0,
        freeze_after: int | None = None,
        **kwargs: Any,
    ) -> None:
        _check(layer, config)
        kwargs.setdefault("name", f"quant_{layer.name}")
        super().__init__(layer, **kwargs)
        self.config = config
        self.timing = _timing(range_update, delay, freeze_after)
        self._places = _Places()
        self.ranges: tuple[keras.Variable, ...] = ()

    def build(self, input_shape: Any = None) -> None:
        """Makes the ranges, and first the layer's weights if it has none."""
        super().build(input_shape)
        layer, config = self.layer, self.config
        self.num_updates = _count(self)
        named = _Names()
        for variable, observer in config.weight_observers(layer):
            name, shape = variable.name, variable.shape
            made = self._point(named, observer, name, shape, of_weights=True)
            self._places.weights.append((variable, made))
        for path, observer in config.activation_observers(layer).items():
            function = substitution.attribute(layer, path)
            make = functools.partial(self._point, named, observer)
            self._places.activations[path] = activations.around(function, make)
        output = config.output_observer(layer)
        if output is not None:
            self._places.output = self._point(named, output, "output")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Applies the layer on quantized weights, and quantizes what it computes."""
        moves = bool(kwargs.get("training")) and self.trainable
        with keras_internals.without_autocast():
            observation = Observation(
                self.num_updates, self.timing, moves=moves, given=(args, kwargs)
            )
            weights = [
                (v, at.quantized(tf.convert_to_tensor(v.value), observation))
                for v, at in self._places.weights
            ]
        functions = {
            path: functools.partial(activation, observation=observation)
            for path, activation in self._places.activations.items()
        }
        with (
            substitution.weights(self, weights),
            substitution.activations(self.layer, functions),
        ):
            outputs = super().run(*args, **kwargs)
        output = self._places.output
        if output is not None:
            quantize = functools.partial(_at, output, observation=observation)
            outputs = keras.tree.map_structure(quantize, outputs)
        observation.commit()
        return outputs

    def set_weight_ranges(self) -> None:
        """Sets the ranges of weights by their values, as the next step will."""
        for variable, at in self._places.weights:
            if isinstance(at, RangePoint):
                at.set(tf.convert_to_tensor(variable.value))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again."""
        return {
            **super().get_config(),
            "config": keras.saving.serialize_keras_object(self.config),
            **self.timing.get_config(),
        }

    def _point(
        self,
        named: _Names,
        observer: Observer,
        name: str,
        shape: Any = None,
        **kwargs: Any,
    ) -> Point:
        if isinstance(observer, Guest) and self.timing.range_update == "per_step":
            raise ValueError(
                "A quantizer of tfmot's moves its range itself, with each call. "
                f"Received one for '{name}' of layer '{self.layer.name}' with "
                'range_update="per_step". Use range_update="per_call", or an observer '
                "of `tfgpipe.quantization`, which can wait for the end of the step."
            )
        made = point(self, named(name), observer, shape, **kwargs)
        # In a tuple TensorFlow's checkpoints find them.
        self.ranges = (*self.ranges, *made.variables)
        return made


@keras.saving.register_keras_serializable(package="tfgpipe")
class FakeQuantize(keras.layers.Layer):
    """Quantizes what it is given: floating-point tensors, others it passes on.

    Put before the first layer it makes a model take integers once it is exported.

    Args:
        observer: What finds the range. Defaults to that of all that was ever seen.
        range_update: As of `QuantizeWrapper`.
        delay: Likewise.
        freeze_after: Likewise.
        **kwargs: Of the base layer.

    Input shape:
        Any, in any structure; tensors of one structure share the range.

    Output shape:
        The same.

    Example:

    >>> pixels = tfgpipe.quantization.FixedRange(initial=(0.0, 255.0))
    >>> layer = tfgpipe.quantization.FakeQuantize(pixels)
    >>> layer(np.array([3.2, 300.0], "float32")).numpy()
    array([  3., 255.], dtype=float32)

    Raises:
        ValueError: If an argument is out of bounds.
    """

    def __init__(
        self,
        observer: Observer | None = None,
        *,
        range_update: RangeUpdate = "per_step",
        delay: int = 0,
        freeze_after: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.observer = INPUTS if observer is None else observer
        self.timing = _timing(range_update, delay, freeze_after)
        self.supports_masking = True

    def build(self, input_shape: Any) -> None:
        """Makes the range."""
        self.num_updates = _count(self)
        shapes = keras.tree.map_shape_structure(tuple, input_shape)
        shape = shapes if isinstance(shapes, tuple) else None
        self._point = point(self, "input", self.observer, shape)
        self.ranges = self._point.variables

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Returns the inputs quantized."""
        moves = bool(training) and self.trainable
        with keras_internals.without_autocast():
            observation = Observation(
                self.num_updates, self.timing, moves=moves, given=inputs
            )
            quantize = functools.partial(_at, self._point, observation=observation)
            outputs = keras.tree.map_structure(quantize, inputs)
            observation.commit()
        return outputs

    def compute_output_spec(self, inputs: Any, **_: Any) -> Any:
        """Infers the outputs' shapes and dtypes: those of the inputs."""
        return source_model.symbolic(inputs)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again."""
        return {
            **super().get_config(),
            "observer": keras.saving.serialize_keras_object(self.observer),
            **self.timing.get_config(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FakeQuantize:
        """Makes a layer from what `get_config` returned."""
        observer = keras.saving.deserialize_keras_object(config["observer"])
        return cls(**{**config, "observer": observer})


QUANTIZING = (QuantizeWrapper, FakeQuantize)


@dataclasses.dataclass
class _Places:
    """The points of a layer, where Keras does not look for variables.

    In a list or tuple of the wrapper's it would take the layer's weights for the
    wrapper's own.

    Attributes:
        weights: Variables of the layer, each with its point.
        activations: By path of attributes, activation functions between points.
        output: The point of the outputs, or None.
    """

    weights: list[tuple[keras.Variable, Point]] = dataclasses.field(
        default_factory=list
    )
    activations: dict[str, QuantizedActivation] = dataclasses.field(
        default_factory=dict
    )
    output: Point | None = None


def check_unquantized(layer: keras.layers.Layer) -> None:
    """Raises ValueError if a layer quantizes already, by us or by Keras."""
    for inner in keras_internals.inner_layers(layer):
        if isinstance(inner, QUANTIZING):
            raise ValueError(
                f"A layer is quantized once. Received '{inner.name}' of type "
                f"{type(inner).__name__}, which quantizes already. Quantize what there "
                "was before."
            )
    dtype_policies.check_unquantized(
        layer,
        purpose="while they are trained for 8 bits",
        remedy="Quantize it as it was before `quantize`.",
    )


def _check(layer: Any, config: Any) -> None:
    if not isinstance(layer, keras.layers.Layer):
        raise TypeError(
            f"What is quantized is a Keras layer. Received {layer!r} of type "
            f"{type(layer).__name__}."
        )
    if not isinstance(config, QuantizeConfig):
        raise TypeError(
            "A layer is quantized by a `tfgpipe.quantization.QuantizeConfig`. Received "
            f"{config!r} of type {type(config).__name__} for layer '{layer.name}'. "
            "`tfgpipe.quantization.from_tfmot(config)` makes one of tfmot's."
        )
    check_unquantized(layer)


def _timing(range_update: RangeUpdate, delay: int, freeze_after: int | None) -> Timing:
    check_choice("range_update", range_update, RANGE_UPDATES)
    if delay < 0 or (freeze_after is not None and freeze_after < 1):
        raise ValueError(
            "Quantizing starts after `delay` steps, and ranges stay after "
            f"`freeze_after`, which are counted from 1. Received delay={delay}, "
            f"freeze_after={freeze_after}. Use 0 and None for neither."
        )
    return Timing(range_update=range_update, delay=delay, freeze_after=freeze_after)


def _count(owner: keras.layers.Layer) -> keras.Variable:
    return owner.add_weight(
        name="num_updates",
        shape=(),
        initializer="zeros",
        dtype="int32",
        trainable=False,
        autocast=False,
    )


def _at(at: Point, x: Any, *, observation: Observation) -> Any:
    """Returns a tensor quantized at a point, with its mask."""
    if not keras.ops.is_tensor(x):
        return x
    quantized = at.quantized(x, observation)
    keras_internals.set_mask(quantized, keras_internals.get_mask(x))
    return quantized


class _Names:
    """Names that occur once: `kernel`, then `kernel_1`."""

    def __init__(self) -> None:
        self._numbers: dict[str, itertools.count[int]] = {}

    def __call__(self, name: str) -> str:
        number = next(self._numbers.setdefault(name, itertools.count()))
        return f"{name}_{number}" if number else name
