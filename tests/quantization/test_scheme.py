"""Which layers are quantized how."""

from __future__ import annotations

import keras
import pytest

from tests.quantization.stacks import Gated
from tfgpipe import quantization
from tfgpipe.capture.ir import Call
from tfgpipe.quantization import QuantizeConfig
from tfgpipe.quantization.scheme import configs_of, default_8bit

layers = keras.layers


def chain(*given: layers.Layer) -> list[QuantizeConfig]:
    """Returns what is quantized of layers one after another."""
    calls = [Call(x, (), {}, (i,), (i + 1,)) for i, x in enumerate(given)]
    found = configs_of(calls, [len(given)], default_8bit(), {})
    return [found[x] for x in given]


def parts(config: QuantizeConfig) -> str:
    """Returns what is quantized: weights, activations, outputs."""
    named = [("w", config.weights), ("a", config.activations), ("o", config.output)]
    return "".join(letter for letter, part in named if part)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (layers.Dense(2), "wa"),
        (layers.Conv2D(2, 3), "wa"),
        (layers.MultiHeadAttention(2, 2), "wo"),
        (layers.Embedding(2, 2), "wo"),
        (layers.LSTM(2), "wo"),
        (layers.LayerNormalization(), "o"),
        (layers.Add(), "o"),
        (layers.ReLU(), "o"),
        (layers.Activation("relu"), "o"),
        (layers.Activation("gelu"), "o"),
        (layers.Activation("softmax"), ""),
        (layers.Activation("linear"), ""),
        (layers.Dropout(0.5), ""),
        (layers.MaxPooling2D(), ""),
        (layers.Flatten(), ""),
    ],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_each_kind_of_layer_has_a_rule(layer, expected):
    assert parts(default_8bit().config(layer)) == expected


def test_convolutions_have_a_range_for_each_channel():
    scheme = default_8bit()
    assert scheme.config(layers.Conv2D(2, 3)).weights["kernel"].axis == -1
    assert scheme.config(layers.Dense(2)).weights["kernel"].axis is None


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ("conv norm relu", ["w", "", "o"]),
        ("conv norm activation", ["w", "", "o"]),
        ("conv norm", ["w", "o"]),
        ("dense norm relu", ["w", "", "o"]),
        ("dense relu", ["w", "o"]),
        ("norm relu", ["o", "o"]),
        ("tanh norm relu", ["wa", "o", "o"]),
        ("conv norm dropout relu", ["w", "o", "", "o"]),
    ],
)
def test_what_is_fused_is_quantized_at_its_end_alone(stack, expected):
    kinds = {
        "conv": lambda: layers.Conv2D(2, 3),
        "dense": lambda: layers.Dense(2),
        "tanh": lambda: layers.Dense(2, activation="tanh"),
        "norm": layers.BatchNormalization,
        "relu": layers.ReLU,
        "activation": lambda: layers.Activation("relu"),
        "dropout": lambda: layers.Dropout(0.1),
    }
    found = chain(*(kinds[name]() for name in stack.split()))
    assert [parts(config) for config in found] == expected


def test_what_is_read_twice_is_not_fused():
    product, relu, other = layers.Dense(2), layers.ReLU(), layers.Add()
    calls = [
        Call(product, (), {}, (0,), (1,)),
        Call(relu, (), {}, (1,), (2,)),
        Call(other, (), {}, (1, 2), (3,)),
    ]
    found = configs_of(calls, [3], default_8bit(), {})
    assert parts(found[product]) == "wa"


def test_what_is_an_output_as_well_is_not_fused():
    product, relu = layers.Dense(2), layers.ReLU()
    calls = [Call(product, (), {}, (0,), (1,)), Call(relu, (), {}, (1,), (2,))]
    for outputs, expected in (([2], "w"), ([1, 2], "wa")):
        found = configs_of(calls, outputs, default_8bit(), {})
        assert parts(found[product]) == expected


def test_annotated_layers_are_quantized_as_they_say_and_never_fused():
    product, relu = layers.Dense(2), layers.ReLU()
    calls = [Call(product, (), {}, (0,), (1,)), Call(relu, (), {}, (1,), (2,))]
    own = QuantizeConfig(output=True)
    found = configs_of(calls, [2], default_8bit(), {product: own})
    assert found[product] is own


def test_a_layer_without_a_rule_is_named_with_two_ways_to_give_one():
    with pytest.raises(ValueError, match=r"of type Gated.*'mine'.*annotate.*with_rule"):
        default_8bit().config(Gated(3, name="mine"))
    config = QuantizeConfig(weights=["kernel"])
    assert default_8bit().with_rule(Gated, config).config(Gated(3)) is config
    by_layer = default_8bit().with_rule(
        Gated, lambda layer: QuantizeConfig(output=layer.units > 2)
    )
    assert parts(by_layer.config(Gated(3))) == "o"
    assert parts(by_layer.config(Gated(2))) == ""


def test_observers_are_those_given():
    ramped = quantization.MovingAverageRange(ramp=True)
    four = quantization.LastValueRange(bits=4)
    scheme = default_8bit(weights=four, activations=ramped, inputs=None)
    config = scheme.config(layers.Conv2D(2, 3))
    assert config.activations == {"activation": ramped}
    assert config.weights["kernel"].bits == 4
    assert scheme.config(layers.Activation("relu")).output == ramped
    assert scheme.inputs is None
