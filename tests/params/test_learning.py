"""Experiments learn what they are for, in some more steps than the gate takes."""

from __future__ import annotations

from pathlib import Path

import keras
import pytest

from tests.helpers import compare, experiments

pytestmark = pytest.mark.nightly


def test_a_language_model_learns_what_bigrams_cannot(corpus: str) -> None:
    experiment = experiments.text(
        "Tiny", corpus, "training.num_steps=60", "optimizer.learning_rate=0.01"
    )
    model = experiment.build_model()
    model.fit(experiment.batches("train"), verbose=0, shuffle=False)
    loss = model.evaluate(experiment.batches("validation"), verbose=0)
    assert loss < 0.6 * experiment.baselines()["bigram"]


@pytest.mark.parametrize("softmax", ["tied", "untied"])
def test_the_pipeline_trains_as_one_stage_does(corpus: str, softmax: str) -> None:
    losses = []
    for num_stages in (1, 2):
        keras.utils.set_random_seed(0)
        experiment = experiments.text(
            "Tiny",
            corpus,
            f"model.softmax={softmax}",
            f"pipelining.num_stages={num_stages}",
            "pipelining.num_microbatches=2",
            "training.num_steps=2",
        )
        model = experiment.build_model()
        model.fit(experiment.batches("train"), verbose=0, shuffle=False)
        losses.append(model.evaluate(experiment.batches("validation"), verbose=0))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_translator_has_the_loss_and_the_accuracy_of_the_plain_model() -> None:
    experiment = experiments.translation()
    (batch,) = experiment.batches("validation").as_numpy_iterator()
    results = []
    for num_stages in (1, 2):
        keras.utils.set_random_seed(0)
        stages = f"pipelining.num_stages={num_stages}"
        model = experiments.translation(
            stages, "pipelining.num_microbatches=4"
        ).build_model()
        if num_stages == 1:
            plain = model.unpipelined()
            plain.compile(
                experiment.optimizer.build(experiment.training.num_steps),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
            )
            model = plain
        for _ in range(2):
            result = model.train_on_batch(list(batch[0]), batch[1], return_dict=True)
        results.append([result["loss"], result["accuracy"], *compare.values(model)])
    compare.assert_allclose(*results[::-1], rtol=1e-4, atol=1e-5)


def test_a_translator_learns_to_reverse() -> None:
    experiment = experiments.translation(
        "data.longest=2",
        "data.num_pairs=2000",
        "model.width=32",
        "training.batch_size=32",
        "training.num_steps=150",
        "optimizer.learning_rate=0.01",
        "num_decoded=64",
        "evaluation.max_batches=2",
        "pipelining.num_stages=1",
    )
    model = experiment.build_model()
    model.fit(experiment.batches("train"), verbose=0, shuffle=False)
    found = model.evaluate(
        experiment.batches("validation"), verbose=0, return_dict=True
    )
    assert found["loss"] < 0.5 * experiment.baselines()["unigram"]


def test_own_images_and_masks_are_learnt_and_drawn(tmp_path: Path) -> None:
    changes = ["training.num_steps=30", "optimizer.learning_rate=3e-2"]
    own = experiments.segmenter(
        *experiments.write_masks(tmp_path), "data.shape=(20,16,1)", *changes
    )
    model = own.build_model()
    model.fit(own.batches("train"), shuffle=False, verbose=0)
    scores = model.evaluate(own.batches("validation"), verbose=0, return_dict=True)
    assert scores["iou"] > 0.7  # Guessing has about a third.
    text = own.decode(model, tmp_path)
    assert text.startswith(f"IoU {scores['iou']:.3f}: class 0 ")
