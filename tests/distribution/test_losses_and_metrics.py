"""Every loss and a metric of each kind of Keras over replicas with unequal rows.

A plain model on all rows says what they are. Every metric runs nightly.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection

import keras
import numpy as np
import pytest

import tfgpipe
from tests.helpers import compare
from tests.helpers.marks import nightly

layers = keras.layers
RNG = np.random.default_rng(0)
# Batches of 5 and 3 rows: 3 and 2 on two replicas, then 2 and 1.
ROWS, CLASSES = 8, 3
X = RNG.normal(size=(ROWS, 4))
KINDS = RNG.integers(0, CLASSES, ROWS)
WEIGHTS = RNG.uniform(0.1, 2.0, ROWS)
TARGETS = {
    "kinds": KINDS,
    "one_hot": np.eye(CLASSES)[KINDS],
    "binary": (RNG.uniform(size=(ROWS, CLASSES)) < 0.5).astype("float64"),
    "shares": RNG.dirichlet(np.ones(CLASSES), ROWS),
}

# Arguments of those that need some.
ARGUMENTS = {
    "MeanIoU": {"num_classes": CLASSES, "sparse_y_pred": False},
    "IoU": {
        "num_classes": CLASSES,
        "target_class_ids": [0, 2],
        "sparse_y_pred": False,
    },
    "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": CLASSES},
    "MeanRelativeError": {"normalizer": np.array([1.0, 2.0, 3.0])},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "TopKCategoricalAccuracy": {"k": 2},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "FBetaScore": {"threshold": 0.4},
    "F1Score": {"threshold": 0.4},
}
# Bases, one of sequences, and losses that are no mean over rows.
OTHERS = {"Mean", "Sum", "MeanMetricWrapper", "Metric", "Loss"}
OTHERS |= {"CTC", "Dice", "Tversky", "Circle"}
# Of means, of pairs of classes, of what thresholds tell apart, and of squares.
FEW = {"SparseCategoricalCrossentropy", "TopKCategoricalAccuracy", "MeanIoU", "AUC"}
FEW |= {"F1Score", "MeanRelativeError", "RootMeanSquaredError", "R2Score"}
OF_KINDS = {"MeanIoU", "IoU", "CategoricalGeneralizedCrossEntropy"}


def classes_of(module) -> dict[str, type]:
    """Returns the classes of a module, each by its one name."""
    found = {c.__name__: c for _, c in inspect.getmembers(module, inspect.isclass)}
    return {name: found[name] for name in sorted(found.keys() - OTHERS)}


def target_of(name: str) -> str:
    if name.startswith("Sparse") or name in OF_KINDS:
        return "kinds"
    if name.startswith(("Categorical", "OneHot", "TopK")):
        return "one_hot"
    if issubclass(getattr(keras.metrics, name, object), keras.metrics.Metric):
        return "binary"
    return "shares"


def made(kind: type, prefix: str = ""):
    name = kind.__name__
    return kind(name=prefix + name, **ARGUMENTS.get(name, {}))


def squares_of_outputs(y, p):
    del y
    return keras.ops.mean(p * p, axis=-1)


def losses():
    """Returns an output's target for each loss, and the arguments of `compile`."""
    kinds = classes_of(keras.losses)
    targets = {name: TARGETS[target_of(name)] for name in kinds}
    return targets, {"loss": {name: made(kind) for name, kind in kinds.items()}}


def metrics(names: Collection[str] = FEW):
    """Returns a target for each output, and metrics of each, with weights or not."""
    by_target = {}
    for name, kind in classes_of(keras.metrics).items():
        if name in names:
            by_target.setdefault(target_of(name), []).append(kind)
    return {name: TARGETS[name] for name in by_target}, {
        "loss": dict.fromkeys(by_target, squares_of_outputs),
        "metrics": {n: [*map(made, kinds)] for n, kinds in by_target.items()},
        # Keras counts pairs of classes in integers, and takes no weights there.
        "weighted_metrics": {
            n: [made(k, "weighted_") for k in kinds if "IoU" not in k.__name__]
            for n, kinds in by_target.items()
        },
    }


def every_metric():
    names = classes_of(keras.metrics)
    assert len(names) > 40
    return metrics(names)


def small(scope, metrics):
    """Returns a model compiled outside of its strategy's scope, if it has one."""
    compare.fresh_names()
    keras.utils.set_random_seed(0)
    with scope:
        stack = [layers.Dense(5, activation="tanh"), layers.Dense(1, "sigmoid")]
        model = keras.Sequential([keras.Input((4,)), *stack])
        if not isinstance(scope, contextlib.nullcontext):
            model = tfgpipe.pipeline(model, num_microbatches=2)
        optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, "binary_crossentropy", **metrics)
    return model


def test_names_of_metrics_may_be_given_outside_the_scope():
    strategy = tfgpipe.PipelineStrategy(num_stages=1, num_replicas=2)
    found = []
    for scope in (contextlib.nullcontext(), strategy.scope()):
        model = small(scope, {"metrics": ["accuracy", "AUC", "mae"]})
        y = TARGETS["binary"][:, :1]
        history = model.fit(X, y, batch_size=5, shuffle=False, verbose=0).history
        found.append(history)
    assert found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        np.testing.assert_allclose(found[1][name], expected, 1e-5, err_msg=name)


@pytest.mark.parametrize("argument", ["metrics", "weighted_metrics"])
def test_a_metric_of_one_replica_is_refused_by_name(argument):
    strategy = tfgpipe.PipelineStrategy(num_stages=1, num_replicas=2)
    model = small(strategy.scope(), {argument: ["mae", keras.metrics.AUC(name="area")]})
    message = r"Received metric 'area', .* inside `with strategy.scope\(\):`"
    for run in (model.fit, model.evaluate):
        with pytest.raises(RuntimeError, match=message):
            run(X, TARGETS["binary"][:, :1], batch_size=4, verbose=0)


# TensorFlow has the top k in single precision alone.
@pytest.mark.parametrize(
    ("kinds", "dtype", "rtol"),
    [
        (losses, "float64", 1e-9),
        (metrics, "float32", 1e-5),
        *nightly([(every_metric, "float32", 1e-5)]),
    ],
)
def test_replicas_have_those_of_all_rows(floatx, kinds, dtype, rtol):
    floatx(dtype)
    strategy = tfgpipe.PipelineStrategy(num_stages=1, num_replicas=2)
    found = []
    for scope in (contextlib.nullcontext(), strategy.scope()):
        compare.fresh_names()
        keras.utils.set_random_seed(0)
        with scope:
            targets, arguments = kinds()
            x = keras.Input((4,))
            hidden = layers.Dense(5, activation="tanh")(x)
            outputs = {
                name: layers.Dense(CLASSES, activation="softmax", name=name)(hidden)
                for name in targets
            }
            model = keras.Model(x, outputs)
            if found:
                model = tfgpipe.pipeline(model, num_microbatches=2, schedule="1f1b")
            model.compile(keras.optimizers.SGD(0.01), **arguments)
        weights = dict.fromkeys(targets, WEIGHTS)
        given = {"sample_weight": weights, "batch_size": 5, "shuffle": False}
        history = model.fit(X, targets, **given, verbose=0).history
        found.append({name: value for name, (value,) in history.items()})
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) > 15
    for name, expected in found[0].items():
        np.testing.assert_allclose(found[1][name], expected, rtol, 1e-7, err_msg=name)
