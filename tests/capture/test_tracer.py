"""Models and lists of layers as networks of calls."""

from __future__ import annotations

import keras
import pytest

from tfgpipe._compat import keras_internals
from tfgpipe.capture import tracer
from tfgpipe.capture.ir import Value

layers = keras.layers


def record(model):
    return tracer.capture_functional(keras_internals.functional.functional_graph(model))


def names(recorded):
    return [call.layer.name for call in recorded.graph.calls]


def test_calls_come_after_what_they_read_in_keras_order():
    inputs = keras.Input((4,))
    left = layers.Dense(4, name="left")(inputs)
    right = layers.Dense(4, name="right")(inputs)
    outputs = layers.Add(name="sum")([left, right])
    recorded = record(keras.Model(inputs, outputs))
    assert names(recorded) == ["left", "right", "sum"]
    network = recorded.graph
    assert (network.input_ids, network.output_ids) == ((0,), (3,))
    assert network.calls[2].args == ([Value(1), Value(2)],)
    assert network.calls[2].input_ids == (1, 2)
    assert recorded.output_structure == Value(3)
    assert recorded.specs[3].shape == (None, 4)


def test_arguments_that_are_no_tensors_stay_as_they_are():
    query, value = keras.Input((3, 4)), keras.Input((5, 4))
    attention = layers.MultiHeadAttention(1, 2, name="attention")
    outputs = attention(query, value=value, use_causal_mask=True)
    (call,) = record(keras.Model([query, value], outputs)).graph.calls
    assert call.args == (Value(0),)
    assert call.kwargs == {"value": Value(1), "use_causal_mask": True}
    assert call.input_ids == (0, 1)


def inner_model(**arguments):
    inputs = keras.Input((4,), **arguments)
    hidden = layers.Dense(4, name="first")(inputs)
    return keras.Model(inputs, layers.Dense(4, name="second")(hidden), name="inner")


@pytest.mark.parametrize("times", [1, 2])
def test_models_inside_models_are_opened_at_each_of_their_calls(times):
    x = inputs = keras.Input((4,))
    inner = inner_model()
    deeper = keras.Sequential([keras.Input((4,)), inner, layers.ReLU(name="relu")])
    for _ in range(times):
        x = deeper(x)
    recorded = record(keras.Model(inputs, x))
    assert names(recorded) == ["first", "second", "relu"] * times
    chain = [(call.input_ids, call.output_ids) for call in recorded.graph.calls]
    assert chain == [((n,), (n + 1,)) for n in range(3 * times)]


def test_a_model_of_a_list_of_one_input_is_opened_on_the_tensor_itself():
    inputs = keras.Input((4,))
    inner = keras.Model([inputs], layers.Dense(4, name="first")(inputs))
    x = keras.Input((4,))
    assert names(record(keras.Model(x, inner(x)))) == ["first"]


def test_calls_for_another_model_that_shares_the_layers_are_left_out():
    shared = inner_model()
    x, other = keras.Input((4,)), keras.Input((4,))
    outputs = shared(x)
    keras.Model(other, layers.ReLU()(shared(other)))
    recorded = record(keras.Model(x, outputs))
    assert names(recorded) == ["first", "second"]
    assert record(shared).graph.output_ids == (2,)


class Doubled(keras.Model):
    """A Functional model with a `call` of its own."""

    def call(self, x, training=None, mask=None):
        return 2 * super().call(x)


def doubled():
    inputs = keras.Input((4,))
    return Doubled(inputs, layers.Dense(4)(inputs), name="inner")


@pytest.mark.parametrize(
    ("make", "shape", "kwargs", "reason"),
    [
        (doubled, (4,), {}, "a model with a `call` of its own"),
        (lambda: inner_model(dtype="float16"), (4,), {}, "of another structure, rank"),
        (inner_model, (4, 1), {}, "of another structure, rank or type"),
        (inner_model, (4,), {"training": False}, "further arguments (training)"),
        (lambda: keras.Sequential([layers.Dense(4)], name="inner"), (4,), {}, ""),
    ],
    ids=["own call", "casts", "squeezes", "arguments", "was not built"],
)
def test_a_model_whose_call_does_more_than_run_its_graph_stays_closed(
    make, shape, kwargs, reason
):
    inputs = keras.Input(shape)
    inner = make()
    outputs = inner(inputs, **kwargs)
    recorded = record(keras.Model(inputs, outputs))
    if inner.name == "inner" and isinstance(inner, keras.Sequential):
        # By its first call it has become one.
        assert names(recorded) == [inner.layers[0].name]
        assert not recorded.opaque_calls
    else:
        assert names(recorded) == ["inner"]
        assert reason in recorded.opaque_calls[0]


def test_a_part_of_a_larger_model_leaves_the_rest_out():
    inputs = keras.Input((4,))
    shared = layers.Dense(4, name="shared")
    hidden = shared(inputs)
    shared(hidden)  # Belongs to no model.
    recorded = record(keras.Model(inputs, hidden))
    assert names(recorded) == ["shared"]


class Scaled(layers.Layer):
    def call(self, x, scale=None):
        return x if scale is None else x * scale


def test_side_inputs_go_to_the_layers_that_ask_for_them():
    stack = [layers.Dense(4), Scaled(), layers.Dense(4), Scaled()]
    side = {"scale": keras.KerasTensor((None, 1))}
    network = tracer.capture_layers(stack, keras.KerasTensor((None, 4)), side).graph
    assert network.input_ids == (0, 1)
    assert [call.input_ids for call in network.calls] == [(0,), (2, 1), (3,), (4, 1)]
    assert [call.kwargs for call in network.calls] == [
        {},
        {"scale": Value(1)},
        {},
        {"scale": Value(1)},
    ]


def test_structures_go_from_layer_to_layer():
    class Split(layers.Layer):
        def call(self, x):
            return {"a": x[:, :2], "b": (x[:, 2:],)}

    class Join(layers.Layer):
        def call(self, parts):
            return keras.ops.concatenate([parts["a"], *parts["b"]], axis=-1)

    recorded = tracer.capture_layers(
        [Split(), Join(), Split()], keras.KerasTensor((None, 4)), {}
    )
    assert [call.output_ids for call in recorded.graph.calls] == [(1, 2), (3,), (4, 5)]
    assert recorded.graph.calls[1].args == ({"a": Value(1), "b": (Value(2),)},)
    assert recorded.output_structure == {"a": Value(4), "b": (Value(5),)}


def test_a_model_called_on_masked_inputs_is_one_opaque_call():
    """Keras records the mask as an argument, as if the user had passed it."""
    inputs = keras.Input((3,), dtype="int32")
    inner = keras.Sequential([keras.Input((3, 4)), layers.LSTM(2)], name="inner")
    masked = layers.Embedding(5, 4, mask_zero=True, name="embedding")(inputs)
    recorded = record(keras.Model(inputs, inner(masked)))
    assert names(recorded)[-1] == "inner"
    assert list(recorded.graph.calls[-1].kwargs) == ["mask"]
    assert list(recorded.opaque_calls.values()) == [
        "a model called on inputs with masks"
    ]
