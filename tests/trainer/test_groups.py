"""Groups of weights have learning rates and decay as of optimizers of their own."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import compare
from tfgpipe_params import template
from tfgpipe_trainer import devices
from tfgpipe_trainer.checkpoint import variable_names
from tfgpipe_trainer.config import Optimizer
from tfgpipe_trainer.hyperparams import HyperparameterError, override

CLASSES = {
    "adamw": keras.optimizers.AdamW,
    "sgd": keras.optimizers.SGD,
    "lion": keras.optimizers.Lion,
    "lamb": keras.optimizers.Lamb,
    "adafactor": keras.optimizers.Adafactor,
    "muon": keras.optimizers.Muon,
}


def _network() -> keras.Model:
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input([3]), dense(4), dense(5), dense(2)])


def _gradients(variables: list[keras.Variable], step: int) -> list[tf.Tensor]:
    random = np.random.default_rng(step)
    return [tf.constant(random.normal(size=v.shape), v.dtype) for v in variables]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", CLASSES)
def test_a_group_is_updated_as_by_an_optimizer_of_its_own(
    name: str, count: int
) -> None:
    hyper = Optimizer(
        name=name,
        learning_rates=("dense/*=0.25", "*kernel=3", "dense_2/bias=0"),
        decayed=("dense/*", "dense_2/kernel"),
        weight_decay=0.5,
        global_clipnorm=None,
        schedule="constant",
        learning_rate=0.01,
        warmup=0.0,
        gradient_accumulation_steps=count,
    )
    model, plain = _network(), _network()
    named = variable_names.weights(model)
    optimizer = hyper.build(8)
    optimizer.set_groups(
        named, learning_rates=hyper.learning_rates, decayed=hyper.decayed
    )
    optimizer = type(optimizer).from_config(optimizer.get_config())
    optimizer.build(model.trainable_variables)
    factors = [0.25, 0.25, 3, 1, 3, 0]
    decayed = [True, True, False, False, True, False]
    own = {"beta_2": 0.98} if name in ("adamw", "lamb", "lion") else {}
    own |= {"momentum": 0.9} if name == "sgd" else {}
    own |= {"gradient_accumulation_steps": count} if count > 1 else {}
    others = []
    for factor, decays in zip(factors, decayed, strict=True):
        of_muon = {"adam_weight_decay": 0.0} if name == "muon" and not decays else {}
        decay = {"weight_decay": 0.5 if decays else 0.0, **of_muon}
        others.append(CLASSES[name](0.01 * factor, **decay, **own))
    for each, v in zip(others, plain.trainable_variables, strict=True):
        each.build([v])

    @tf.function
    def step(gradients: list[tf.Tensor]) -> None:
        optimizer.apply(gradients, model.trainable_variables)

    for number in range(4):
        gradients = _gradients(model.trainable_variables, number)
        step(gradients)
        for each, g, v in zip(
            others, gradients, plain.trainable_variables, strict=True
        ):
            each.apply([g], [v])
    compare.assert_allclose(model.weights, plain.weights, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("shared", ["none", "weights"])
def test_a_pipeline_of_replicas_has_them_as_one_device_has(shared: str) -> None:
    settings = [
        *("width=160", "training.batch_size=8", "pipelining.num_stages=2"),
        *("pipelining.num_microbatches=2", "optimizer.decayed=*kernel"),
        "optimizer.learning_rates=dense_1/*=0.1",
        *("optimizer.global_clipnorm=None", "optimizer.weight_decay=0.5"),
        *("optimizer.schedule=constant", "optimizer.warmup=0"),
    ]
    trained = []
    for more in ([], ["pipelining.num_replicas=2"]):
        if more:
            more = [*more, f"pipelining.shard_replicas={shared}"]
        own = override(template.Mine(), [*settings, *more])
        keras.utils.set_random_seed(0)
        with devices.scope(own.pipelining):
            model = own.build_model()
        x, y = next(iter(own.batches("train")))
        for _ in range(3):
            model.train_on_batch(x, y)
        trained.append([np.array(v) for v in model.unpipelined().weights])
    compare.assert_allclose(*trained, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("learning_rates=dense", "learning_rates: expected PATTERN=FACTOR"),
        ("learning_rates=dense*=fast", "received 'dense.=fast'"),
        ("learning_rates=dense*=-1", "received 'dense.=-1'"),
        ("learning_rates=conv*=1", "'conv.', which matches none"),
        (
            "decayed=conv*",
            "decayed: expected patterns of weights, such as dense/kernel",
        ),
    ],
)
def test_rules_that_are_none_are_refused(setting: str, words: str) -> None:
    experiment = override(template.Mine(), [f"optimizer.{setting}"])
    with pytest.raises(HyperparameterError, match=words):
        experiment.build_model()
