"""Any Keras model: masks, skips, shared layers, optional inputs, refusals.

Side inputs and saving have files of their own; that each model of `zoo` computes what
it computes alone is in `test_zoo`.
"""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare, zoo
from tests.helpers.layer_stacks import REMAT_MODES
from tests.helpers.plain_pairs import (
    Chain,
    assert_fits_the_same,
    assert_same_numbers,
)
from tests.helpers.reference import OneAfterAnother
from tests.helpers.zoo import ZOO, floats, ids, padded_ids
from tfgpipe.capture import dtype_policies

layers = keras.layers


@pytest.mark.parametrize(
    "name", [name for name, animal in ZOO.items() if not animal.rowwise]
)
def test_inference_is_the_plain_models_at_any_number_of_microbatches(name, floatx):
    floatx("float64")
    plain, pipelined = compare.model_pair(
        ZOO[name].make, num_stages=3, num_microbatches=3
    )
    for variable in plain.non_trainable_variables:  # Other than they are made.
        if variable.dtype == "float64":
            variable.assign(variable + 0.5)
    compare.copy_state(plain, pipelined)
    x = ZOO[name].data(5)
    compare.assert_runs_the_same(plain, pipelined, x, training=False, **DOUBLE)


DOUBLE = dict(zip(("rtol", "atol"), compare.TOLERANCES["float64"], strict=True))


# -- fit ------------------------------------------------------------------------------


def two_losses():
    return {
        "loss": {"price": "mse", "kind": "sparse_categorical_crossentropy"},
        "loss_weights": {"price": 0.3, "kind": 2.0},
        "metrics": {"price": ["mae"], "kind": ["accuracy"]},
    }


@pytest.mark.parametrize(("num_microbatches", "weighted"), [(1, False), (3, True)])
def test_losses_and_metrics_go_by_the_names_of_outputs(num_microbatches, weighted):
    plain, pipelined = compare.model_pair(
        zoo.two_in_two_out, num_stages=3, num_microbatches=num_microbatches
    )
    assert pipelined.output_names == plain.output_names == ["price", "kind"]
    x = {"a": floats(10, 4), "b": floats(10, 3)}
    y = {"price": floats(10, 1), "kind": ids(10, 1) % 3}
    weights = {}
    if weighted:
        weight = np.arange(10, dtype="float32")
        y, weights = [*y.values()], {"sample_weight": [weight, weight[::-1]]}
    assert_fits_the_same(plain, pipelined, x, y, two_losses, **weights)
    if weighted:
        return
    scores = [
        model.evaluate(x, y, batch_size=4, return_dict=True, verbose=0)
        for model in (plain, pipelined)
    ]
    assert_same_numbers(*scores)
    predicted = [
        model.predict(x, batch_size=4, verbose=0) for model in (plain, pipelined)
    ]
    compare.assert_allclose(*predicted, 1e-5, 1e-5)


def test_outputs_in_a_dict_are_fitted_by_its_keys():
    plain, pipelined = compare.model_pair(zoo.dicts, num_stages=3, num_microbatches=2)
    y = {"early": floats(10, 5), "z": floats(10, 2)}
    assert_fits_the_same(
        plain,
        pipelined,
        ZOO["dicts"].data(10),
        y,
        lambda: {"loss": {"z": "mse", "early": "mae"}, "metrics": {"z": ["mse"]}},
    )


def test_an_output_without_a_loss():
    plain, pipelined = compare.model_pair(
        zoo.two_in_two_out, num_stages=3, num_microbatches=2
    )
    assert_fits_the_same(
        plain,
        pipelined,
        [floats(10, 4), floats(10, 3)],
        {"price": floats(10, 1), "kind": None},
        lambda: {"loss": {"price": "mse", "kind": None}},
    )


@pytest.mark.nightly
def test_the_loss_honours_masks():
    """A mean over what is no padding, for each output by its own mask."""
    plain, pipelined = compare.model_pair(
        zoo.masked_outputs, num_stages=3, num_microbatches=3, remat="layer"
    )
    x = ZOO["masked_outputs"].data(10)
    y = [floats(10, 6, 3), floats(10, 4, 3), floats(10, 3), floats(10, 4, 2)]
    assert_fits_the_same(plain, pipelined, x, y, lambda: {"loss": ["mse"] * 4})
    # The mask counts: without it the loss is another.
    counted = plain.evaluate(x, y, verbose=0)
    everywhere = np.mean((plain(x)[0].numpy() - y[0]) ** 2)
    assert abs(counted[1] - everywhere) > 1e-3


@pytest.mark.nightly
def test_a_padded_sequence_model_is_fitted_on_what_is_no_padding():
    plain, pipelined = compare.model_pair(
        zoo.masked_tokens, num_stages=3, num_microbatches=3
    )
    assert_fits_the_same(
        plain,
        pipelined,
        padded_ids(10, 5),
        padded_ids(10, 5, seed=3),
        lambda: {
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": ["accuracy"],
            "weighted_metrics": ["accuracy"],
        },
    )


# -- masks ----------------------------------------------------------------------------


@pytest.mark.parametrize("balance", [[6], [1, 3, 1, 1]], ids=str)
def test_a_mask_that_attention_takes_off_is_off_for_all(balance):
    """Keras' attention takes the mask off the very tensors that it reads."""

    def make():
        inputs = keras.Input((5,), dtype="int32")
        x = layers.Embedding(zoo.IDS, 4, mask_zero=True)(inputs)
        y = zoo.attention()(x, x)
        z = layers.Dense(2)(layers.LSTM(2, return_sequences=True)(x))
        return keras.Model(inputs, [layers.Dense(2)(y), x, z])

    plain, pipelined = compare.model_pair(make, balance=balance, num_microbatches=2)
    x = padded_ids(5, 5)
    compare.assert_runs_the_same(plain, pipelined, x)


def test_masks_go_from_the_stage_that_makes_them_to_those_that_read_them():
    """Past stages without a use for them, be it as values or on their tensors."""
    layer = tfgpipe.PipelinedLayer(
        [
            layers.Embedding(zoo.IDS, 4, mask_zero=True),
            layers.Dense(4),
            layers.LSTM(3, return_sequences=True),
            layers.Dense(2),
        ],
        partition=[1] * 4,
        num_microbatches=2,
    )
    plain = keras.Sequential([keras.Input((5,), dtype="int32"), *layer.layers])
    x = padded_ids(5, 5)
    mask = layer(x)._keras_mask
    np.testing.assert_array_equal(mask, x != 0)
    np.testing.assert_array_equal(mask, plain(x)._keras_mask)


def test_a_mask_on_the_input_counts():
    masking = keras.Sequential([keras.Input((4, 3)), layers.Masking()])
    stack = [layers.Dense(4), layers.LSTM(3), layers.Dense(2)]
    plain = keras.Sequential([masking, *stack])
    x = floats(5, 4, 3) * (padded_ids(5, 4) > 0)[..., None]
    expected = plain(x)
    pipelined = tfgpipe.PipelinedLayer(stack, num_stages=3, num_microbatches=2)
    np.testing.assert_allclose(pipelined(masking(x)), expected, 1e-5, 1e-6)
    given = pipelined(x, mask=tf.reduce_any(x != 0.0, axis=-1))
    np.testing.assert_allclose(given, expected, 1e-5, 1e-6)
    assert np.any(np.abs(pipelined(x) - expected) > 1e-3)


# -- skips ----------------------------------------------------------------------------


def skip_from_layer_one_to_three():
    inputs = keras.Input((5,))
    a = layers.Dense(6, activation="tanh")(layers.Dense(4)(inputs))
    b = layers.Dense(6, activation="tanh")(a)
    return keras.Model(inputs, layers.Add()([a, b]))


BALANCES = [
    [b - a for a, b in itertools.pairwise([0, *cuts, 4])]
    for count in range(4)
    for cuts in itertools.combinations(range(1, 4), count)
]


@pytest.mark.parametrize(
    ("balance", "remat"),
    list(zip(BALANCES, itertools.cycle(REMAT_MODES), strict=False)),
    ids=str,
)
def test_a_skip_under_every_balance(balance, remat):
    plain, pipelined = compare.model_pair(
        skip_from_layer_one_to_three, num_microbatches=2, balance=balance, remat=remat
    )
    x = floats(5, 5)
    compare.assert_runs_the_same(plain, pipelined, x)


def test_a_skip_goes_straight_from_its_maker_to_its_readers():
    layer = tfgpipe.PipelinedLayer(
        zoo.skips(), num_microbatches=2, partition=[1] * 5, jit_compile=False
    )
    parts = [stage.segment for stage in layer.stages]
    (skip,) = parts[0].output_ids
    assert [skip in part.input_ids for part in parts] == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert [skip in part.output_ids for part in parts] == [True] + [False] * 4
    # In the graph too. The skip is known by its width, six, and goes as it was made.
    graph = tf.function(layer).get_concrete_function(tf.TensorSpec([6, 5])).graph
    calls = [op for op in graph.get_operations() if op.type == "PartitionedCall"]
    for k in range(5):
        mine = [op for op in calls if op.device.endswith(f"CPU:{k}")]
        assert len(mine) == 2
        for op in mine:
            skips = [x for x in op.inputs if x.shape.as_list() == [3, 6]]
            assert len(skips) == (k in (1, 3))
            assert all(x.op.device.endswith("CPU:0") for x in skips)
            assert all(x.op in calls for x in skips)


# -- models in models -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["nested", "siamese", "sequential"])
def test_a_cut_can_go_through_inner_models(name):
    pipelined = tfgpipe.pipeline(ZOO[name].make(), num_stages=4, num_microbatches=2)
    called = [type(layer) for s in zoo.stages(pipelined) for layer in s.layers]
    assert not any(issubclass(kind, keras.Model) for kind in called)


# -- layers used more than once -------------------------------------------------------


@pytest.mark.parametrize("make", [zoo.tied_layer, zoo.tied_reversible])
def test_a_weight_in_the_first_and_last_stage_has_one_gradient_their_sum(make):
    pipelined = tfgpipe.pipeline(make(), num_stages=3, num_microbatches=2)
    (tied,) = (v for v in pipelined.trainable_variables if "tied" in v.path)
    stages = enumerate(zoo.stages(pipelined))
    holders = [k for k, stage in stages if _holds(stage.weights, tied)]
    assert holders == [0, 2]
    assert tied.value.device.endswith("CPU:0")
    x = ids(6, 5)

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            loss = compare.squares(pipelined(x, training=True))
        return tape.gradient(loss, pipelined.trainable_variables)

    graph = gradients.get_concrete_function(tf.TensorSpec(x.shape, tf.int32)).graph
    position = [v is tied for v in pipelined.trainable_variables].index(True)
    result = graph.structured_outputs[position]
    while result.op.type == "Identity":
        (result,) = result.op.inputs
    assert (result.op.type, len(result.op.inputs)) == ("AddN", 2)
    assert result.op.device.endswith("CPU:0")


def test_the_gradient_of_each_use_is_in_the_sum():
    """The last stage uses ids that the first stage does not look up."""
    plain, pipelined = compare.model_pair(
        zoo.tied_reversible, num_stages=3, num_microbatches=2
    )
    x = np.ones((4, 5), np.int32)
    _, received = compare.assert_runs_the_same(plain, pipelined, x)
    (grad,) = (g for name, g in received.weight_grads.items() if "tied" in name)
    assert np.all(np.any(grad != 0.0, axis=1))


def tied_unseen(make, num_stages):
    plain, pipelined = compare.model_pair(
        make, num_stages=num_stages, num_microbatches=2
    )
    x = ids(6, 5)
    compare.assert_runs_the_same(plain, pipelined, x)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_weight_given_to_an_operation(num_stages, floatx):
    floatx("float64")
    tied_unseen(zoo.tied_by_operation, num_stages)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_weight_used_by_a_function(num_stages, floatx):
    floatx("float64")
    tied_unseen(zoo.tied_by_function, num_stages)


@pytest.mark.parametrize(
    ("frozen", "remat"),
    [(False, "stage"), (False, "layer"), (True, "layer"), (True, "none")],
)
def test_a_layer_twice_in_a_list(frozen, remat):
    def make():
        twice = layers.Dense(4, activation="tanh", activity_regularizer="l2")
        twice.trainable = not frozen
        return [twice, layers.Dense(4), twice, layers.Dense(2)]

    stack = make()
    x = inputs = keras.Input((4,))
    for layer in stack:
        x = layer(x)
    plain = keras.Model(inputs, x)
    pipelined = tfgpipe.PipelinedLayer(
        make(), partition=[1, 1, 2], num_microbatches=2, remat=remat
    )
    pipelined.build((None, 4))
    compare.copy_state(plain, pipelined)
    x = floats(5, 4)
    compare.assert_runs_the_same(plain, pipelined, x)
    assert pipelined.layers[0] is pipelined.layers[2]
    assert stack[0] is stack[2]


def _holds(variables, variable):
    return any(variable is other for other in variables)


# -- training or not, optional inputs, one output of many -----------------------------


@pytest.mark.parametrize("training", [None, False, True])
def test_a_layer_told_at_its_call_whether_it_trains(training):
    """Dropout that a model always wants, as Keras has it."""

    def make():
        inputs = keras.Input((8,))
        x = layers.Dropout(0.5, seed=3)(layers.Dense(8)(inputs), training=True)
        return keras.Model(inputs, layers.Dense(3)(x))

    plain, pipelined = compare.model_pair(make, num_stages=2, num_microbatches=1)
    x = floats(4, 8)
    np.testing.assert_allclose(
        plain(x, training=training), pipelined(x, training=training), 1e-5, 1e-6
    )


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_outputs_keep_their_types(policy):
    """Whatever the policy is, then or later."""
    with dtype_policies.default_policy_scope(policy):
        inputs = keras.Input((4,), dtype="float64")
        x = layers.Dense(5, dtype="float64", activation="tanh")(inputs)
        y = layers.Dense(3, dtype="float32")(x)
        best, large = keras.ops.argmax(y, axis=-1), keras.ops.greater(x, 0.1)
        model = keras.Model(inputs, [x, y, best, large])
        pipelined = tfgpipe.pipeline(model, num_stages=2, num_microbatches=2)
        expected = compare.run(model, floats(5, 4).astype("float64"), graph=False)
        received = compare.run(pipelined, floats(5, 4).astype("float64"))
    compare.assert_same(expected, received)
    np.testing.assert_allclose(expected.outputs[0], received.outputs[0], 1e-14)


def test_an_optional_input_there_and_not_there_in_turn():
    plain, pipelined = compare.model_pair(
        zoo.optional, num_stages=3, num_microbatches=2
    )
    for name in ("optional", "optional_none", "optional"):
        x = ZOO[name].data(5)
        compare.assert_runs_the_same(plain, pipelined, x)


def test_an_optional_input_of_a_list_of_layers():
    a, b = floats(5, 4), floats(5, 4, seed=2)
    layer = tfgpipe.PipelinedLayer(
        [zoo.AddsIfThere(), layers.Dense(2)], num_stages=2, num_microbatches=2
    )
    dense = layer.layers[1]
    np.testing.assert_allclose(layer([a, b]), dense(a + b), 1e-5, 1e-6)
    np.testing.assert_allclose(layer([a, None]), dense(a), 1e-5, 1e-6)


@pytest.mark.parametrize("output", [0, 1])
def test_a_loss_of_one_output_alone(output):
    """What it does not depend on has no gradient in Keras, and zeros in a pipeline."""
    plain, pipelined = compare.model_pair(
        zoo.two_in_two_out, num_stages=3, num_microbatches=2
    )
    x = ZOO["two_in_two_out"].data(5)

    def loss(outputs):
        return compare.squares(outputs[output])

    expected = compare.run(plain, x, loss=loss, graph=False)
    received = compare.run(pipelined, x, loss=loss)
    missing = [name for name, grad in expected.weight_grads.items() if grad is None]
    assert missing
    names = dict(zip(expected.weight_grads, received.weight_grads, strict=True))
    for name in missing:
        assert not np.any(received.weight_grads[names[name]])
        received.weight_grads[names[name]] = None
    compare.assert_same(expected, received)


def test_one_program_serves_batches_of_any_size_and_length():
    _, pipelined = compare.model_pair(zoo.masked, num_stages=3, num_microbatches=2)
    traces = []

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)])
    def call(x):
        traces.append(x)
        return pipelined(x, training=True)

    for rows, length in [(4, 5), (5, 3), (1, 7)]:
        assert call(padded_ids(rows, length)).shape == (rows, 2)
    assert len(traces) == 1


# -- refusals -------------------------------------------------------------------------


def two_dense():
    return tfgpipe.PipelinedLayer(
        [layers.Dense(3), layers.Dense(2)], num_stages=2, num_microbatches=2
    )


@pytest.mark.parametrize("make", [two_dense, lambda: pipelined_layer(zoo.skips())])
def test_a_ragged_tensor_is_refused_with_the_way_to_pad_it(make):
    ragged = tf.ragged.constant([[1.0], [1.0, 2.0]])
    with pytest.raises(TypeError, match=r"RaggedTensor.*x.to_tensor\(\).*mask_zero"):
        make()(ragged)


def pipelined_layer(model):
    return tfgpipe.PipelinedLayer(model, num_stages=2, num_microbatches=2)


def test_a_side_input_that_no_layer_asks_for():
    with pytest.raises(ValueError, match=r"'lenghts', which no layer asks for"):
        two_dense()(floats(4, 3), lenghts=ids(4))


def test_a_side_input_that_it_was_not_built_with():
    layer = tfgpipe.PipelinedLayer(
        [zoo.Scales(), layers.Dense(2)], num_stages=2, num_microbatches=2
    )
    layer(floats(4, 5, 3))
    with pytest.raises(ValueError, match=r"Expected none; received \['scale'\]"):
        layer(floats(4, 5, 3), scale=floats(4))


def test_a_side_input_for_a_functional_model():
    with pytest.raises(ValueError, match="takes them as inputs of its own"):
        pipelined_layer(zoo.skips())(floats(4, 5), scale=floats(4))


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("scale", [floats(5), floats(1)], ids=["five", "one"])
def test_a_side_input_of_another_batch(built, scale):
    layer = tfgpipe.PipelinedLayer(
        [zoo.Scales(), layers.Dense(2)], num_stages=2, num_microbatches=2
    )
    if built:
        layer(floats(4, 5, 3), scale=floats(4))
    words = rf"Received 4 examples of input 0 and a shape \({len(scale)},\) of scale"
    with pytest.raises(ValueError, match=f"same batch size. {words}"):
        layer(floats(4, 5, 3), scale=scale)


@pytest.mark.parametrize("built", [False, True])
def test_a_side_input_without_rows(built):
    layer = tfgpipe.PipelinedLayer(
        [zoo.Scales(), layers.Dense(2)], num_stages=2, num_microbatches=2
    )
    if built:
        layer(floats(4, 5, 3), scale=floats(4))
    with pytest.raises(ValueError, match=r"scalar, of shape \(\), as scale"):
        layer(floats(4, 5, 3), scale=tf.constant(2.0))


def test_inputs_of_different_batches():
    layer = pipelined_layer(zoo.two_in_two_out())
    with pytest.raises(
        ValueError, match=r"Received 4 examples of a and a shape \(5, 3\)"
    ):
        layer([floats(4, 4), floats(5, 3)])


def test_another_structure_of_inputs_than_built_with():
    class Sums(layers.Layer):
        def call(self, pair):
            return pair[0] + pair[1]

    layer = tfgpipe.PipelinedLayer(
        [Sums(), layers.Dense(2)], num_stages=2, num_microbatches=2
    )
    layer([floats(4, 3), floats(4, 3)])
    words = r"built with. Expected \[Tensor.*\]; received Tensor\(shape=\(4, 3\)\)"
    with pytest.raises(ValueError, match=words):
        layer(floats(4, 3))
    with pytest.raises(ValueError, match=r"received \{a: Tensor.*Nest the"):
        layer({"a": floats(4, 3), "b": floats(4, 3)})


def test_an_optional_input_that_a_list_of_layers_was_built_without():
    layer = tfgpipe.PipelinedLayer(
        [zoo.AddsIfThere(), layers.Dense(2)], num_stages=2, num_microbatches=2
    )
    layer([floats(4, 3), None])
    with pytest.raises(ValueError, match=r"built with. Expected \[Tensor.*, None\]"):
        layer([floats(4, 3), floats(4, 3)])


def test_a_sequential_model_that_is_not_built():
    model = keras.Sequential([layers.Dense(2)], name="unbuilt")
    with pytest.raises(ValueError, match=r"'unbuilt', which is not. Begin it with"):
        tfgpipe.pipeline(model, num_stages=1, num_microbatches=2)


def test_too_few_inputs_for_a_functional_model():
    with pytest.raises(ValueError, match="structure"):
        pipelined_layer(zoo.two_in_two_out())([floats(4, 4)])


def test_a_subclassed_model_is_refused_with_the_ways_out():
    words = r"Chain, which has a `call` of its own.*tfgpipe.functional\(model, x\)"
    for make in (tfgpipe.pipeline, tfgpipe.PipelinedLayer):
        with pytest.raises(TypeError, match=words):
            make(Chain([layers.Dense(2)]), num_stages=1, num_microbatches=2)


@pytest.mark.parametrize("keepdims", [False, True])
def test_an_operation_that_reduces_over_the_batch(keepdims):
    inputs = keras.Input((4,))
    x = layers.Dense(4)(inputs)
    x = x - keras.ops.mean(x, axis=0, keepdims=keepdims)
    with pytest.raises(ValueError, match=r"keep the batch dimension.*Layer 'mean"):
        pipelined_layer(keras.Model(inputs, layers.Dense(2)(x)))


def shared_dropout():
    dropout = layers.Dropout(0.5, seed=1, name="shared")
    inputs = keras.Input((4,))
    x = dropout(layers.Dense(4)(inputs))
    return keras.Model(inputs, dropout(layers.Dense(4)(x)))


def test_a_dropout_shared_by_two_stages():
    model = tfgpipe.pipeline(shared_dropout(), partition=[2, 2], num_microbatches=2)
    words = r"seed_generator_state' in stages.*0.*1"
    with pytest.raises(ValueError, match=words):
        model(floats(4, 4), training=True)


def test_a_dropout_used_twice_is_kept_in_one_stage():
    plain, pipelined = compare.model_pair(
        shared_dropout, num_stages=2, num_microbatches=2
    )
    x = floats(5, 4)
    one_by_one = OneAfterAnother(plain, 2)
    compare.assert_runs_the_same(one_by_one, pipelined, x)
