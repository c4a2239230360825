"""Floating point operations, against numbers worked out by hand."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from tfgpipe.graph import flops, partitioner
from tfgpipe.stage.joint import trace_joint

layers = keras.layers


def graph_of(function, *specs, autograph=False):
    traced = tf.function(function, autograph=autograph)
    return traced.get_concrete_function(*specs).graph


def count(function, *shapes, autograph=False):
    """Counts what the results of a function of tensors of these shapes depend on."""
    specs = [tf.TensorSpec(shape) for shape in shapes]
    graph = graph_of(function, *specs, autograph=autograph)
    inputs = {node.name: tuple(node.input) for node in graph.as_graph_def().node}
    fetches = [tensor.name for tensor in graph.outputs]
    run = partitioner.subgraph(inputs, fetches=fetches, feeds=())
    return flops.count(graph, run.operations)


def gradient(layer, *, of_input=True):
    """Returns a function from a layer's input to its output and its gradients."""

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        sources = [*([x] if of_input else []), *layer.trainable_variables]
        return y, tape.gradient(y, sources)

    return run


def built(layer, shape):
    layer.build(shape)
    return layer


def product(x):
    """Multiplies `[n, 3]` by `[3, 3]`: 18 operations a row."""
    return tf.matmul(x, tf.ones([3, 3]))


def test_a_dense_layer():
    layer = built(layers.Dense(5, activation="relu"), [4, 3])
    assert count(layer, [4, 3]) == 2 * 4 * 3 * 5 + 4 * 5 + 4 * 5


def test_an_unknown_batch_counts_as_one():
    layer = built(layers.Dense(5), [None, 3])
    assert count(layer, [None, 3]) == 2 * 3 * 5 + 5


def test_a_tensor_of_unknown_rank_counts_as_one_element():
    assert count(tf.nn.relu, None) == 1


def test_the_gradient_of_a_dense_layer_takes_two_more_products():
    layer = built(layers.Dense(5, use_bias=False), [4, 3])
    assert count(gradient(layer), [4, 3]) == 3 * (2 * 4 * 3 * 5)
    assert count(gradient(layer, of_input=False), [4, 3]) == 2 * (2 * 4 * 3 * 5)


def test_a_traced_stage():
    layer = built(layers.Dense(5, use_bias=False), [4, 3])
    traced = trace_joint(
        lambda inputs: {0: layer(inputs[0])},
        input_specs=[tf.TensorSpec([4, 3])],
        weights=layer.trainable_variables,
        state=[],
    )
    assert flops.count(traced.graph) == 3 * (2 * 4 * 3 * 5)
    (output,) = traced.forward.outputs
    assert flops.count(traced.graph, [partitioner.op_name(output)]) == 120


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("batch", [[], [6]])
def test_matrix_products(batch, transpose_a, transpose_b):
    a = [5, 2] if transpose_a else [2, 5]
    b = [7, 5] if transpose_b else [5, 7]
    found = count(
        lambda x, y: tf.matmul(x, y, transpose_a=transpose_a, transpose_b=transpose_b),
        [*batch, *a],
        [*batch, *b],
    )
    assert found == (6 if batch else 1) * 2 * (2 * 7) * 5


@pytest.mark.parametrize(
    ("equation", "shapes", "expected"),
    [
        ("ab,bc->ac", ([2, 3], [3, 4]), 2 * (2 * 3 * 4)),
        ("ab,cb->", ([2, 3], [4, 3]), 2 * (2 * 3 * 4)),
        ("...ab,bc->...ac", ([5, 6, 2, 3], [3, 4]), 2 * (5 * 6 * 2 * 3 * 4)),
        ("a...b,...bc->a...c", ([2, 5, 6, 3], [6, 3, 4]), 2 * (2 * 5 * 6 * 3 * 4)),
        ("a,b->ab", ([2], [3]), 2 * 3),
        ("ab->a", ([2, 3],), 2 * 3),
        ("ab->ba", ([2, 3],), 0),
    ],
)
def test_einsum(equation, shapes, expected):
    found = count(
        lambda *operands: tf.raw_ops.Einsum(inputs=operands, equation=equation),
        *shapes,
    )
    assert found == expected


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        # Outputs times what each sums over, twice.
        (layers.Conv1D(4, 3), [2, 9, 5], 2 * (2 * 7 * 4) * (3 * 5)),
        (layers.Conv2D(4, 3), [2, 8, 8, 6], 2 * (2 * 6 * 6 * 4) * (3 * 3 * 6)),
        (
            layers.Conv2D(4, 3, padding="same"),
            [2, 8, 8, 6],
            2 * (2 * 8 * 8 * 4) * (3 * 3 * 6),
        ),
        (layers.Conv2D(4, 3, strides=2), [2, 9, 9, 6], 2 * (2 * 4 * 4 * 4) * 54),
        (layers.Conv2D(4, 3, dilation_rate=2), [2, 8, 8, 6], 2 * (2 * 16 * 4) * 54),
        (layers.Conv2D(4, 3, groups=2), [2, 8, 8, 6], 2 * (2 * 36 * 4) * (9 * 3)),
        (layers.DepthwiseConv2D(3), [2, 8, 8, 6], 2 * (2 * 6 * 6 * 6) * 9),
        (
            layers.DepthwiseConv2D((3, 5), strides=2, depth_multiplier=2),
            [2, 9, 9, 6],
            2 * (2 * 4 * 3 * 6 * 2) * (3 * 5),
        ),
        (layers.Conv3D(4, 2), [2, 4, 5, 6, 3], 2 * (2 * 3 * 4 * 5 * 4) * (8 * 3)),
        # Each input goes into all outputs that its filter reaches.
        (
            layers.Conv2DTranspose(4, 3, strides=2),
            [2, 5, 5, 3],
            2 * (2 * 5 * 5 * 3) * (3 * 3 * 4),
        ),
    ],
)
def test_convolutions_and_their_gradients(layer, shape, expected):
    layer = built(
        type(layer).from_config({**layer.get_config(), "use_bias": False}), shape
    )
    assert count(layer, shape) == expected
    assert count(gradient(layer), shape) == 3 * expected


def test_a_convolution_with_channels_first():
    found = count(
        lambda x, f: tf.nn.conv2d(x, f, 1, "VALID", data_format="NCHW"),
        [2, 6, 8, 8],
        [3, 3, 6, 4],
    )
    assert found == 2 * (2 * 4 * 6 * 6) * (3 * 3 * 6)


def test_multi_head_attention():
    B, T, D, N, H = 2, 7, 8, 3, 4
    layer = layers.MultiHeadAttention(N, H, use_bias=False, flash_attention=False)
    layer.build([B, T, D], [B, T, D])
    projections = 4 * 2 * (B * T * N * H) * D
    scores = B * N * T * T
    products = 2 * 2 * scores * H
    scaled, softmax = scores, 5 * scores
    expected = projections + products + scaled + softmax
    assert count(lambda x: layer(x, x), [B, T, D]) == expected


def lstm_step(B, C, H):
    """Four gates, of a product of inputs and one of states, and what combines them."""
    products = 2 * B * (C + H) * 4 * H
    sums = 2 * B * 4 * H
    sigmoids, tanhs, multiplications, additions = 3, 2, 3, 1
    return products + sums + B * H * (sigmoids + tanhs + multiplications + additions)


@pytest.mark.parametrize("T", [1, 7])
@pytest.mark.parametrize("return_sequences", [False, True])
def test_an_lstm_counts_every_step(T, return_sequences):
    B, C, H = 2, 3, 4
    layer = layers.LSTM(H, return_sequences=return_sequences, use_cudnn=False)
    layer.build([B, T, C])
    assert count(layer, [B, T, C]) == T * lstm_step(B, C, H)
    assert count(layer, [None, T, C]) == T * lstm_step(1, C, H)
    assert count(tf.function(layer), [B, T, C]) == T * lstm_step(B, C, H)


def test_a_loop_of_unknown_length_counts_once():
    layer = built(layers.LSTM(4, use_cudnn=False), [2, None, 3])
    assert count(layer, [2, None, 3]) == lstm_step(2, 3, 4)


@pytest.mark.parametrize("wrap", [lambda layer: layer, tf.function])
def test_the_gradient_of_a_recurrent_layer_counts_every_step(wrap):
    B, T, C, H = 2, 7, 3, 4
    layer = layers.SimpleRNN(H, activation="linear", use_bias=False)
    layer.build([B, T, C])
    inner = wrap(layer)

    def forward_and_gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = inner(x)
        return y, tape.gradient(y, [x, *layer.trainable_variables])

    products = 2 * B * C * H + 2 * B * H * H
    # The forward adds the two; the gradient adds up over time those of the weights,
    # and those of a state, from the step after and from the output.
    sums = B * H + (C * H + H * H) + B * H
    assert count(forward_and_gradient, [B, T, C]) == T * (3 * products + sums)


def test_the_gradient_of_an_lstm_takes_two_more_products_a_step():
    def count_products(H):
        layer = built(layers.LSTM(H, use_cudnn=False), [2, 7, 3])
        return count(gradient(layer), [2, 7, 3])

    # In H the count is a polynomial, products of states the only squares save for the
    # sum over time of the gradient of their weights.
    squares = (count_products(8) - 2 * count_products(6) + count_products(4)) / 8
    assert squares == 7 * (3 * 2 * 2 * 4 + 4)


@pytest.mark.parametrize("op", ["CudnnRNNV3", "CudnnRNNBackpropV3"])
def test_a_fused_lstm_multiplies_each_parameter_at_every_step(op):
    B, T, C, H = 2, 7, 3, 4
    num_parameters = 4 * H * (C + H + 2)
    inputs = {
        "input": [T, B, C],
        "input_h": [1, B, H],
        "input_c": [1, B, H],
        "params": [num_parameters],
    }
    if op == "CudnnRNNBackpropV3":
        inputs |= {
            "output": [T, B, H],
            "output_h": [1, B, H],
            "output_c": [1, B, H],
            "output_backprop": [T, B, H],
            "output_h_backprop": [1, B, H],
            "output_c_backprop": [1, B, H],
            "reserve_space": [0],
        }

    def fused(*tensors):
        arguments = dict(zip(inputs, tensors, strict=True))
        arguments["sequence_lengths"] = tf.fill([B], T)
        if op == "CudnnRNNBackpropV3":
            arguments["host_reserved"] = tf.zeros([0], tf.int8)
        return getattr(tf.raw_ops, op)(**arguments)[0]

    times = 1 if op == "CudnnRNNV3" else 2
    assert count(fused, *inputs.values()) == times * 2 * T * B * num_parameters


def rising(x):
    return tf.while_loop(lambda i, _: i < 5, lambda i, x: (i + 1, product(x)), (0, x))


def up_to(x):
    return tf.while_loop(lambda i, _: i <= 5, lambda i, x: (i + 2, product(x)), (0, x))


def falling(x):
    return tf.while_loop(lambda i, _: i >= 0, lambda i, x: (i - 1, product(x)), (4, x))


def limited(x):
    return tf.while_loop(
        lambda x: tf.reduce_sum(x) < 1.0,
        lambda x: (product(x),),
        (x,),
        maximum_iterations=6,
    )


def ranging(x):
    for _ in tf.range(2, 12, 3):
        x = product(x)
    return x


def as_long_as_wide(x):
    for _ in tf.range(tf.shape(x)[-1] - 1):
        x = product(x)
    return x


def swapped(x):
    """Counts up on the other side of both the comparison and the addition."""
    return tf.while_loop(
        lambda i, _: tf.greater(5, i),
        lambda i, x: (tf.add(2, i), product(x)),
        (0, x),
    )


def bounded_by_an_element(x):
    for _ in tf.range(tf.constant([9, 3])[1]):
        x = product(x)
    return x


def bounded_by_data(x):
    for _ in tf.range(tf.shape(x)[tf.cast(x[0, 0], tf.int32)]):
        x = product(x)
    return x


def away(x):
    """Counts away from the bound that it names; what ends it is not known."""
    return tf.while_loop(
        lambda i, x: tf.logical_and(i < 5, tf.reduce_sum(x) < 1.0),
        lambda i, x: (i - 1, product(x)),
        (0, x),
    )


def nested(x):
    for _ in tf.range(2):
        for _ in tf.range(3):
            x = product(x)
    return x


def never(x):
    for _ in tf.range(0):
        x = product(x)
    return x


def until(x):
    while tf.reduce_sum(x) < 1.0:
        x = product(x)
    return x


@pytest.mark.parametrize(
    ("loop", "trips"),
    [
        (rising, 5),
        (up_to, 3),
        (falling, 5),
        (limited, 6),
        (ranging, 4),
        (as_long_as_wide, 2),
        (swapped, 3),
        (bounded_by_an_element, 3),
        (bounded_by_data, 1),
        (away, 1),
        (nested, 6),
        (never, 0),
        (until, 1),
    ],
)
def test_a_loop_counts_as_often_as_its_body_runs(loop, trips):
    def forward_and_gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nest.flatten(loop(x))[-1]
        return y, tape.gradient(y, x)

    assert count(loop, [None, 3], autograph=True) == trips * 18
    # The gradient of a loop inside a loop counts the inner one once.
    back = trips / 3 if loop is nested else trips
    found = count(forward_and_gradient, [None, 3], autograph=True)
    assert found == trips * 18 + back * 18


def test_a_map_counts_every_element():
    assert count(lambda x: tf.map_fn(product, x), [5, 4, 3]) == 5 * 4 * 18


def test_a_conditional_counts_as_its_most_expensive_branch():
    def conditional(x):
        predicate = tf.reduce_sum(x) > 0.0
        return tf.cond(predicate, lambda: x, lambda: product(product(x)))

    assert count(conditional, [4, 3]) == 4 * 3 + 1 + 2 * (4 * 18)


def test_a_choice_of_several_counts_as_its_most_expensive_branch():
    def choose(x, index):
        branches = [lambda: x, lambda: product(product(x)), lambda: product(x)]
        return tf.switch_case(tf.cast(index, tf.int32), branches)

    assert count(choose, [4, 3], []) == 2 * (4 * 18)


def test_a_conditional_of_a_batched_product_counts_what_it_sums_over():
    def conditional(x, y):
        return tf.cond(
            tf.shape(x)[0] > 3,
            lambda: tf.raw_ops.BatchMatMulV2(x=x, y=y, adj_x=True),
            lambda: tf.zeros([6, 2, 7]),
        )

    # [6, 5, 2] transposed times [6, 5, 7]: sums over 5 of each.
    assert count(conditional, [6, 5, 2], [6, 5, 7]) == 2 * (6 * 2 * 7) * 5


def test_traffic_is_what_all_but_products_read_and_write():
    def body(x):
        y = tf.nn.relu(x)  # Reads and writes 12 numbers of 4 bytes.
        y = tf.reshape(y, [3, 4]) @ tf.ones([4, 3])  # Left out.
        half = tf.cast(y, tf.float16)  # Reads 9 of 4 bytes and writes 9 of 2.
        index = tf.shape(x) + 1  # No floating point.
        return tf.concat([half, half], 0), index  # Reads and writes 18 of 2 bytes.

    expected = 2 * 12 * 4 + 9 * (4 + 2) + 2 * 18 * 2
    spec = tf.TensorSpec([4, 3])
    assert flops.traffic_bytes(graph_of(body, spec)) == expected
    called = graph_of(lambda x: tf.function(body)(x), spec)
    assert flops.traffic_bytes(called) == expected


def test_functions_are_followed():
    inner = tf.function(product)
    outer = tf.function(lambda x: inner(inner(x)))
    assert count(outer, [4, 3]) == 2 * (4 * 18)


def test_of_a_function_what_nothing_depends_on_does_not_count():
    def inner(x):
        product(x)
        return tf.nn.relu(x)

    assert count(tf.function(inner), [4, 3]) == 4 * 3


def test_of_a_function_what_an_effect_depends_on_counts():
    def inner(x):
        tf.print(product(x))
        return tf.nn.relu(x)

    assert count(tf.function(inner), [4, 3]) == 4 * 18 + 4 * 3


def test_only_the_operations_named_count():
    graph = graph_of(
        lambda x: tf.nn.relu(tf.nn.elu(x, name="elu"), name="relu"),
        tf.TensorSpec([4, 3]),
    )
    assert flops.count(graph, ["relu"]) == 12
    assert flops.count(graph, []) == 0
    assert flops.count(graph) == 24


def test_moving_and_describing_data_counts_nothing():
    def move(x):
        y = tf.transpose(tf.reshape(x, [3, 4]))
        y = tf.concat([y, tf.zeros_like(y)], 0)[1:, ::-1]
        y = tf.stack(tf.unstack(tf.pad(tf.tile(y, [2, 1]), [[1, 1], [0, 0]])))
        return tf.gather(y, [0, 2]), tf.cast(tf.shape(y), tf.float32)

    assert count(move, [4, 3]) == 0


def test_embedding_counts_nothing():
    layer = built(layers.Embedding(5, 4), [2, 7])
    graph = graph_of(layer, tf.TensorSpec([2, 7], tf.int32))
    assert flops.count(graph) == 0


def test_arithmetic_on_integers_counts_nothing():
    graph = graph_of(lambda x: x * x + 1, tf.TensorSpec([4], tf.int32))
    assert flops.count(graph) == 0


def test_a_reduction_counts_its_inputs():
    assert count(lambda x: tf.reduce_mean(x, axis=1), [4, 3]) == 4 * 3


def test_a_softmax_counts_several_for_each_element():
    assert count(tf.nn.softmax, [4, 3]) == 5 * 4 * 3


def test_half_precision_counts_the_same():
    graph = graph_of(product_in_half, tf.TensorSpec([4, 3], tf.bfloat16))
    assert flops.count(graph) == 4 * 18


def product_in_half(x):
    return tf.matmul(x, tf.ones([3, 3], tf.bfloat16))
