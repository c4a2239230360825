"""Losses that couple the examples of a mini-batch: exact under every schedule."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.reference import InMicrobatches

layers, ops = keras.layers, keras.ops
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("double_precision"),
]

ROWS = 12
X = np.random.default_rng(0).normal(size=(ROWS, 8))
Y = np.random.default_rng(1).uniform(size=(ROWS, 4))


def contrastive(y, p):
    """InfoNCE of the first half of a row with the second half of all rows."""
    a, b = ops.split(p, 2, axis=1)
    similar = ops.matmul(ops.normalize(a, axis=1), ops.transpose(ops.normalize(b)))
    labels = ops.arange(ops.shape(p)[0])
    entropy = keras.losses.sparse_categorical_crossentropy
    return entropy(labels, 5 * similar, from_logits=True) + 0 * ops.mean(y, axis=-1)


def dice(y, p):
    p = ops.sigmoid(p)
    return 1 - 2 * ops.sum(y * p) / (ops.sum(y) + ops.sum(p))


class PerExample(keras.Loss):
    """As above, of each example, which sample weights weigh."""

    def call(self, y, p):
        return contrastive(y, p)


def model(*amid):
    """Returns Dense layers with others amid them."""
    made = keras.Sequential([keras.Input((8,))])
    dense = [layers.Dense(n, activation="tanh") for n in (16, 16, 8)]
    for layer in (dense[0], *amid, *dense[1:], layers.Dense(4)):
        made.add(layer)
    return made


def trained(made, loss, *, weights=None, **compiled):
    """Returns losses and metrics of three steps and of an evaluation."""
    made.compile(keras.optimizers.SGD(0.1), loss, metrics=["mae"], **compiled)
    history = made.fit(
        X, Y, ROWS, epochs=3, sample_weight=weights, shuffle=False, verbose=0
    ).history
    evaluated = made.evaluate(X, Y, ROWS, sample_weight=weights, verbose=0)
    return {**history, "evaluated": evaluated}


def assert_alike(plain, pipelined, found):
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], 1e-6, err_msg=name)
    compare.assert_allclose(plain.variables, pipelined.variables, 1e-10, 1e-10)


@pytest.mark.parametrize("loss", [contrastive, dice])
@pytest.mark.parametrize(
    ("schedule", "K"),
    [
        *(("gpipe", 2), ("1f1b", 4), ("interleaved", 4), ("zero_bubble", 3)),
        *(("dualpipe_v", 4), ("1f1b+offload", 3), ("auto", 3)),
    ],
)
def test_all_is_as_in_the_plain_model(schedule, K, loss):
    plain = model()
    pipelined = tfgpipe.pipeline(
        model(), num_stages=K, num_microbatches=4, schedule=schedule
    )
    compare.copy_state(plain, pipelined)
    assert_alike(plain, pipelined, [trained(x, loss) for x in (plain, pipelined)])


def test_microbatches_of_unequal_sizes():
    plain, pipelined = (
        model(),
        tfgpipe.pipeline(
            model(), num_stages=2, num_microbatches=5, schedule="1f1b", remat="none"
        ),
    )
    compare.copy_state(plain, pipelined)
    found = [trained(x, contrastive) for x in (plain, pipelined)]
    assert_alike(plain, pipelined, found)


def test_sample_weights_and_loss_weights():
    weights = np.linspace(0.5, 2, ROWS)
    plain = model()
    pipelined = tfgpipe.pipeline(
        model(), num_stages=2, num_microbatches=3, schedule="1f1b"
    )
    compare.copy_state(plain, pipelined)
    found = [
        trained(x, PerExample(), weights=weights, loss_weights=[0.5])
        for x in (plain, pipelined)
    ]
    assert_alike(plain, pipelined, found)


@pytest.mark.nightly
def test_statistics_and_draws_are_those_of_the_microbatches():
    """And move once, though there are two sweeps; layers' losses count once."""

    def amid():
        made = model(
            layers.BatchNormalization(),
            layers.Dropout(0.3, seed=1),
            layers.Dense(16, activity_regularizer="l2", kernel_regularizer="l2"),
        )
        made.compile("sgd", contrastive)
        return made

    verified = tfgpipe.verify(
        amid(), (X, Y), num_stages=3, num_microbatches=4, schedule="zero_bubble"
    )
    assert verified.is_exact
    assert not verified.is_equal
    assert max(x.deviation for x in verified.by_microbatch) < 1e-10
    assert [x.why for x in verified.causes] == [
        "mixes examples",
        "draws random numbers",
    ]


def test_the_oracle_of_microbatches_says_the_same():
    def make():
        keras.utils.set_random_seed(3)
        return model(layers.BatchNormalization())

    plain = InMicrobatches(make(), 4)
    pipelined = tfgpipe.pipeline(
        make(), num_stages=2, num_microbatches=4, schedule="1f1b"
    )
    found = []
    for each in (plain, pipelined):
        each.compile(keras.optimizers.SGD(0.1), contrastive)
        found.append(each.fit(X, Y, ROWS, epochs=2, shuffle=False, verbose=0).history)
    np.testing.assert_allclose(found[0]["loss"], found[1]["loss"], 1e-6)
    compare.assert_allclose(plain.model.variables, pipelined.variables, 1e-9, 1e-9)


def two_towers():
    """Two outputs in a dictionary, of which one loss is a mean over examples."""
    image, text = (keras.Input((8,), name=x) for x in ("a", "b"))
    towers = []
    for x in (image, text):
        for n in (16, 4):
            x = layers.Dense(n, activation="tanh")(x)
        towers.append(x)
    joined = layers.Concatenate()(towers)
    count = layers.Dense(1)(joined)
    return keras.Model({"a": image, "b": text}, {"pair": joined, "count": count})


def test_several_outputs_of_which_one_loss_couples():
    x = {"a": X, "b": X[:, ::-1].copy()}
    y = {"pair": np.zeros((ROWS, 8)), "count": Y[:, :1]}
    plain, pipelined = compare.model_pair(
        two_towers, num_stages=2, num_microbatches=4, schedule="1f1b"
    )
    found = []
    for each in (plain, pipelined):
        each.compile(
            keras.optimizers.SGD(0.1),
            {"pair": contrastive, "count": "mse"},
            loss_weights={"pair": 1.0, "count": 0.3},
            metrics={"count": "mae"},
        )
        found.append(each.fit(x, y, ROWS, epochs=3, shuffle=False, verbose=0).history)
    assert {"loss", "pair_loss", "count_loss", "count_mae"} <= found[0].keys()
    assert_alike(plain, pipelined, found)


def with_classes():
    """An output that is of integers, and has no loss."""
    x = keras.Input((8,))
    y = layers.Dense(4)(layers.Dense(16, activation="tanh")(x))
    return keras.Model(x, {"scores": y, "classes": ops.argmax(y, axis=-1)})


def test_outputs_without_a_gradient():
    plain, pipelined = compare.model_pair(
        with_classes, num_stages=2, num_microbatches=4, schedule="1f1b"
    )
    found = []
    for each in (plain, pipelined):
        each.compile(keras.optimizers.SGD(0.1), {"scores": dice})
        y = {"scores": Y}
        found.append(each.fit(X, y, ROWS, epochs=3, shuffle=False, verbose=0).history)
    assert_alike(plain, pipelined, found)


def masked():
    x = keras.Input((6,), dtype="int32")
    y = layers.Embedding(9, 8, mask_zero=True)(x)
    for _ in range(3):
        y = layers.Dense(8, activation="tanh")(y)
    return keras.Model(x, y)


def spread(y, p):
    """Of each position of each example, with the mean over all examples in it."""
    return ops.mean(ops.square(p - ops.mean(p, axis=0) - y), axis=-1)


def test_masks_of_outputs_count():
    x = np.random.default_rng(2).integers(0, 9, (ROWS, 6))
    x[:, :2] = 1
    y = np.random.default_rng(3).normal(size=(ROWS, 6, 8))
    plain, pipelined = compare.model_pair(
        masked, num_stages=2, num_microbatches=4, schedule="1f1b"
    )
    found = []
    for each in (plain, pipelined):
        each.compile(keras.optimizers.SGD(0.1), spread)
        found.append(each.fit(x, y, ROWS, epochs=3, shuffle=False, verbose=0).history)
    assert_alike(plain, pipelined, found)


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_step_in_half_precision_is_the_plain_one(policy):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)
    made = model()
    made.compile("adam", contrastive)
    data = X.astype("float32"), Y.astype("float32")
    verified = tfgpipe.verify(made, data, num_stages=2, num_microbatches=4)
    assert verified.is_equal
    gradients = [x for x in verified.comparisons if x.kind == "gradient"]
    assert max(x.deviation for x in gradients) > 0


def test_what_it_costs_is_said():
    pipelined = tfgpipe.pipeline(model(), num_stages=2, num_microbatches=4)
    pipelined.compile("sgd", dice)
    with pytest.warns(UserWarning, match="Loss 'dice' couples .* a third of a step"):
        pipelined.fit(X, Y, ROWS, verbose=0)


def test_replicas_are_refused():
    strategy = tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2)
    with strategy.scope():
        pipelined = tfgpipe.pipeline(model(), num_stages=2, num_microbatches=3)
        pipelined.compile("sgd", dice)
    with pytest.raises(ValueError, match="Replicas each take the loss of their own"):
        pipelined.fit(X, Y, ROWS, verbose=0)


def test_a_loss_that_is_not_finite_is_not_hidden():
    pipelined = tfgpipe.pipeline(model(), num_stages=2, num_microbatches=4)
    pipelined.compile("sgd", lambda y, p: tf.math.log(-ops.square(ops.mean(p - y))))
    history = pipelined.fit(X, Y, ROWS, verbose=0).history
    assert np.isnan(history["loss"][0])
