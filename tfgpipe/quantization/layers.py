"""Keras layers that fake-quantize: around another layer, and alone."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe.capture import dtype_policies, source_model
from tfgpipe.quantization.activations import QuantizedActivation
from tfgpipe.quantization.config import INPUTS, LayerWrapper, QuantizeConfig
from tfgpipe.quantization.fake_quant import (
    FakeQuantNode,
    Observer,
    QuantContext,
    QuantSchedule,
    RangeUpdate,
    fake_quantize_all,
    make_node,
)


@keras.saving.register_keras_serializable(package="tfgpipe")
class QuantizeWrapper(LayerWrapper):
    """Runs a layer on fake-quantized weights, and fake-quantizes what it computes.

    It is called, masked, cast, built and saved like the layer, and its variables are
    those of the layer and the ranges.

    Args:
        layer: Any layer.
        config: Its quantized tensors and their observers.
        range_update: Update of ranges: `"per_step"` for once a step, by all
            observations in it, so that a pipeline computes the same as the layer alone;
            or `"per_call"` for in each call, before it quantizes, the order of
            tensorflow-model-optimization.
        delay: The number of training steps after which quantizing starts. Until then
            ranges are only observed: they should fit before anything is rounded to
            them.
        freeze_after: The number of steps after which ranges stay as they are, so that
            the last steps train the values that are deployed. None for never.
        **kwargs: Arguments of the base layer. `name` defaults to `quant_` and the
            layer's.

    Attributes:
        num_updates: The variable that counts the updates of the ranges.
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

    config: QuantizeConfig

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
        if not isinstance(layer, keras.layers.Layer):
            raise TypeError(
                f"What is quantized is a Keras layer. Received {layer!r} of type "
                f"{type(layer).__name__}."
            )
        if not isinstance(config, QuantizeConfig):
            raise TypeError(
                "A layer is quantized by a `tfgpipe.quantization.QuantizeConfig`. "
                f"Received {config!r} of type {type(config).__name__} for layer "
                f"'{layer.name}'. `tfgpipe.quantization.from_tfmot(config)` makes one "
                "of tfmot's."
            )
        check_unquantized(layer)
        kwargs.setdefault("name", f"quant_{layer.name}")
        super().__init__(layer, config, **kwargs)
        self.schedule = QuantSchedule(
            range_update=range_update, delay=delay, freeze_after=freeze_after
        )
        self._nodes = _Nodes()
        self.ranges: tuple[keras.Variable, ...] = ()

    def build(self, input_shape: Any = None) -> None:
        """Creates the ranges, and first the layer's weights if it has none."""
        super().build(input_shape)
        layer, config = self.layer, self.config
        self.num_updates = self.schedule.add_counter(self)
        counts: collections.Counter[str] = collections.Counter()

        def make(
            name: str, observer: Observer, shape: Any = None, *, is_weight: bool = False
        ) -> FakeQuantNode:
            unique = f"{name}_{counts[name]}" if counts[name] else name
            counts[name] += 1
            node = make_node(self, unique, observer, shape, is_weight=is_weight)
            # In a tuple TensorFlow's checkpoints find them.
            self.ranges = (*self.ranges, *node.variables)
            return node

        weights = [
            (variable, make(variable.name, observer, variable.shape, is_weight=True))
            for variable, observer in config.weight_observers(layer)
        ]
        activations = [
            QuantizedActivation(layer, path, functools.partial(make, observer=observer))
            for path, observer in config.activation_observers(layer).items()
        ]
        output = config.output_observer(layer)
        node = None if output is None else make("output", output)
        self._nodes = _Nodes(weights, activations, node)

    def call(self, *args: Any, training: bool | None = None, **kwargs: Any) -> Any:
        """Applies the layer on quantized weights, and quantizes what it computes."""
        with keras_internals.calls.without_autocast():
            context = QuantContext(self, training=training, inputs=(args, kwargs))
            weights = [
                (v, node.fake_quantize(tf.convert_to_tensor(v.value), context))
                for v, node in self._nodes.weights
            ]
        with contextlib.ExitStack() as stack:
            stack.enter_context(keras_internals.substitution.read_as(self, weights))
            for activation in self._nodes.activations:
                stack.enter_context(activation.replacing_function(context))
            outputs = super().call(*args, training=training, **kwargs)
        outputs = fake_quantize_all(self._nodes.output, outputs, context)
        context.commit()
        return outputs

    @property
    def needs_calibration(self) -> bool:
        """True if a range of an activation is unknown before training."""
        nodes = [node for each in self._nodes.activations for node in each.nodes]
        return any(
            node.needs_calibration for node in [*nodes, self._nodes.output] if node
        )

    def set_weight_ranges(self) -> None:
        """Sets the ranges of weights by their values, as the next step will."""
        for variable, node in self._nodes.weights:
            node.set_range(tf.convert_to_tensor(variable.value))

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {**super().get_config(), **self.schedule.get_config()}


@keras.saving.register_keras_serializable(package="tfgpipe")
class FakeQuantize(keras.layers.Layer):
    """Fake-quantizes floating-point tensors, and passes others on.

    Put before the first layer it makes a model take integers once it is exported.

    Args:
        observer: The observer. Defaults to `AllValuesRange()`.
        range_update: As in `QuantizeWrapper`.
        delay: Steps before quantization starts, as in `QuantizeWrapper`.
        freeze_after: Step after which ranges are frozen, as in `QuantizeWrapper`.
        **kwargs: Arguments of the base layer.

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
        self.schedule = QuantSchedule(
            range_update=range_update, delay=delay, freeze_after=freeze_after
        )
        self.supports_masking = True

    def build(self, input_shape: Any) -> None:
        """Creates the range."""
        self.num_updates = self.schedule.add_counter(self)
        shapes = keras.tree.map_shape_structure(tuple, input_shape)
        shape = shapes if isinstance(shapes, tuple) else None
        self._node = make_node(self, "input", self.observer, shape)
        self.ranges = self._node.variables

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns the inputs fake-quantized."""
        with keras_internals.calls.without_autocast():
            context = QuantContext(self, training=training, inputs=inputs)
            outputs = fake_quantize_all(self._node, inputs, context)
            context.commit()
        return outputs

    @property
    def needs_calibration(self) -> bool:
        """True if the range is unknown before training."""
        return self._node.needs_calibration

    def compute_output_spec(self, inputs: Any, **_: Any) -> Any:
        """Infers the outputs' shapes and dtypes: those of the inputs."""
        return source_model.to_symbolic(inputs)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            **super().get_config(),
            "observer": keras.saving.serialize_keras_object(self.observer),
            **self.schedule.get_config(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FakeQuantize:
        """Creates a layer from what `get_config` returned."""
        observer = keras.saving.deserialize_keras_object(config["observer"])
        return cls(**{**config, "observer": observer})


QUANTIZING = (QuantizeWrapper, FakeQuantize)


def quantizing_layers(layer: Any) -> list[Any]:
    """Returns the layers that fake-quantize, of a layer or model and those inside."""
    return [
        x
        for x in keras_internals.layers.inner_layers(layer)
        if isinstance(x, QUANTIZING)
    ]


def check_unquantized(layer: keras.layers.Layer) -> None:
    """Raises ValueError if a layer quantizes already, by us or by Keras."""
    for inner in quantizing_layers(layer):
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


@dataclasses.dataclass(frozen=True)
class _Nodes:
    """The fake-quant nodes of a layer, where Keras does not look for variables.

    In a list or tuple of the wrapper's it would take the layer's weights for the
    wrapper's own.

    Attributes:
        weights: Variables of the layer, each with its node.
        activations: The activation functions between nodes.
        output: The node of the outputs, or None.
    """

    weights: Sequence[tuple[keras.Variable, FakeQuantNode]] = ()
    activations: Sequence[QuantizedActivation] = ()
    output: FakeQuantNode | None = None
