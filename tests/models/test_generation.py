"""Generated tokens are those of the plain model, called on all positions for each."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.versions import WINDOW
from tfgpipe._compat import executed
from tfgpipe_params.lm.sizes import Transformer
from tfgpipe_params.lm.transformer import decoder_only

layers = keras.layers
VOCABULARY, LENGTH, WIDTH = 13, 10, 8
PROMPTS = [[1, 2, 3], [4, 5, 0, 7, 8], [9, 1], [3, 12, 1, 1]]


@pytest.fixture(autouse=True)
def _fresh_names():
    compare.fresh_names()


def multi_head():
    return layers.MultiHeadAttention(2, 4, dropout=0.3)


def grouped():
    return layers.GroupQueryAttention(4, 4, 2, **WINDOW)


@keras.saving.register_keras_serializable(package="tests")
class Gated(layers.Layer):
    """Attention that is a part of a layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 4)
        self.gate = layers.Dense(WIDTH, activation="sigmoid")

    def build(self, shape):
        self.attention.build(shape, shape)
        self.gate.build(shape)

    def call(self, x, other, **arguments):
        del other
        return self.gate(x) * self.attention(x, x, **arguments)


def decoder(make=multi_head, *, tied=False, dtype=None, causal=True, finish=None):
    """Returns a decoder of three blocks, whose tokens depend on those before."""
    tokens = keras.Input((None,), dtype="int32")
    embedding = keras.layers.ReversibleEmbedding(
        VOCABULARY, WIDTH, tie_weights=True, dtype=dtype
    )
    x = embedding(tokens)
    for _ in range(3):
        y = layers.LayerNormalization(dtype=dtype)(x)
        attention = make()
        x = x + attention(y, y, use_causal_mask=causal)
        y = layers.Dense(12, activation="gelu", dtype=dtype)(x)
        x = x + layers.Dense(WIDTH, dtype=dtype)(y)
    if finish is not None:
        x = finish(x)
    y = embedding(x, reverse=True) if tied else layers.Dense(VOCABULARY)(x)
    return randomized(keras.Model(tokens, y))


def randomized(model):
    random = np.random.default_rng(0)
    for weight in model.trainable_weights:
        if len(weight.shape) > 1:
            scale = 2 / np.sqrt(np.prod(weight.shape[:-1]))
            weight.assign(scale * random.normal(size=weight.shape))
    return model


def varied(logits):
    """Returns tokens that depend on all logits: the largest are often those of 1."""
    return np.argmax(np.cos(5 * logits), axis=-1)


def varied_tokens(logits):
    return tf.argmax(tf.cos(5 * logits), axis=-1)


def by_whole_sequences(model, prompts=PROMPTS, length=LENGTH, choose=varied):
    """Returns what comes after prompts, by calls of a plain model on all positions."""
    rows = [list(prompt) for prompt in prompts]
    for index in range(min(map(len, rows)), length):
        given = np.array([[*row, *[0] * length][:length] for row in rows])
        logits = np.asarray(model(given))[:, index - 1]
        for row, values in zip(rows, logits, strict=True):
            if len(row) == index:
                row.append(choose(values))
    return np.array(rows)


def assert_equal(model, *, num_stages=3, xla=False, **arguments):
    expected = by_whole_sequences(model)
    assert len(np.unique(expected[:, 5:])) > 6
    pipelined = tfgpipe.pipeline(
        model, num_stages=num_stages, num_microbatches=2, jit_compile=xla
    )
    actual = generated(pipelined, **arguments)
    np.testing.assert_array_equal(actual, expected)


def generated(model, **arguments):
    return model.generate(
        PROMPTS, max_length=LENGTH, sampler=varied_tokens, **arguments
    )


@pytest.mark.parametrize("make", [multi_head, grouped, Gated])
@pytest.mark.parametrize(("num_stages", "parts"), [(1, 1), (3, 1), (4, 3)])
def test_tokens_are_those_of_whole_sequences(make, num_stages, parts):
    """Parts of a mini-batch have unequal numbers of examples."""
    assert_equal(decoder(make), num_stages=num_stages, num_microbatches=parts)


@pytest.mark.parametrize("xla", [False, True])
def test_an_embedding_of_the_first_stage_can_be_the_head_of_the_last(xla):
    assert_equal(decoder(tied=True), xla=xla, num_microbatches=2)


def test_the_largest_logits_are_chosen_unless_told_otherwise():
    model = decoder()
    expected = by_whole_sequences(model, choose=np.argmax)
    model = tfgpipe.pipeline(model, num_stages=3, num_microbatches=1)
    actual = model.generate(PROMPTS, max_length=LENGTH)
    np.testing.assert_array_equal(actual, expected)


def test_keys_and_values_have_the_precision_of_their_layers():
    dtype = "mixed_bfloat16"
    model = decoder(
        lambda: layers.MultiHeadAttention(2, 4, dtype=dtype), dtype=dtype, tied=True
    )
    model = tfgpipe.pipeline(model, num_stages=3, num_microbatches=1)
    assert {node.attr["T"].type for node in stored(model)} == {
        tf.bfloat16.as_datatype_enum
    }


def stored(model):
    """Returns the operations that store keys and values."""
    model.generate(PROMPTS, max_length=LENGTH + 1)  # What is checked once.
    graphs = executed.partition_graphs(
        lambda: model.generate(PROMPTS, max_length=LENGTH)
    )
    nodes = (node for graph in graphs for node in graph.node)
    return [node for node in nodes if node.op == "TensorScatterUpdate"]


@pytest.mark.parametrize(("start", "experts"), [(None, 1), (0, 1), (None, 4)], ids=str)
def test_the_trainers_decoders(start, experts):
    """Positions of a length that is theirs; documents; experts."""
    hyper = Transformer(
        num_layers=3,
        width=WIDTH,
        num_heads=2,
        mlp_width=12,
        context=LENGTH,
        num_experts=experts,
    )
    model = decoder_only(hyper, vocabulary_size=VOCABULARY, start=start)
    assert_equal(randomized(model))


def test_keys_and_values_are_on_the_devices_of_their_stages():
    model = tfgpipe.pipeline(decoder(), num_stages=3, num_microbatches=1)
    expected = [
        f"CPU:{stage.index}"
        for stage in model.stages
        for layer in stage.layers
        if isinstance(layer, layers.MultiHeadAttention)
        for _ in ("keys", "values")
    ]
    assert sorted(node.device[-5:] for node in stored(model)) == expected


def test_weights_are_those_of_the_moment():
    model = tfgpipe.pipeline(decoder(), num_stages=3, num_microbatches=1)
    before = generated(model)
    random = np.random.default_rng(1)
    model.set_weights([0.3 * random.normal(size=x.shape) for x in model.get_weights()])
    expected = by_whole_sequences(model.unpipelined())
    assert (before != expected).any()
    after = generated(model)
    np.testing.assert_array_equal(after, expected)
    tfgpipe.recut(model, [1, 1, len(model.pipelined.pipeline.captured.graph.calls) - 2])
    moved = generated(model)
    np.testing.assert_array_equal(moved, expected)


def test_after_a_stop_there_is_nothing():
    model = decoder()
    expected = by_whole_sequences(model)
    stop = expected[0, 5]
    for row, prompt in zip(expected, PROMPTS, strict=True):
        (stops,) = np.nonzero(row[len(prompt) :] == stop)
        if stops.size:
            row[len(prompt) + stops[0] + 1 :] = 0
    assert (expected == 0).sum() > 3
    pipelined = tfgpipe.pipeline(model, num_stages=3, num_microbatches=1)
    actual = generated(pipelined, stop_token_ids=[stop])
    np.testing.assert_array_equal(actual, expected)


def test_it_ends_when_all_examples_have_a_stop():
    calls = []

    def count(logits):
        tf.py_function(lambda: calls.append(1), [], [])
        return tf.fill([len(PROMPTS)], 7)

    model = tfgpipe.pipeline(decoder(), num_stages=3, num_microbatches=1)
    model.generate(PROMPTS, max_length=LENGTH, sampler=count, stop_token_ids=[7])
    # One position after the longest prompt, from that after the shortest on.
    assert len(calls) == 4


class Counts(layers.Layer):
    def call(self, x):
        return x + keras.ops.arange(keras.ops.shape(x)[1], dtype=x.dtype)[:, None]


class AddsWhereMany(layers.Layer):
    """Calls one more attention layer where there is more than one position."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 4)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x, other, use_causal_mask):
        del other, use_causal_mask
        if x.shape[1] == 1:
            return x
        return self.attention(x, x, use_causal_mask=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"causal": False}, "'multi_head_attention' then returns other values"),
        ({"finish": Counts()}, "'counts' then returns other values"),
        (
            {"finish": layers.Conv1D(WIDTH, 3, padding="causal")},
            "'conv1d.*' then returns other values",
        ),
        ({"make": AddsWhereMany}, "'adds_where_many' calls other attention layers"),
    ],
    ids=str,
)
def test_layers_that_cannot_store_are_named(arguments, words):
    model = tfgpipe.pipeline(decoder(**arguments), num_stages=3, num_microbatches=1)
    with pytest.raises(ValueError, match=words):
        model.generate(PROMPTS, max_length=LENGTH)


def embedded(**arguments):
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, **arguments)(tokens)
    return tokens, x


def masked():
    tokens, x = embedded(mask_zero=True)
    x = layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    return keras.Model(tokens, layers.Dense(VOCABULARY)(x))


def without_attention():
    tokens, x = embedded()
    return keras.Model(tokens, layers.LSTM(VOCABULARY, return_sequences=True)(x))


def of_two_texts():
    (one, x), (other, y) = embedded(), embedded()
    return keras.Model([one, other], layers.MultiHeadAttention(2, 4)(x, y))


def classifier():
    tokens, x = embedded()
    x = layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    return keras.Model(tokens, layers.Dense(3)(x[:, -1]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (masked, "a mask reaches 'multi_head_attention'"),
        (without_attention, "in which no layer takes them"),
        (of_two_texts, "models with one input"),
        (classifier, r"outputs of shapes \[\(None, 3\)\]"),
    ],
)
def test_models_that_are_no_decoders_are_refused(make, words):
    model = tfgpipe.pipeline(make(), num_stages=1, num_microbatches=1)
    with pytest.raises(ValueError, match=words):
        model.generate(PROMPTS, max_length=LENGTH)


def test_replicas_are_refused():
    with tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2).scope():
        model = tfgpipe.pipeline(decoder(), num_microbatches=1)
    with pytest.raises(ValueError, match="a pipeline of 2 replicas"):
        model.generate(PROMPTS, max_length=LENGTH)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": ["Once"]}, "Prompts are lists of tokens"),
        ({"prompts": []}, "Received 0 prompts"),
        ({"prompts": [[1], []]}, r"lengths \[1, 0\]"),
        ({"prompts": [[1] * 11]}, r"lengths \[11\] for max_length=10"),
        ({"prompts": [[0.5]]}, "Prompts are lists of tokens"),
        ({"max_length": None}, "any length needs `max_length`"),
        ({"sampler": "top_k"}, "Received 'top_k'"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(arguments, words):
    model = tfgpipe.pipeline(decoder(), num_stages=3, num_microbatches=1)
    arguments = {"prompts": PROMPTS, "max_length": LENGTH, **arguments}
    with pytest.raises(ValueError, match=words):
        model.generate(**arguments)


def test_a_length_is_that_of_the_model():
    hyper = Transformer(
        num_layers=1, width=WIDTH, num_heads=2, mlp_width=12, context=LENGTH
    )
    model = decoder_only(hyper, vocabulary_size=VOCABULARY)
    model = tfgpipe.pipeline(model, num_stages=1, num_microbatches=1)
    with pytest.raises(ValueError, match="Received 12 for a model of length 10"):
        model.generate(PROMPTS, max_length=12)
