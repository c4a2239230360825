"""An int8 file has 0.28 of the bytes, and accuracy within three images of 480.

What 8 bits cost on scikit-learn's digits: trained for them, or quantized after.

    python -m benchmarks.studies.int8 [--set=training.num_steps=40] [--folder=DIR]

Trains `image.DigitsQat`, and the same network without quantization, and prints for each
kind of file the share of the 480 test images that it gets right, which no training has
seen, and its size.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import keras
import numpy as np

import tfgpipe
from benchmarks.tables import draw
from tfgpipe import quantization
from tfgpipe._util import readable_bytes
from tfgpipe_params.image import digits
from tfgpipe_trainer.commands.runs import calibration_examples, plain_copy
from tfgpipe_trainer.experiment import Experiment, find
from tfgpipe_trainer.hyperparams import override


def table(experiment: Experiment, folder: Path) -> str:
    """Returns the accuracy and the size of each kind of file.

    Args:
        experiment: Trains for 8 bits, on the digits.
        folder: Where files are written.
    """
    images = digits.read("test")
    test = (images.pixels, images.labels)
    model = _trained(experiment)
    plain_experiment = override(experiment, ["precision.quantize=none"])
    plain = _trained(plain_experiment)

    path = folder / "float.tflite"
    plain.export(path, format="litert", verbose=False)
    rows: list[tuple[str, float, Path | None]] = [
        ("float", _accuracy(plain), path),
        ("fake-quant", _accuracy(model), None),
    ]
    identical: dict[str, str] = {}  # Outputs, beside those of the model.
    for name, of, examples in (
        ("int8", model, None),
        ("int8, calibrated", plain, calibration_examples(plain_experiment)),
    ):
        file = folder / f"{name.replace(', ', '-')}.tflite"
        tfgpipe.export_int8(of, file, examples)
        compared = quantization.compare(of, file, test)
        assert compared.int8_accuracy is not None  # There are labels.
        rows.append((name, compared.int8_accuracy, file))
        identical[name] = f"{compared.num_identical / compared.num_outputs:.1%}"
    by_keras = quantization.quantize_after_training(plain)
    by_keras.save(folder / "keras-int8.keras")
    rows.append(("Keras' quantize", _accuracy(by_keras), folder / "keras-int8.keras"))

    whole = path.stat().st_size
    return draw(
        [
            {
                "model": name,
                "test accuracy": f"{accuracy:.2%}",
                "identical outputs": identical.get(name, ""),
                "size": "" if file is None else readable_bytes(file.stat().st_size),
                "of float": ""
                if file is None
                else f"{file.stat().st_size / whole:.3f}",
            }
            for name, accuracy, file in rows
        ]
    )


def _trained(experiment: Experiment) -> keras.Model:
    keras.utils.set_random_seed(experiment.seed)
    model = experiment.build_model()
    model.fit(experiment.batches("train"), shuffle=False, verbose=0)
    return plain_copy(model)


def _accuracy(model: keras.Model) -> float:
    images = digits.read("test")
    outputs = model.predict(images.pixels, verbose=0)
    return float(np.mean(outputs.argmax(axis=-1) == images.labels))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    tfgpipe.make_logical_cpus(2)
    experiment = override(find("image.DigitsQat")(), arguments.set)
    with tempfile.TemporaryDirectory() as aside:
        print(table(experiment, arguments.folder or Path(aside)))


if __name__ == "__main__":
    main()
