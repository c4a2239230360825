"""The files of a trained model, and how accurate each of them is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import keras
import numpy as np

import tfgpipe
from tfgpipe import quantization
from tfgpipe._util import readable_bytes, text_table
from trainer import run_dir
from trainer.checkpoint import variable_names
from trainer.checkpoint.checkpoints import Checkpoints, load, newest_whole
from trainer.experiment import Experiment
from trainer.stopping import Stopping
from trainer.train import Options, build, train


def export(
    experiment: Experiment,
    model: tfgpipe.PipelinedModel,
    folder: Path,
    stopping: Stopping,
    *,
    name: str,
) -> None:
    """Writes a model without its pipeline, and in 8 bits, and prints what that costs.

    Args:
        experiment: What was trained.
        model: Its model, trained.
        folder: The run's; files are written to `export` in it. Where the experiment has
            a twin that is not quantized, that is trained in `float` in it.
        stopping: Whether somebody has asked for the end, of training that twin, too.
        name: The experiment's.
    """
    target = folder / "export"
    target.mkdir(parents=True, exist_ok=True)
    print(f"\nExporting to {target}.", flush=True)
    plain = _plain(model)
    plain.save(target / "model.keras")
    plain.export(target / "saved_model", format="tf_saved_model", verbose=False)

    int8 = target / "model.tflite"
    quantizes = experiment.precision.quantizes
    shown = None if quantizes else experiment.representative()
    if not quantizes and shown is None:
        print(
            "No int8 file: the model is not quantized. Train it with "
            "--set=precision.quantize=8bit."
        )
        return
    try:
        tfgpipe.export_int8(plain, int8, shown)
    except (RuntimeError, ValueError) as error:
        print(f"No int8 file. {error}")
        return
    test = experiment.test_data()
    if test is None:
        print(f"int8 file: {readable_bytes(int8.stat().st_size)}.")
        return
    twin = experiment.float_twin()
    reference = plain
    if twin is not None:
        trained = _trained(twin, folder / "float", name, stopping)
        reference = _plain(trained)
    rows = [_float_row(reference, target / "float.tflite", test)]
    if quantizes:
        rows.append(_Row("fake-quant", _accuracy(plain, test), None))
        rows.append(_int8_row("int8", plain, int8, test))
    rows += _after_training(experiment, reference, target, test)
    compared = quantization.compare(plain, int8, test)
    text = f"{_table(rows)}\n\nThe int8 file beside its model:\n{compared}"
    (target / "table.txt").write_text(f"{text}\n", encoding="utf-8")
    print(f"\n{text}", flush=True)


Data = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class _Row:
    """A line of the table.

    Attributes:
        name: What was measured.
        accuracy: Share of the test split that it gets right.
        file: What it is in, if it is in a file of its own.
    """

    name: str
    accuracy: float
    file: Path | None


def _plain(model: tfgpipe.PipelinedModel) -> keras.Model:
    """Returns a model without its pipeline, of averaged weights if there are."""
    with variable_names.averaged(model):
        return quantization.plain_copy(model)


def _trained(
    twin: Experiment, folder: Path, name: str, stopping: Stopping
) -> tfgpipe.PipelinedModel:
    """Returns the model of an experiment, trained now unless it was before."""
    print("\nThe same without quantization, to compare with:", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    model = build(twin)
    with run_dir.held(folder):
        place = run_dir.checkpoints(folder)
        newest = newest_whole(place)
        if newest is not None and newest.about.step == twin.training.num_steps:
            load(newest, model)
        else:
            checkpoints = Checkpoints(place, model, twin.saving)
            train(twin, model, folder, checkpoints, stopping, Options(name=name))
    return model


def _accuracy(model: keras.Model, test: Data) -> float:
    x, labels = test
    outputs = model.predict(x, verbose=0)
    return float(np.mean(outputs.argmax(axis=-1) == labels))


def _float_row(model: keras.Model, path: Path, test: Data) -> _Row:
    model.export(path, format="litert", verbose=False)
    return _Row("float", _accuracy(model, test), path)


def _int8_row(name: str, model: keras.Model, path: Path, test: Data) -> _Row:
    accuracy = quantization.compare(model, path, test).int8_accuracy
    assert accuracy is not None  # There are labels.
    return _Row(name, accuracy, path)


def _after_training(
    experiment: Experiment, reference: keras.Model, target: Path, test: Data
) -> list[_Row]:
    """Returns what comes of the float model without training for 8 bits."""
    keras_path = target / "keras-int8.keras"
    by_keras = quantization.quantize_after_training(reference)
    by_keras.save(keras_path)
    rows = [_Row("Keras' quantize", _accuracy(by_keras, test), keras_path)]
    shown = experiment.representative()
    if shown is not None:
        path = target / "calibrated.tflite"
        tfgpipe.export_int8(reference, path, shown)
        rows.insert(0, _int8_row("int8, calibrated", reference, path, test))
    return rows


def _table(rows: list[_Row]) -> str:
    whole = rows[0].file
    assert whole is not None
    cells = []
    for row in rows:
        size, share = "", ""
        if row.file is not None:
            num_bytes = row.file.stat().st_size
            size = readable_bytes(num_bytes)
            share = f"{num_bytes / whole.stat().st_size:.3f}"
        name = row.file.name if row.file else ""
        cells.append((row.name, f"{row.accuracy:.2%}", name, size, share))
    header = ("model", "test accuracy", "file", "size", "of float")
    return text_table(header, cells, left=("model", "file"))
