"""U-Net: shapes made from the step alone, skips across stages, masks as a picture."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import compare, experiments
from tests.helpers.zoo import floats
from tfgpipe_params.segmentation import shapes
from tfgpipe_params.segmentation.unet import unet
from tfgpipe_trainer.batches import HostShard
from tfgpipe_trainer.hyperparams import HyperparameterError


def _batch(step: int = 0, **values: object) -> tuple[np.ndarray, np.ndarray]:
    given = {
        "rows": slice(0, 4),
        "size": 32,
        "num_shapes": 4,
        "seed": 0,
        "stream": "train",
    }
    return shapes.draw_shapes(step=step, **{**given, **values})  # type: ignore[arg-type]


def test_images_are_those_of_the_seed_and_the_step() -> None:
    pixels, classes = _batch()
    assert (pixels.shape, pixels.dtype) == ((4, 32, 32, 1), np.float32)
    assert (classes.shape, classes.dtype) == ((4, 32, 32), np.int32)
    for again, same in [
        (_batch(), True),
        (_batch(step=1), False),
        (_batch(seed=1), False),
        (_batch(stream="validation"), False),
    ]:
        assert (again[0] == pixels).all() == (again[1] == classes).all() == same


def test_every_class_is_there() -> None:
    _, classes = _batch(rows=slice(0, 50))
    shares = np.bincount(classes.ravel()) / classes.size
    assert len(shares) == len(shapes.SHAPES) == 4
    assert (shares > 0.03).all()


def test_a_run_that_is_taken_up_has_the_batches_it_would_have_had() -> None:
    whole = list(experiments.segmenter().batches("train").as_numpy_iterator())
    rest = list(
        experiments.segmenter().batches("train", first_step=2).as_numpy_iterator()
    )
    assert len(whole) == 4
    for expected, received in zip(whole[2:], rest, strict=True):
        compare.assert_equal(expected, received)


def test_an_image_does_not_depend_on_which_host_makes_it() -> None:
    whole = list(experiments.segmenter().batches("train").as_numpy_iterator())
    parts = [
        list(
            experiments.segmenter()
            .batches("train", shard=HostShard(h, 2))
            .as_numpy_iterator()
        )
        for h in (0, 1)
    ]
    for expected, first, second in zip(whole, *parts, strict=True):
        for side in (0, 1):
            joined = np.concatenate([first[side], second[side]])
            np.testing.assert_array_equal(joined, expected[side])


def test_all_seeds_are_validated_on_the_same_images() -> None:
    sets = [
        list(
            experiments.segmenter(f"seed={seed}")
            .batches("validation")
            .as_numpy_iterator()
        )
        for seed in (0, 1)
    ]
    assert len(sets[0]) == 5
    np.testing.assert_array_equal(sets[0][4][0], sets[1][4][0])


def _tiny() -> keras.Model:
    return unet(depth=2, num_filters=2, classes=3, input_shape=(8, 8, 1))


def test_stages_compute_what_the_plain_model_does(floatx) -> None:
    floatx("float64")
    plain, pipelined = compare.model_pair(_tiny, num_stages=3, num_microbatches=1)
    x = floats(4, 8, 8, 1)
    expected = compare.run(plain, x, graph=False)
    assert all(np.any(grad) for grad in expected.weight_grads.values())
    compare.assert_same(expected, compare.run(pipelined, x), rtol=1e-11, atol=1e-11)


def test_a_size_that_cannot_be_halved_is_refused() -> None:
    with pytest.raises(HyperparameterError) as error:
        experiments.segmenter("data.shape=(18,18,1)").build_model()
    assert str(error.value) == (
        "data.shape: U-Net that halves 2 times: expected a height and a width that are "
        "multiples of 4; received 18 x 18."
    )


def test_masks_are_drawn_and_the_iou_is_that_of_evaluation(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    experiment = experiments.segmenter()
    model = experiment.build_model()
    model.fit(experiment.batches("train"), shuffle=False, verbose=0)
    scores = model.evaluate(
        experiment.batches("validation"), verbose=0, return_dict=True
    )
    assert not [w for w in recwarn if "metric" in str(w.message).lower()]
    text = experiment.decode(model, tmp_path)
    drawing = tf.io.decode_png((tmp_path / "masks.png").read_bytes()).numpy()
    assert drawing.shape == (16 * 16, 3 * 16, 1)
    # What Keras counts, microbatch by microbatch, is what is counted here.
    assert text.startswith(f"IoU {scores['iou']:.3f}: background ")
    assert text.endswith(f" Image, wanted, received: {tmp_path / 'masks.png'}")
    x, wanted = next(experiment.batches("validation").as_numpy_iterator())
    image, mask, _ = np.split(drawing[:16, :, 0], 3, axis=1)
    assert np.abs(image - x[0, ..., 0].clip(0, 1) * 255).max() <= 1
    assert np.abs(mask - wanted[0] / 3 * 255).max() <= 1


# A user's own images and masks.


def test_images_and_masks_are_read_from_files(tmp_path: Path) -> None:
    own = experiments.segmenter(
        *experiments.write_masks(tmp_path), "training.batch_size=3"
    )
    validation = list(own.batches("validation").as_numpy_iterator())
    pixels, classes = (np.concatenate(side) for side in zip(*validation, strict=True))
    assert (pixels.shape, classes.shape) == ((2, 16, 16, 1), (2, 16, 16))
    bright = np.random.default_rng(9).integers(0, 2, (20, 16, 1), np.uint8)
    # Every fifth row of the 20 goes: the nearest to each of 16.
    rows = [int((row + 0.5) * 20 / 16) for row in range(16)]
    np.testing.assert_array_equal(classes[0, :, 1:], bright[rows, 1:, 0])
    assert (classes[0, :, 0] == 255).all()
    trained = list(own.batches("train").as_numpy_iterator())
    assert [batch.shape for batch, _ in trained] == [(3, 16, 16, 1)] * 4


def test_masks_that_do_not_fit_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = experiments.write_masks(tmp_path)
    wide = tf.io.encode_png(np.zeros((2, 2, 3), np.uint8)).numpy()
    (tmp_path / "masks" / "00.png").write_bytes(wide)
    five = tf.io.encode_png(np.full((20, 16, 1), 5, np.uint8)).numpy()
    (tmp_path / "masks" / "01.png").write_bytes(five)
    examples = experiments.segmenter(*own).data.open("train")
    examples.take(np.arange(3))
    said = capsys.readouterr().err
    assert "00.png: expected a mask of [20, 16] pixels as the image, each" in said
    assert "received [2, 2, 3] in" in said
    assert (
        "01.png: expected pixels of its mask from 0 to 1, or 255, as data.classes and "
        "data.ignore_class say; received 5"
    ) in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["data.files=x"], "data.masks: expected a glob, as files and masks go"),
        (["data.classes=7"], "data.classes: expected 4, which images that are made"),
        (["data.shape=(8,8,3)"], "data.shape: expected as much height as width, and 1"),
        (["data.shape=(8,8,2)"], "data.shape: expected height and width of at least"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: list[str], words: str) -> None:
    with pytest.raises(HyperparameterError) as error:
        experiments.segmenter(*changes)
    assert str(error.value).startswith(words)


def test_an_image_without_a_mask_is_refused(tmp_path: Path) -> None:
    own = experiments.write_masks(tmp_path)
    (tmp_path / "masks" / "03.png").unlink()
    with pytest.raises(HyperparameterError) as error:
        experiments.segmenter(*own).batches("train")
    assert str(error.value) == (
        "data.masks: expected a mask for each image, of the same name but for its "
        f"suffix; received none for 1 of 20, such as {tmp_path}/images/03.png."
    )


def test_the_iou_of_a_class_that_is_nowhere_is_left_out(tmp_path: Path) -> None:
    files = experiments.write_masks(tmp_path)
    experiment = experiments.segmenter(*files, "data.classes=4")
    (metric,) = experiment.metrics()
    model = mock.Mock()
    model.predict = lambda pixels, verbose: np.eye(4)[
        (pixels[..., 0] > 0.5).astype(int)
    ]
    for pixels, masks in experiment.batches("validation").as_numpy_iterator():
        metric.update_state(masks, model.predict(pixels, verbose=0))
    text = experiment.decode(model, tmp_path)
    assert text.startswith(f"IoU {float(metric.result()):.3f}: class 0 ")
    assert ", class 2 none, class 3 none. " in text


def test_the_iou_is_that_counted_by_hand(tmp_path: Path) -> None:
    experiment = experiments.segmenter(*experiments.write_masks(tmp_path))
    wanted = np.array([[[0, 0, 1], [1, 1, 255]]])
    found = np.array([[[0, 1, 1], [1, 0, 0]]])
    batch = np.zeros((1, 2, 3, 1), np.float32), wanted
    model = mock.Mock()
    model.predict.return_value = np.eye(2)[found]
    # Of class 0 one pixel of three, of class 1 two of four; one pixel is ignored.
    data = tf.data.Dataset.from_tensors(batch)
    with mock.patch.object(type(experiment), "batches", return_value=data):
        text = experiment.decode(model, tmp_path)
    assert text.startswith("IoU 0.417: class 0 0.333, class 1 0.500. Image, ")
    (metric,) = experiment.metrics()
    metric.update_state(wanted, np.eye(2)[found])
    assert float(metric.result()) == pytest.approx((1 / 3 + 2 / 4) / 2)
    assert experiment.baselines() == {"guessing": pytest.approx(0.693147)}
