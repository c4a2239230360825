"""Layers that treat rows one by one, and those that do not."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers.layer_stacks import STACKS, ResidualBlock
from tfgpipe.runtime import layer_probes

ops = keras.ops


def build(*layers, num_microbatches=2, shape=(None, 4)):
    tfgpipe.PipelinedLayer(
        list(layers), num_stages=len(layers), num_microbatches=num_microbatches
    ).build(shape)


class Layer(keras.layers.Layer):
    """A layer of a function."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


MIXING = {
    "centred": lambda x: x - ops.mean(x, axis=0),
    "softmax over the batch": lambda x: ops.softmax(x, axis=0),
    "scaled by all": lambda x: x / (1.0 + ops.sum(x)),
    "through a reshape": lambda x: x - ops.mean(ops.reshape(x, (-1,))),
    "backwards": lambda x: ops.flip(x, axis=0),
    "products of rows": lambda x: ops.matmul(ops.matmul(x, ops.transpose(x)), x),
    "by their number": lambda x: x * ops.cast(ops.shape(x)[0], x.dtype),
    "in an inner function": tf.function(lambda x: x - tf.reduce_mean(x, axis=0)),
}


@pytest.mark.parametrize("name", list(MIXING))
def test_a_layer_that_mixes_rows_is_named_in_a_warning(name):
    words = (
        r"Layer 'mixer' mixes the examples.*one microbatch at a time.*outside the pipe"
    )
    with pytest.warns(UserWarning, match=words):
        build(keras.layers.Dense(4), Layer(MIXING[name], name="mixer"))


def test_an_operation_that_mixes_rows_is_named_too():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(4)(inputs)
    model = keras.Model(inputs, ops.softmax(hidden, axis=0))
    with pytest.warns(UserWarning, match="'softmax' mixes the examples"):
        tfgpipe.PipelinedLayer(model, num_stages=2, num_microbatches=2)


def test_with_one_microbatch_rows_may_mix():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(keras.layers.Dense(4), Layer(MIXING["centred"]), num_microbatches=1)


class Looks(keras.layers.Layer):
    """Looks at the whole batch for a loss and a safe exponential."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],))

    def call(self, x):
        rows = tf.cast(tf.shape(x)[0], x.dtype)
        flat = tf.reshape(x, (-1, 2))
        self.add_loss(tf.reduce_sum(x) / rows)
        total = tf.reduce_sum(flat * flat, axis=-1)
        x = x * tf.reduce_mean(self.w) + tf.reshape(total, tf.shape(x[:, :2]))[:, :1]
        largest = tf.reduce_max(x)
        return tf.math.log(tf.exp(x - largest)) + largest


def test_rows_that_stay_apart_give_no_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*mixes the examples")
        build(ResidualBlock(4), Looks(), keras.layers.Lambda(lambda x: x * 2.0))
        for stack in STACKS.values():
            layers = stack.make()
            tfgpipe.PipelinedLayer(layers, num_stages=2, num_microbatches=2).build(
                (None, *stack.shape)
            )


def test_many_layers_of_a_kind_are_traced_once():
    traced = []

    class Counted(keras.layers.Layer):
        def call(self, x):
            traced.append(x.shape[0])
            return x

    build(*(Counted() for _ in range(6)))
    assert len(traced) == 6 + 2  # Keras calls each; in training and in inference.


# -- which layers are named and which are not ------------------------------------------


class Whitened(keras.layers.Layer):
    """Normalises the batch in training, as whitening layers of papers do."""

    def call(self, x, training=False):
        return x / (1.0 + ops.std(x, axis=0)) if training else x

    def compute_output_shape(self, shape):
        return shape


class Mixup(keras.layers.Layer):
    """Adds other examples of the batch in training."""

    def __init__(self, shuffle, **kwargs):
        super().__init__(**kwargs)
        self.shuffle = shuffle

    def call(self, x, training=False):
        return 0.7 * x + 0.3 * self.shuffle(x) if training else x


class Draws(keras.layers.Layer):
    """Draws at random in training, with a seed of its own."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function
        self.seed = keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        return self.function(x, self.seed) if training else x


class Centre(keras.layers.Layer):
    def __init__(self, axis, **kwargs):
        super().__init__(**kwargs)
        self.axis = axis

    def call(self, x):
        return x - ops.mean(x, axis=self.axis, keepdims=True)

    def get_config(self):
        return {**super().get_config(), "axis": self.axis}


class Weighted(keras.layers.Layer):
    """A layer of a function of its input and of a weight that starts at zero."""

    def __init__(self, function, shape, **kwargs):
        super().__init__(**kwargs)
        self.function = function
        self.weight_shape = shape

    def build(self, shape):
        self.w = self.add_weight(shape=self.weight_shape, initializer="zeros")

    def call(self, x):
        return self.function(x, self.w)


class Around(keras.layers.Layer):
    """A layer around another, and a function of both."""

    def __init__(self, inner, function=ops.tanh, **kwargs):
        super().__init__(**kwargs)
        self.inner = inner
        self.function = function

    def call(self, x, training=False):
        return x + self.function(self.inner(x, training=training))

    def compute_output_shape(self, shape):
        return shape


class AddsCTC(keras.layers.Layer):
    """Adds the loss of a text recognizer, as the endpoint layers of Keras examples."""

    def call(self, x):
        ones = ops.ones((ops.shape(x)[0],), "int32")
        labels = ops.tile(ones[:, None], (1, 2))
        losses = ops.ctc_loss(labels, x, 2 * ones, x.shape[1] * ones)
        self.add_loss(ops.mean(losses))
        return x


def drop_path(x):
    """As in Swin of the Keras examples."""
    keep = 0.9 + tf.random.uniform([tf.shape(x)[0], 1])
    return x / 0.9 * tf.floor(keep)


def with_positions(x, table):
    """As the patches of EANet, of which only the table tells how many there are."""
    return x + table


def through_numpy(x):
    y = tf.numpy_function(lambda a: 2 * a, [x], tf.float32)
    return tf.ensure_shape(y, x.shape)


def checked(x):
    tf.debugging.assert_greater(tf.reduce_sum(x * x), 1e9)
    tf.print("called on noise")
    return 2 * x


def by_place(x):
    return ops.scan(lambda total, row: (total + row, total), x[0] * 0, x)[1]


def of_strings(x):
    return ops.cast(tf.strings.length(x), "float32")


class FromGenerator(keras.layers.Layer):
    """Draws from a generator of TensorFlow's, which has a state of its own."""

    def build(self, shape):
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, x):
        return x * self.generator.uniform(()) + self.generator.normal(tf.shape(x))


class Inferring(keras.layers.Layer):
    """Subtracts the mean of the batch, but for training."""

    def call(self, x, training=False):
        return x if training else x - ops.mean(x, axis=0, keepdims=True)


def drawn_by(function):
    """Returns a layer that multiplies by what a function of its input draws."""
    return Layer(lambda x: x * ops.cast(function(ops.abs(x) + 1.0), x.dtype))


def of_batch_mean(function):
    """Returns a function of examples and the mean of their batch."""
    return lambda x: function(x / (0.01 + ops.mean(x, axis=0)))


SIGNS = tf.constant([1.0, -1.0, 1.0, -1.0])
DRAWS = {
    "gamma": lambda x: tf.random.gamma([], x),
    "a gamma each": lambda x: tf.random.gamma([1], x)[0],
    "gamma of a seed": lambda x: tf.random.stateless_gamma(tf.shape(x), [1, 2], x),
    "poisson": lambda x: tf.random.poisson([], x),
    "poisson of a seed": lambda x: tf.ensure_shape(
        tf.random.stateless_poisson(tf.shape(x), [1, 2], x), x.shape
    ),
    "truncated": lambda x: tf.random.stateless_parameterized_truncated_normal(
        tf.shape(x), [1, 2], means=x, stddevs=0.1, minvals=-9.0, maxvals=99.0
    ),
    "classes": lambda x: tf.random.categorical(30 * x * SIGNS, 1),
    "classes of a seed": lambda x: tf.random.stateless_categorical(
        30 * x * SIGNS, 4, [1, 2]
    ),
}
BIG = (4100, 4100)  # More than 2^24 entries.
SILENT = {
    "strings": (Layer(of_strings), (3,), "string"),
    "a size that is unknown": (Weighted(with_positions, (16, 4)), (None, 4)),
    "tf.random": (Layer(drop_path),),
    "noise of a seed": (
        Draws(lambda x, s: x + keras.random.normal(ops.shape(x), seed=s)),
    ),
    "dropout of a seed": (Draws(lambda x, s: keras.random.dropout(x, 0.5, seed=s)),),
    "one number of a seed": (Draws(lambda x, s: x * keras.random.uniform((), seed=s)),),
    "a branch by a seed": (
        Draws(
            lambda x, s: ops.cond(
                keras.random.uniform((), seed=s) < 0.5, lambda: x, lambda: 2 * x
            )
        ),
    ),
    "a generator": (FromGenerator(),),
    **{f"drawn: {name}": (drawn_by(draw),) for name, draw in DRAWS.items()},
    "numpy": (Layer(through_numpy),),
    "a print": (Layer(checked),),
    "each example in a loop": (Layer(lambda x: tf.map_fn(tf.cumsum, x)),),
    "a loss that loops": (AddsCTC(), (6, 5)),
    "dropout": (Around(keras.layers.Dropout(0.5)),),
    "batch norm": (Around(keras.layers.BatchNormalization()),),
    "many weights": (Weighted(lambda x, w: ops.tanh(ops.matmul(x, w)), BIG), (4100,)),
    "a large table as it is": (
        Weighted(lambda x, w: x + w[None], (8, 9000)),
        (8, 9000),
    ),
    "a transposed table": (Weighted(lambda x, w: x @ ops.transpose(w), (9, 4)),),
    "a sum over places": (Layer(lambda x: ops.cumsum(x, axis=1)), (5, 4)),
    "a transform": (Layer(lambda x: ops.fft2((x, x))[0]), (5, 4)),
}
MIXES = {
    "whitening": (Whitened(),),
    "mixup": (Mixup(lambda x: ops.flip(x, axis=0)),),
    "mixup at random": (Mixup(tf.random.shuffle),),
    "mixup by a seed": (Draws(lambda x, s: x + keras.random.shuffle(x, seed=s)),),
    "in a wrapper of Keras": (keras.layers.TimeDistributed(Whitened()), (5, 4)),
    "shuffled by a seed": (
        Layer(lambda x: x + tf.random.experimental.stateless_shuffle(x, (0, 1))),
    ),
    "of Keras in training": (keras.layers.MixUp(), (8, 8, 3)),
    "of Keras by an argument": (keras.layers.Softmax(axis=0),),
    "of Keras by an argument from the end": (keras.layers.UnitNormalization(-2),),
    "many weights": (Weighted(lambda x, w: MIXING["centred"](x @ w), BIG), (4100,)),
    "weights of zero": (Weighted(lambda x, w: x + w * ops.mean(x, axis=0), (4,)),),
    "a decision on all": (
        Layer(lambda x: ops.cond(ops.sum(x) > 0, lambda: x, lambda: -x)),
    ),
    "a loop over examples": (Layer(by_place),),
    "in inference": (Inferring(),),
    **{
        f"drawn: {name}": (drawn_by(of_batch_mean(draw)),)
        for name, draw in DRAWS.items()
    },
    "around dropout": (Around(keras.layers.Dropout(0.5), MIXING["by their number"]),),
}


def warnings_of(layer, shape=(4,), dtype="float32", num_microbatches=2):
    inputs = keras.Input(shape, dtype=dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tfgpipe.PipelinedLayer(
            keras.Model(inputs, layer(inputs)),
            num_stages=1,
            num_microbatches=num_microbatches,
        )
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("name", list(SILENT))
def test_a_layer_that_keeps_examples_apart_gives_no_warning(name, capfd):
    found = warnings_of(*SILENT[name])
    if name == "batch norm":
        assert "Batch normalization sees one microbatch" in found.pop()
    assert not found
    assert "noise" not in capfd.readouterr().err


@pytest.mark.parametrize("direction", ["ASCENDING", "DESCENDING"])
@pytest.mark.parametrize("seed", range(40))
def test_an_order_that_is_drawn_mixes_examples_whatever_is_drawn(seed, direction):
    """One order in twenty of six examples keeps each half to itself."""

    def permuted(x, seed):
        drawn = tf.random.stateless_uniform([tf.shape(x)[0]], (seed, 0))
        return x + tf.gather(x, tf.argsort(drawn, direction=direction))

    layer = Layer(lambda x: permuted(x, seed), name="permuted")
    assert "'permuted' mixes the examples" in "".join(warnings_of(layer))


@pytest.mark.parametrize("name", list(MIXES))
def test_a_layer_that_mixes_examples_is_named(name):
    (message,) = warnings_of(*MIXES[name])
    assert f"Layer '{MIXES[name][0].name}' mixes the examples" in message
    modes = {"whitening": "training", "in inference": "inference"}
    assert f"batch in {modes.get(name, '')}" in message or name not in modes


def test_layers_of_a_class_are_probed_for_each_configuration():
    with pytest.warns(UserWarning, match="'over_examples' mixes") as caught:
        build(Centre(1, name="over_places"), Centre(0, name="over_examples"))
    assert len(caught) == 1


def test_a_layer_is_probed_for_each_way_that_it_is_called():
    class Summed(keras.layers.Layer):
        def call(self, x, axis):
            return x + ops.sum(x, axis=axis, keepdims=True)

    inputs, summed = keras.Input((4,)), Summed(name="summed")
    model = keras.Model(inputs, summed(summed(inputs, axis=1), axis=0))
    with pytest.warns(UserWarning, match="'summed' mixes the examples"):
        tfgpipe.PipelinedLayer(model, num_stages=1, num_microbatches=2)


def test_a_probe_makes_no_weights():
    """Of 64 MiB here."""
    layer = Weighted(ops.matmul, (4096, 4096))
    made = []
    original = tf.random.stateless_normal
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tf.random,
            "stateless_normal",
            lambda shape, **kw: made.append(np.prod(shape)) or original(shape, **kw),
        )
        assert not warnings_of(layer, (4096,))
    assert max(made) < 2**16


def test_weights_that_a_probe_cannot_do_without_are_named():
    scaled = Weighted(lambda x, w: x * ops.sum(ops.linalg.norm(w, axis=1)[:4]), BIG)
    assert not warnings_of(scaled)
    transposed = Weighted(lambda x, w: x @ ops.transpose(w), BIG, name="tied")
    (message,) = warnings_of(transposed, (4100,))
    assert "'tied' (NotImplementedError: a weight of 16,810,000 entries" in message


def test_operations_of_one_kind_are_probed_once():
    probed = []
    original = layer_probes._probe
    inputs = keras.Input((4,))
    x = inputs
    for _ in range(5):
        x = x + 0.5 * ops.tanh(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            layer_probes,
            "_probe",
            lambda *a, **kw: probed.append(kw["training"]) or original(*a, **kw),
        )
        tfgpipe.PipelinedLayer(keras.Model(inputs, x), num_stages=2, num_microbatches=2)
    assert probed == [True, False] * 3


def test_a_probe_calls_a_layer_once_a_mode_and_leaves_variables_alone():
    class Counting(keras.layers.Layer):
        calls = 0

        def build(self, shape):
            self.steps = tf.Variable(0.0)

        def call(self, x):
            Counting.calls += 1
            return x + 0.0 * self.steps.assign_add(1.0)

    layer = Counting()
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layer(inputs))
    Counting.calls = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tfgpipe.PipelinedLayer(model, num_stages=1, num_microbatches=2)
    assert Counting.calls == 2
    assert layer.steps.numpy() == 0.0


# -- what a probe runs into -----------------------------------------------------------


def trains(model, shape=(4,), num_microbatches=4, **arguments):
    """Trains a plain model and a pipeline of it; asserts that they stay the same."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, *shape)).astype("float32")
    before = model.get_weights()
    losses = []
    for pipelined in (False, True):
        model.set_weights(before)
        whole = model
        if pipelined:
            layer = tfgpipe.PipelinedLayer(
                model, num_stages=2, num_microbatches=num_microbatches, **arguments
            )
            inputs = keras.Input(shape)
            whole = keras.Model(inputs, layer(inputs))
        whole.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        whole.fit(x, np.zeros_like(whole(x)), batch_size=8, epochs=2, verbose=0)
        losses.append(whole.evaluate(x, np.zeros_like(whole(x)), verbose=0))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def around(layer, shape=(4,)):
    inputs = keras.Input(shape)
    hidden = keras.layers.Dense(4)(inputs)
    return keras.Model(inputs, keras.layers.Dense(2)(layer(hidden)))


class BrokenConfig(Layer):
    def get_config(self):
        return {"rate": self.rate_that_is_not_there}


def test_a_layer_with_a_broken_config_trains():
    """As the decoder of keras-hub's Llama and the blocks of its Swin have."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trains(around(BrokenConfig(ops.tanh)))


def test_layers_without_a_config_are_each_probed():
    layers = [Layer(function) for function in (ops.tanh, MIXING["centred"])]
    with pytest.warns(UserWarning, match=f"'{layers[1].name}' mixes the examples"):
        build(*layers)


class Picky(keras.layers.Layer):
    """Takes even numbers of examples alone."""

    def call(self, x):
        pairs = ops.reshape(ops.tanh(x), (-1, 2, x.shape[1]))
        return ops.reshape(pairs, (-1, x.shape[1]))


UNKNOWN = r"Whether each layer treats the examples.*Received '{}'.*\({}.*compare them"


def test_a_layer_that_cannot_be_probed_is_named_in_a_warning_and_trains():
    words = UNKNOWN.format("picky", "InvalidArgument.*12 values")
    with pytest.warns(UserWarning, match=words) as caught:
        trains(around(Picky(name="picky")))
    assert sum("treats the examples" in str(w.message) for w in caught) == 1


def test_a_layer_that_rejects_noise_is_named_in_a_warning():
    def looked_up(x):
        return tf.gather(x, tf.cast(x, "int32") + 9, axis=1, batch_dims=1)

    with pytest.warns(UserWarning, match=UNKNOWN.format("table", "InvalidArgument")):
        build(keras.layers.Dense(4), Layer(looked_up, name="table"))


def test_a_layer_with_effects_is_not_tried_and_named_in_a_warning():
    def each_by_itself(x):
        return tf.map_fn(lambda row: row + tf.random.normal([4]), x)

    words = UNKNOWN.format("noisy", ".*RandomStandardNormal")
    with pytest.warns(UserWarning, match=words):
        build(keras.layers.Dense(4), Layer(each_by_itself, name="noisy"))


class WrongShape(Layer):
    """Declares an output without the batch, as an embedding in keras-hub's MMDiT."""

    def compute_output_shape(self, input_shape):
        return (1, *input_shape[1:])


def test_a_layer_that_declares_a_wrong_shape_trains():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(4)(inputs)
        wrong = WrongShape(ops.tanh)(hidden)
        added = keras.layers.Add()([wrong, hidden])
        trains(keras.Model(inputs, keras.layers.Dense(2)(added)))


def test_a_layer_that_changes_the_batch_size_is_refused_with_shapes():
    words = r"must keep the batch.*Layer 'pairs' maps shape \(6, 4\) to \(3, 8\)"
    with pytest.raises(ValueError, match=words):
        build(
            keras.layers.Dense(4),
            Layer(lambda x: ops.reshape(x, (-1, 8)), name="pairs"),
        )


def test_with_one_microbatch_an_operation_may_change_the_batch_size():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(4)(inputs)
    hidden = hidden - ops.mean(hidden, axis=0)
    trains(keras.Model(inputs, keras.layers.Dense(2)(hidden)), num_microbatches=1)


# -- outputs with the batch size as another axis --------------------------------------


def compared():
    """Returns a model of all examples with all, as CLIP ends in."""
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(4)(inputs)
    head = Layer(lambda x: ops.matmul(x, ops.transpose(x)), name="head")
    return keras.Model(inputs, head(hidden) * 2.0)


def test_an_output_of_a_wrong_shape_is_refused():
    words = r"together along the first axis. Layer 'head'.*shapes \(6, 6\).*outside"
    with pytest.raises(ValueError, match=words):
        tfgpipe.PipelinedLayer(compared(), num_stages=2, num_microbatches=2)


def test_with_one_microbatch_an_output_may_be_as_wide_as_the_batch():
    layer = tfgpipe.PipelinedLayer(compared(), num_stages=2, num_microbatches=1)
    assert layer(np.ones((8, 4), "float32")).shape == (8, 8)


# -- losses that layers add -----------------------------------------------------------


class AddsLoss(keras.layers.Layer):
    """Adds a loss in training."""

    def __init__(self, function, draws=False, **kwargs):
        super().__init__(**kwargs)
        self.function = function
        self.dropout = keras.layers.Dropout(0.5, seed=1) if draws else None

    def call(self, x, training=False):
        if training:
            hidden = self.dropout(x, training=True) if self.dropout else x
            self.add_loss(self.function(hidden))
        return x


def in_order(x):
    """Its values for an example depend on those before it."""
    return ops.mean(ops.square(ops.cumsum(x, axis=0)))


def warnings_of_a_step(layer, *, owned, num_microbatches=2):
    model = around(layer)
    arguments = {"num_stages": 2, "num_microbatches": num_microbatches}
    if owned:
        whole = tfgpipe.PipelinedModel(model, **arguments)
    else:
        whole = keras.Sequential([tfgpipe.PipelinedLayer(model, **arguments)])
    whole.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole.fit(np.ones((8, 4)), np.ones((8, 2)), batch_size=4, verbose=0)
    return [str(w.message) for w in caught if "adds" in str(w.message)]


@pytest.mark.parametrize("owned", [True, False])
def test_an_added_loss_that_is_no_mean_is_named_in_a_warning(owned):
    (message,) = warnings_of_a_step(AddsLoss(in_order, name="ordered"), owned=owned)
    assert "Layer 'ordered' adds a loss that is no mean" in message
    assert "num_microbatches=2" in message


def test_a_regularizer_of_activities_is_a_mean_over_the_batch():
    """Keras divides it by the batch size."""
    layer = keras.layers.Dense(4, activity_regularizer="l2", name="decayed")
    assert not warnings_of_a_step(layer, owned=False)


def test_a_regularizer_of_activities_of_ones_own():
    def largest(x):
        return ops.max(x) * ops.cast(ops.shape(x)[0], x.dtype)

    layer = keras.layers.Dense(4, activity_regularizer=largest, name="sparse")
    assert not warnings_of_a_step(layer, owned=False)
    (message,) = warnings_of_a_step(layer, owned=True)
    assert "Layer 'sparse' adds a loss that couples the examples" in message


@pytest.mark.parametrize(
    ("loss", "owned"),
    [
        (ops.mean, True),
        (lambda x: 0.5 + ops.mean(x**2), False),
        (ops.sum, False),
        (lambda x: ops.sum(x, axis=-1), True),
    ],
)
def test_an_added_loss_that_is_a_mean_or_a_sum_gives_no_warning(loss, owned):
    assert not warnings_of_a_step(AddsLoss(loss), owned=owned)


def test_with_one_microbatch_an_added_loss_may_be_anything():
    assert not warnings_of_a_step(AddsLoss(ops.sum), owned=False, num_microbatches=1)


def test_an_added_loss_of_random_numbers_is_compared_with_the_same_numbers():
    for reduce in (ops.mean, ops.sum):
        assert not warnings_of_a_step(AddsLoss(reduce, draws=True), owned=False)
    layer = AddsLoss(in_order, draws=True, name="noisy")
    (message,) = warnings_of_a_step(layer, owned=False)
    assert "Layer 'noisy' adds a loss that is no mean or sum" in message
