"""Learning rates go as their names say, and hyperparameters reach the optimizer."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest

from tfgpipe_trainer.config import Optimizer
from tfgpipe_trainer.hyperparams import HyperparameterError

PEAK, STEPS = 0.5, 100


def _rates(**arguments) -> list[float]:
    optimizer = Optimizer(learning_rate=PEAK, warmup=0.2, **arguments).build(STEPS)
    schedule = optimizer._learning_rate  # What Keras evaluates at each update.
    return [float(keras.ops.convert_to_numpy(schedule(step))) for step in range(STEPS)]


# Each schedule after a warm-up of 20 steps, as its formula is printed.
FORMULAS = {
    "cosine": lambda t: PEAK * (1 + math.cos(math.pi * t / 80)) / 2,
    "linear": lambda t: PEAK * (1 - t / 80),
    "inverse_sqrt": lambda t: PEAK / math.sqrt(1 + t / 20),
    "constant": lambda _: PEAK,
    "wsd": lambda t: PEAK * min(1, 1 - (t - 60) / 20),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_schedule_is_its_formula(name: str) -> None:
    rates = _rates(schedule=name)
    rising = [PEAK * step / 20 for step in range(20)]
    falling = [FORMULAS[name](step) for step in range(80)]
    np.testing.assert_allclose(rates, [*rising, *falling], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_schedule_is_saved_and_loaded(name: str) -> None:
    optimizer = Optimizer(schedule=name).build(STEPS)
    schedule = optimizer._learning_rate
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(schedule)
    )
    for step in (0, 5, 50):
        assert float(schedule(step)) == float(again(step))


def test_without_a_warm_up_the_first_step_is_at_the_peak() -> None:
    for name in FORMULAS:
        schedule = Optimizer(learning_rate=PEAK, warmup=0, schedule=name).build(STEPS)
        assert float(schedule._learning_rate(0)) == pytest.approx(PEAK)


RULES = ["adamw", "adafactor", "lamb", "lion", "sgd", "muon", "RMSprop", "nadam"]


@pytest.mark.parametrize("name", RULES)
def test_every_rule_learns(name: str) -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    rule = Optimizer(name=name, learning_rate=0.05, warmup=0, schedule="constant")
    model.compile(rule.build(60), "mse")
    x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    y = x @ np.array([[1.0], [-1.0], [0.5]], "float32")
    before = model.evaluate(x, y, verbose=0)
    model.fit(x, y, epochs=30, verbose=0)
    assert model.evaluate(x, y, verbose=0) < 0.7 * before


def test_further_arguments_are_those_of_the_class() -> None:
    own = ("epsilon=1e-3", "beta_2=0.5", "amsgrad=True")
    config = Optimizer(arguments=own).build(STEPS).get_config()
    assert (config["epsilon"], config["beta_2"], config["amsgrad"]) == (1e-3, 0.5, True)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"name": "adam2"},
            "optimizer.name: expected one of .*adamw.*received 'adam2'",
        ),
        ({"arguments": ("epsilon",)}, "optimizer.arguments: expected NAME=VALUE"),
        ({"arguments": ("epsilon=a b",)}, "received 'epsilon=a b'"),
        ({"arguments": ("sigma=1",)}, "expected those of AdamW; received sigma=1"),
    ],
)
def test_what_is_no_optimizer_is_refused(values: dict, words: str) -> None:
    with pytest.raises(HyperparameterError, match=words):
        Optimizer(**values).build(STEPS)


@pytest.mark.parametrize("count", [2, 4])
def test_updates_are_made_of_several_steps_and_schedules_count_all(count: int) -> None:
    optimizer = Optimizer(
        gradient_accumulation_steps=count, schedule="linear", warmup=0.0
    ).build(40)
    assert optimizer.gradient_accumulation_steps == count
    weight = keras.Variable(np.ones(1, "float32"))
    optimizer.build([weight])
    for step in range(8):
        assert int(optimizer.iterations) == step // count
        optimizer.apply([keras.ops.ones(1)])
    assert float(optimizer.learning_rate) == pytest.approx(1e-3 * (1 - 8 / 40))


def test_clipping_and_decay_reach_the_optimizer() -> None:
    optimizer = Optimizer(global_clipnorm=0.25, weight_decay=0.5, ema_decay=0.75).build(
        10
    )
    assert optimizer.global_clipnorm == 0.25
    assert optimizer.weight_decay == 0.5
    assert optimizer.use_ema
    assert optimizer.ema_momentum == 0.75


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lamb", "lion", "sgd"])
def test_only_matrices_decay(name: str) -> None:
    model = keras.Sequential(
        [
            keras.Input([4, 3]),
            keras.layers.LayerNormalization(),
            keras.layers.LayerNormalization(axis=[1, 2]),
            keras.layers.RMSNormalization(),
            keras.layers.RMSNormalization(axis=[1, 2]),
            keras.layers.PReLU(shared_axes=[1]),
            keras.layers.Dense(2, name="dense"),
        ]
    )
    slopes = keras.Variable(np.ones(3), name="slopes")
    optimizer = Optimizer(name=name, weight_decay=0.5).build(10)
    optimizer.build([*model.trainable_variables, slopes])
    decayed = [
        v.path
        for v in [*model.trainable_variables, slopes]
        if optimizer._use_weight_decay(v)
    ]
    assert [path.rpartition("/")[2] for path in decayed] == ["alpha", "kernel"]


def test_more_accumulation_than_steps_is_refused() -> None:
    assert (
        Optimizer(gradient_accumulation_steps=3).build(3).gradient_accumulation_steps
        == 3
    )
    with pytest.raises(
        HyperparameterError,
        match=r"accumulation_steps: expected at most training\.num_steps=3, .*4\.$",
    ):
        Optimizer(gradient_accumulation_steps=4).build(3)


@pytest.mark.parametrize("name", ["warmup", "beta_1", "beta_2", "ema_decay"])
def test_what_is_a_share_is_less_than_one(name: str) -> None:
    with pytest.raises(
        HyperparameterError,
        match=rf"^{name}: expected .*, less than 1; received 1\.0\.$",
    ):
        Optimizer(**{name: 1.0})
