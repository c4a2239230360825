"""Which layers are quantized how, and what of it is left out where layers are fused.

TFLite runs a product, the batch normalization behind it and the ReLU behind that as one
operation, whose inner results never exist. So these are not quantized either:

    Conv2D ─▶ BatchNormalization ─▶ ReLU ─▶ [quantized] ─▶ ...

The rules for single layers, and the chains, are those of the 8-bit scheme of
tensorflow-model-optimization, and more layers than it knows.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import keras

from tfgpipe.capture import Call
from tfgpipe.quantization.activations import has_quantized_result
from tfgpipe.quantization.config import ACTIVATIONS, INPUTS, WEIGHTS, QuantizeConfig
from tfgpipe.quantization.points import Observer
from tfgpipe.quantization.ranges import Range

Rule = QuantizeConfig | Callable[[keras.layers.Layer], QuantizeConfig]

NOTHING = QuantizeConfig()


@dataclasses.dataclass(frozen=True)
class Scheme:
    """What is quantized of each kind of layer.

    Attributes:
        rules: By class of layer, what is quantized of it, or a function of the layer
            that tells. Subclasses have rules of their own, or none.
        activations: What observes results of Keras operations.
        inputs: What observes the inputs of a model, or None.
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
        """Returns what is quantized of a layer.

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

    Weights are symmetric, of convolutions with a range for each channel; activations
    are not, and observed by a moving average; inputs have the range of all that was
    seen. (Jacob et al. 2018, section 3; Krishnamoorthi 2018, section 2.)

    Beyond the layers of tensorflow-model-optimization there are rules for attention,
    embeddings, normalizations and recurrent layers.

    Example:

    >>> ramped = tfgpipe.quantization.MovingAverageRange(ramp=True)
    >>> scheme = tfgpipe.quantization.default_8bit(activations=ramped)
    >>> list(scheme.config(keras.layers.Dense(4)).weights)
    ['kernel']

    Args:
        weights: What observes weights; its axis is set by the kind of layer.
        activations: What observes activations and outputs.
        inputs: What observes the inputs of a model, or None.
    """

    def activation(layer: keras.layers.Layer) -> QuantizeConfig:
        linear = layer.activation is keras.activations.linear
        quantizes = has_quantized_result(layer.activation) and not linear
        return QuantizeConfig(output=activations if quantizes else None)

    rules: dict[type, Rule] = {
        # By name, since older versions of Keras lack some.
        getattr(keras.layers, name): kind.config(weights, activations)
        for kind in _KINDS
        for name in kind.names.split()
        if name in dir(keras.layers)
    }
    rules[keras.layers.Activation] = activation
    return Scheme(rules, activations, inputs, _OPERATIONS)


def chosen(
    calls: Sequence[Call],
    outputs: Collection[int],
    scheme: Scheme,
    annotated: Mapping[int, QuantizeConfig],
) -> dict[int, QuantizeConfig]:
    """Returns what is quantized of each layer, by its `id`.

    Args:
        calls: The calls of layers and operations, in order.
        outputs: Numbers of values that are outputs.
        scheme: The rules.
        annotated: For layers that were given a configuration, that, by `id`.

    Raises:
        ValueError: If there is no rule for a layer.
    """
    layers = [c.layer for c in calls if isinstance(c.layer, keras.layers.Layer)]
    times = collections.Counter(map(id, layers))
    readers = collections.Counter(n for c in calls for n in c.reads)
    makers = {n: c for c in calls for n in c.makes}
    found = {
        id(layer): annotated.get(id(layer)) or scheme.config(layer) for layer in layers
    }

    def before(call: Call) -> list[Call]:
        """Returns the calls whose results go nowhere else, and are not annotated."""
        return [
            makers[n]
            for n in call.reads
            if n in makers
            and readers[n] == 1
            and n not in outputs
            and times[id(makers[n].layer)] == 1
            and id(makers[n].layer) not in annotated
        ]

    def leave_out(call: Call) -> None:
        found[id(call.layer)] = found[id(call.layer)].weights_only()

    products: set[int] = set()
    for call in calls:
        if times[id(call.layer)] != 1 or id(call.layer) in annotated:
            continue
        for other in before(call):
            if _is_normalization(call) and _is_product(other):
                leave_out(other)
                products.add(id(call))
            elif _is_relu(call) and (
                _is_product(other) or _is_sum(other) or id(other) in products
            ):
                leave_out(other)
            elif isinstance(call.layer, keras.layers.Concatenate) and isinstance(
                other.layer, keras.layers.Layer
            ):
                found[id(other.layer)] = found[id(other.layer)].without_output()
    return found


def _is_product(call: Call) -> bool:
    """Returns whether a call is a product with nothing behind it that is not linear."""
    kinds = (keras.layers.Dense, keras.layers.Conv2D, keras.layers.DepthwiseConv2D)
    linear = getattr(call.layer, "activation", None) is keras.activations.linear
    return linear and isinstance(call.layer, (*kinds, keras.layers.Conv1D))


def _is_sum(call: Call) -> bool:
    return isinstance(call.layer, keras.layers.Add)


def _is_normalization(call: Call) -> bool:
    return isinstance(call.layer, keras.layers.BatchNormalization)


def _is_relu(call: Call) -> bool:
    if isinstance(call.layer, keras.layers.Activation):
        return call.layer.activation is keras.activations.relu
    return isinstance(call.layer, keras.layers.ReLU)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What is quantized of layers of some classes.

    Attributes:
        names: Names of the classes, apart by spaces.
        weights: Names of variables.
        per_channel: Whether each has a range for each position of its last axis.
        activations: Attributes that hold activation functions.
        output: Whether the outputs are quantized.
    """

    names: str
    weights: tuple[str, ...] = ()
    per_channel: bool = False
    activations: tuple[str, ...] = ()
    output: bool = False

    def config(self, weights: Range, of_activations: Observer) -> QuantizeConfig:
        """Returns the same with observers."""
        axis = -1 if self.per_channel else None
        weights = dataclasses.replace(weights, axis=axis)
        return QuantizeConfig(
            weights=dict.fromkeys(self.weights, weights),
            activations=dict.fromkeys(self.activations, of_activations),
            output=of_activations if self.output else None,
        )


_KINDS = (
    _Kind(
        # (TFLite reshapes kernels of one and of three dimensions, channels as well.)
        "Dense EinsumDense Conv1D Conv3D DepthwiseConv1D Conv1DTranspose "
        "Conv2DTranspose Conv3DTranspose",
        weights=("kernel",),
        activations=("activation",),
    ),
    _Kind(
        "Conv2D DepthwiseConv2D",
        weights=("kernel",),
        per_channel=True,
        activations=("activation",),
    ),
    _Kind(
        "SeparableConv1D SeparableConv2D",
        weights=("depthwise_kernel", "pointwise_kernel"),
        per_channel=True,
        activations=("activation",),
    ),
    _Kind(
        "MultiHeadAttention GroupQueryAttention",
        weights=("kernel",),
        output=True,
    ),
    _Kind("SimpleRNN LSTM GRU", weights=("kernel", "recurrent_kernel"), output=True),
    _Kind("Embedding", weights=("embeddings",), output=True),
    _Kind(
        "ReLU LeakyReLU PReLU ELU Add Subtract Multiply Average Maximum Minimum Dot "
        "Concatenate UpSampling1D UpSampling2D UpSampling3D AveragePooling1D "
        "AveragePooling2D AveragePooling3D GlobalAveragePooling1D "
        "GlobalAveragePooling2D GlobalAveragePooling3D BatchNormalization "
        "LayerNormalization RMSNormalization GroupNormalization UnitNormalization "
        "Rescaling Normalization Masking",
        output=True,
    ),
    _Kind(
        "Softmax Flatten Reshape Permute RepeatVector Identity Dropout "
        "SpatialDropout1D SpatialDropout2D SpatialDropout3D GaussianDropout "
        "GaussianNoise AlphaDropout ActivityRegularization Cropping1D "
        "Cropping2D Cropping3D ZeroPadding1D ZeroPadding2D ZeroPadding3D "
        "MaxPooling1D MaxPooling2D MaxPooling3D GlobalMaxPooling1D "
        "GlobalMaxPooling2D GlobalMaxPooling3D"
    ),
)

_OPERATIONS = frozenset(
    {"Add", "Subtract", "Multiply", "Maximum", "Minimum", "Mean", "Matmul", "Einsum"}
)
