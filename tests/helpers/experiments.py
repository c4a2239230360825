"""Experiments made very small, and data for them."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfgpipe import tensor_parallel
from tfgpipe_params.lm.task import LanguageModel
from tfgpipe_params.segmentation.task import Segmenter
from tfgpipe_params.translate.task import Translation
from tfgpipe_trainer.experiment import find
from tfgpipe_trainer.hyperparams import override
from tfgpipe_trainer.train import build

DIGITS = {
    "model.channels": "(4, 8)",
    "model.strides": "(2, 2)",
    "model.width": "16",
    "training.num_steps": "4",
    "checkpoint.every_steps": "2",
    "training.batch_size": "16",
    "precision.quantize_start_step": "1",
}

CLASSIFIER = {
    "model.num_blocks": 2,
    "model.width": 8,
    "model.hidden": 16,
    "training.num_steps": 3,
    "training.batch_size": 16,
}


def check_that_it_learns_as_alone(name: str) -> None:
    """Compares the weights of a classifier that is spread over devices."""
    for alone, spread in zip(
        _weights("parallelism.SingleDevice"), _weights(name), strict=True
    ):
        np.testing.assert_allclose(spread, alone, rtol=1e-4, atol=1e-5)


@functools.cache
def _weights(name: str) -> list[np.ndarray]:
    values = [f"{n}={v}" for n, v in CLASSIFIER.items()]
    experiment = override(find(name)(), values)
    model = build(experiment)
    model.fit(experiment.batches("train"), shuffle=False, verbose=0)
    return tensor_parallel.full_weights(model.unpipelined())


TEXT = [
    "model.width=16",
    "model.mlp_width=32",
    "model.num_heads=2",
    "model.context=12",
    "training.batch_size=8",
    "evaluation.max_batches=2",
    "pipelining.num_microbatches=4",
]


def text(name: str, *assignments: str) -> LanguageModel:
    """Returns a language model of `params.lm`."""
    return override(find(f"lm.{name}")(), [*TEXT, *assignments])


SHAPES = [
    "data.shape=(16,16,1)",
    "model.depth=2",
    "model.num_filters=2",
    "training.num_steps=4",
    "training.batch_size=4",
    "evaluation.max_batches=5",
]


def segmenter(*assignments: str) -> Segmenter:
    """Returns a U-Net."""
    return override(find("segmentation.UNet")(), [*SHAPES, *assignments])


def write_masks(folder: Path, num_images: int = 20) -> list[str]:
    """Writes images whose mask is where they are bright; returns what names them."""
    for name in ("images", "masks"):
        (folder / name).mkdir()
    for number in range(num_images):
        bright = np.random.default_rng(number).integers(0, 2, (20, 16, 1), np.uint8)
        mask = np.where(np.arange(16)[None, :, None] == 0, 255, bright)  # One column.
        for name, values in (("images", 200 * bright), ("masks", mask)):
            png = tf.io.encode_png(values.astype(np.uint8)).numpy()
            (folder / name / f"{number:02}.png").write_bytes(png)
    return [
        f"data.files={folder}/images/*",
        f"data.masks={folder}/masks/*",
        "data.classes=2",
        "data.ignore_class=255",
    ]


TRANSLATION = [
    "data.num_pairs=200",
    "model.width=16",
    "model.mlp_width=32",
    "model.num_heads=2",
    "model.num_encoder_layers=1",
    "model.num_decoder_layers=1",
    "training.batch_size=8",
    "evaluation.max_batches=1",
    "num_decoded=8",
]


def translation(*assignments: str) -> Translation:
    """Returns a model that reverses short texts."""
    sizes = ["data.shortest=1", "data.longest=6"]
    experiment = find("translate.Reversal")()
    return override(experiment, [*TRANSLATION, *sizes, *assignments])
