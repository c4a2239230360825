"""The files of a trained model: Keras, SavedModel, safetensors, int8 of TFLite."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import keras
import numpy as np

import tfgpipe
from tfgpipe import quantization
from tfgpipe._util import readable_bytes
from tfgpipe_trainer import run_dir
from tfgpipe_trainer.checkpoint import store, variable_names
from tfgpipe_trainer.experiment import Experiment

# Examples of training that ranges of activations are taken from.
_NUM_CALIBRATED = 256


def export(experiment: Experiment, model: tfgpipe.PipelinedModel, folder: Path) -> None:
    """Writes a model without its pipeline, and in 8 bits, and compares the two.

    A model that was trained for 8 bits has the ranges of its activations. Those of any
    other whose inputs are one array of floats are taken from training examples.

    Args:
        experiment: The experiment that was trained.
        model: Its model, trained.
        folder: The run's; files are written to `export` in it.
    """
    target = run_dir.writable(folder / "export")
    for left in target.glob(".export-*"):  # Of a process that was killed.
        store.discard(left)
    print(f"\nExporting to {target}.", flush=True)
    plain = experiment.for_inference(plain_copy(model))
    plain.save(target / "model.keras")
    plain.export(target / "saved_model", format="tf_saved_model", verbose=False)
    _write_safetensors(plain, target / "model.safetensors")

    int8 = target / "model.tflite"
    quantizes = experiment.precision.quantizes
    examples = None if quantizes else calibration_examples(experiment)
    if not quantizes and examples is None:
        print(
            "No int8 file: the model is not quantized. Train it with "
            "--set=precision.quantize=8bit."
        )
        return
    try:
        tfgpipe.export_int8(plain, int8, examples)
    except (RuntimeError, ValueError) as error:
        print(f"No int8 file. {error}")
        return
    compared = quantization.compare(plain, int8, experiment.batches("validation"))
    size = (target / "model.keras").stat().st_size
    text = (
        f"The int8 file, {readable_bytes(int8.stat().st_size)} beside "
        f"{readable_bytes(size)} of model.keras, on the validation split:\n{compared}"
    )
    (target / "int8.txt").write_text(f"{text}\n", encoding="utf-8")
    print(f"\n{text}", flush=True)


def _write_safetensors(plain: keras.Model, path: Path) -> None:
    """Writes the weights by the names of checkpoints, for other frameworks to read."""
    if not importlib.util.find_spec("safetensors"):
        print("No model.safetensors: `pip install safetensors` brings it.")
        return
    from safetensors.numpy import save_file

    named = variable_names.weights(plain).items()
    arrays = {
        name: np.ascontiguousarray(keras.ops.convert_to_numpy(v)) for name, v in named
    }
    save_file(arrays, path, metadata={"format": "tf"})


def plain_copy(model: tfgpipe.PipelinedModel) -> keras.Model:
    """Returns a model without its pipeline, of averaged weights if there are."""
    with variable_names.averaged(model):
        return quantization.plain_copy(model)


def calibration_examples(experiment: Experiment) -> np.ndarray | None:
    """Returns inputs of training, None where they are not one array of floats."""
    found: list[np.ndarray] = []
    for inputs, *_ in experiment.batches("train").as_numpy_iterator():
        is_array = isinstance(inputs, np.ndarray)
        if not is_array or not np.issubdtype(inputs.dtype, np.floating):
            return None
        found.append(inputs)
        if sum(map(len, found)) >= _NUM_CALIBRATED:
            break
    return np.concatenate(found)[:_NUM_CALIBRATED]
