"""The quantization scheme: a configuration for each class of layers, and for fusions.

TFLite runs a product, the batch normalization after it and the ReLU after that as one
operation, whose inner results are never stored. So these are not quantized either:

    Conv2D ─▶ BatchNormalization ─▶ ReLU ─▶ [quantized] ─▶ ...

The rules for single layers, and the fusions, are those of the 8-bit scheme of
tensorflow-model-optimization, and more layers than it knows.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
from keras import layers

from tfgpipe._util import IdentityMap, unique
from tfgpipe.capture import Call
from tfgpipe.quantization.activations import has_quantized_result
from tfgpipe.quantization.config import (
    ACTIVATIONS,
    INPUTS,
    NOTHING,
    WEIGHTS,
    QuantizeConfig,
)
from tfgpipe.quantization.fake_quant import Observer
from tfgpipe.quantization.ranges import Range

Rule = QuantizeConfig | Callable[[keras.layers.Layer], QuantizeConfig]


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The quantized tensors of each class of layers.

    Attributes:
        rules: By class of layer its configuration, or a function of the layer that
            returns it. Subclasses have rules of their own, or none.
        activations: The observer of results of Keras operations.
        inputs: The observer of the inputs of a model, or None.
        operations: Names of Keras operations, such as the `Add` of `x + y`, whose
            results are quantized.
    """

    rules: Mapping[type, Rule]
    activations: Observer
    inputs: Observer | None
    operations: frozenset[str] = frozenset()

    def with_rule(self, kind: type[keras.layers.Layer], rule: Rule) -> Scheme:
        """Returns the scheme with a rule for one more class of layers.

        Example:

        >>> config = tfgpipe.quantization.QuantizeConfig(weights=["kernel"])
        >>> scheme = tfgpipe.quantization.default_8bit()
        >>> scheme = scheme.with_rule(keras.layers.Conv3DTranspose, config)
        """
        return dataclasses.replace(self, rules={**self.rules, kind: rule})

    def config(self, layer: keras.layers.Layer) -> QuantizeConfig:
        """Returns the configuration of a layer.

        Raises:
            ValueError: If there is no rule for it.
        """
        rule = self.rules.get(type(layer))
        if rule is None:
            kind = type(layer).__name__
            raise ValueError(
                f"There is no rule for how layers of type {kind} are quantized. "
                f"Received layer '{layer.name}'. Give it one with `annotate(layer, "
                'QuantizeConfig(weights=["kernel"], output=True))`, or the whole class '
                f"with `default_8bit().with_rule({kind}, config)`; `QuantizeConfig()` "
                "leaves it as it is."
            )
        return rule if isinstance(rule, QuantizeConfig) else rule(layer)


def default_8bit(
    *,
    weights: Range = WEIGHTS,
    activations: Observer = ACTIVATIONS,
    inputs: Observer | None = INPUTS,
) -> Scheme:
    """Returns the rules for 8 bits, as TFLite runs them.

    Weights are symmetric, of convolutions with a range per channel; activations are
    not, and observed by a moving average; inputs have the range of all observations.
    (Jacob et al. 2018, section 3; Krishnamoorthi 2018, section 2.)

    Beyond the layers of tensorflow-model-optimization there are rules for attention,
    embeddings, normalizations and recurrent layers.

    Example:

    >>> ramped = tfgpipe.quantization.MovingAverageRange(ramp=True)
    >>> scheme = tfgpipe.quantization.default_8bit(activations=ramped)
    >>> list(scheme.config(keras.layers.Dense(4)).weights)
    ['kernel']

    Args:
        weights: The observer of weights; its axis is set by the class of layer.
        activations: The observer of activations and outputs.
        inputs: The observer of the inputs of a model, or None.
    """
    per_tensor = dataclasses.replace(weights, axis=None)
    per_channel = dataclasses.replace(weights, axis=-1)
    function = {"activation": activations}

    def config(*names: str, observer: Range = per_tensor, **others: Any) -> Rule:
        return QuantizeConfig(weights=dict.fromkeys(names, observer), **others)

    def activation(layer: keras.layers.Layer) -> QuantizeConfig:
        linear = layer.activation is keras.activations.linear
        quantizes = has_quantized_result(layer.activation) and not linear
        return QuantizeConfig(output=activations if quantizes else None)

    depthwise = ("depthwise_kernel", "pointwise_kernel")
    recurrent = ("kernel", "recurrent_kernel")
    by_channel: dict[str, Any] = {"observer": per_channel, "activations": function}
    rules: dict[type, Rule] = {
        **dict.fromkeys(_PER_TENSOR, config("kernel", activations=function)),
        **dict.fromkeys(_PER_CHANNEL, config("kernel", **by_channel)),
        **dict.fromkeys(_SEPARABLE, config(*depthwise, **by_channel)),
        **dict.fromkeys(_ATTENTION, config("kernel", output=activations)),
        **dict.fromkeys(_RECURRENT, config(*recurrent, output=activations)),
        layers.Embedding: config("embeddings", output=activations),
        **dict.fromkeys(_OUTPUT_ALONE, config(output=activations)),
        **dict.fromkeys(_UNQUANTIZED, NOTHING),
        layers.Activation: activation,
    }
    return Scheme(rules, activations, inputs, _OPERATIONS)


def configs_of(
    calls: Sequence[Call],
    outputs: Collection[int],
    scheme: Scheme,
    annotated: Mapping[keras.layers.Layer, QuantizeConfig],
) -> IdentityMap[keras.layers.Layer, QuantizeConfig]:
    """Returns the configuration of each layer.

    Raises:
        ValueError: If there is no rule for a layer.
    """
    called = [c.layer for c in calls if isinstance(c.layer, layers.Layer)]
    num_calls = collections.Counter(map(id, called))
    num_readers = collections.Counter(n for c in calls for n in c.input_ids)
    producers = {n: c for c in calls for n in c.output_ids}
    configs = IdentityMap(
        (x, annotated.get(x) or scheme.config(x)) for x in unique(called)
    )

    def may_fuse(call: Call) -> bool:
        return num_calls[id(call.layer)] == 1 and call.layer not in annotated

    normalized: set[int] = set()  # Values that are normalized products.
    for call in filter(may_fuse, calls):
        for n in call.input_ids:
            other = producers.get(n)
            if num_readers[n] > 1 or n in outputs or not (other and may_fuse(other)):
                continue
            is_product = _is_product(other)
            config = configs[other.layer]
            if isinstance(call.layer, layers.BatchNormalization) and is_product:
                configs[other.layer] = config.weights_only()
                normalized.update(call.output_ids)
            elif _is_relu(call) and (
                is_product or isinstance(other.layer, layers.Add) or n in normalized
            ):
                configs[other.layer] = config.weights_only()
            elif isinstance(call.layer, layers.Concatenate):
                configs[other.layer] = config.without_output()
    return configs


def _is_product(call: Call) -> bool:
    """Returns whether a call is a product without an activation function."""
    kinds = (layers.Dense, layers.Conv1D, layers.Conv2D, layers.DepthwiseConv2D)
    linear = getattr(call.layer, "activation", None) is keras.activations.linear
    return linear and isinstance(call.layer, kinds)


def _is_relu(call: Call) -> bool:
    if isinstance(call.layer, layers.Activation):
        return call.layer.activation is keras.activations.relu
    return isinstance(call.layer, layers.ReLU)


# TFLite reshapes kernels of one and of three dimensions, channels as well: so these
# have one range for the whole kernel.
_PER_TENSOR = (
    layers.Dense,
    layers.EinsumDense,
    layers.Conv1D,
    layers.Conv3D,
    layers.DepthwiseConv1D,
    layers.Conv1DTranspose,
    layers.Conv2DTranspose,
    layers.Conv3DTranspose,
)
_PER_CHANNEL = (layers.Conv2D, layers.DepthwiseConv2D)
_SEPARABLE = (layers.SeparableConv1D, layers.SeparableConv2D)
_ATTENTION = (layers.MultiHeadAttention, layers.GroupQueryAttention)
_RECURRENT = (layers.SimpleRNN, layers.LSTM, layers.GRU)
# Layers of arithmetic, without weights to quantize.
_OUTPUT_ALONE = (
    *(layers.ReLU, layers.LeakyReLU, layers.PReLU, layers.ELU),
    *(layers.Add, layers.Subtract, layers.Multiply, layers.Average),
    *(layers.Maximum, layers.Minimum, layers.Dot, layers.Concatenate),
    *(layers.UpSampling1D, layers.UpSampling2D, layers.UpSampling3D),
    *(layers.AveragePooling1D, layers.AveragePooling2D, layers.AveragePooling3D),
    layers.GlobalAveragePooling1D,
    layers.GlobalAveragePooling2D,
    layers.GlobalAveragePooling3D,
    *(layers.BatchNormalization, layers.LayerNormalization, layers.RMSNormalization),
    *(layers.GroupNormalization, layers.UnitNormalization),
    *(layers.Rescaling, layers.Normalization, layers.Masking),
)
# Layers whose outputs are among their inputs, or zero, and that of a softmax.
_UNQUANTIZED = (
    *(layers.Softmax, layers.Flatten, layers.Reshape, layers.Permute),
    *(layers.RepeatVector, layers.Identity, layers.Dropout),
    *(layers.SpatialDropout1D, layers.SpatialDropout2D, layers.SpatialDropout3D),
    *(layers.GaussianDropout, layers.GaussianNoise, layers.AlphaDropout),
    layers.ActivityRegularization,
    *(layers.Cropping1D, layers.Cropping2D, layers.Cropping3D),
    *(layers.ZeroPadding1D, layers.ZeroPadding2D, layers.ZeroPadding3D),
    *(layers.MaxPooling1D, layers.MaxPooling2D, layers.MaxPooling3D),
    *(layers.GlobalMaxPooling1D, layers.GlobalMaxPooling2D, layers.GlobalMaxPooling3D),
)
_OPERATIONS = frozenset(
    {"Add", "Subtract", "Multiply", "Maximum", "Minimum", "Mean", "Matmul", "Einsum"}
)
