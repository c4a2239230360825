"""Digits: real images, and a network that is trained for 8 bits."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.helpers import experiments
from tfgpipe_params.image import digits
from tfgpipe_params.image.classifiers import ConvNetClassifier
from tfgpipe_trainer.config import Precision
from tfgpipe_trainer.experiment import find
from tfgpipe_trainer.hyperparams import HyperparameterError, override


def _short(**more: str) -> ConvNetClassifier:
    values = {**experiments.DIGITS, **more}
    return override(find("image.DigitsQat")(), [f"{n}={v}" for n, v in values.items()])


def test_the_parts_are_apart_and_make_up_the_whole() -> None:
    parts = [digits.read(part) for part in ("train", "validation", "test")]
    assert [len(part.labels) for part in parts] == [1077, 240, 480]
    rows = np.concatenate([part.pixels.reshape(-1, 64) for part in parts])
    assert (rows.min(), rows.max()) == (0, 1)
    assert len(np.unique(rows, axis=0)) == len(rows) == 1797
    for part in parts:
        assert set(part.labels) == set(range(10))


def test_a_batch_depends_on_the_seed_and_its_step_alone() -> None:
    whole = list(_short().batches("train").as_numpy_iterator())
    rest = list(_short().batches("train", first_step=2).as_numpy_iterator())
    assert len(whole) == 4
    for (x, y), (u, v) in zip(whole[2:], rest, strict=True):
        np.testing.assert_array_equal(x, u)
        np.testing.assert_array_equal(y, v)
    other = next(_short(seed="1").batches("train").as_numpy_iterator())
    assert (whole[0][1] != other[1]).any()


def test_images_are_moved_and_no_pixel_is_made_up() -> None:
    x, _ = next(_short().batches("train").as_numpy_iterator())
    still, labels = next(
        _short(**{"augmentation.shift": "0"}).batches("train").as_numpy_iterator()
    )
    assert x.shape == still.shape == (16, 8, 8, 1)
    train = digits.read("train")
    for image, label in zip(still, labels, strict=True):
        same = (train.pixels == image).all(axis=(1, 2, 3))
        assert train.labels[same] == [label]
    assert x.sum() <= still.sum()


def test_a_precision_leaves_the_policy_as_it_was() -> None:
    model = _short(**{"precision.policy": "mixed_float16"}).build_model()
    assert keras.config.dtype_policy().name == "float32"
    assert {stage.layers[-1].compute_dtype for stage in model.stages} == {"float16"}
    assert type(model.optimizer).__name__ == "LossScaleOptimizer"


def test_ranges_are_seen_before_they_are_frozen() -> None:
    with pytest.raises(HyperparameterError) as error:
        Precision(quantize_start_step=10, freeze_ranges_step=5)
    assert str(error.value) == (
        "freeze_ranges_step: expected at least quantize_start_step=10, or None; "
        "received 5."
    )
