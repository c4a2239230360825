"""A new run that begins with weights of another."""

from __future__ import annotations

import fnmatch
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from tfgpipe import quantization
from tfgpipe_trainer import files, remote_run, run_dir
from tfgpipe_trainer.checkpoint import store, variable_names
from tfgpipe_trainer.checkpoint.checkpoints import latest_valid
from tfgpipe_trainer.config import WarmStart
from tfgpipe_trainer.errors import UsageError
from tfgpipe_trainer.hyperparams import HyperparameterError

_FILES = (".keras", ".h5", ".safetensors")


def warm_start(wanted: WarmStart, model: tfgpipe.PipelinedModel) -> None:
    """Puts weights of another run, or of a file, into a model, and says which.

    Args:
        wanted: Their path, and the patterns of their names.
        model: The model, built.

    Raises:
        HyperparameterError: If there are no such weights, or they do not fit.
    """
    if wanted.path is None:
        return
    path = Path(wanted.path).expanduser()
    with tempfile.TemporaryDirectory() as fetched:
        if files.is_remote(wanted.path):
            path = _fetched(wanted.path, Path(fetched))
        found = _renamed(_read(path, model), wanted.rename)
    ours = {
        name: v
        for name, v in variable_names.weights(model).items()
        if not variable_names.is_seed(name)
    }
    asked = [name for name in ours if _matches(name, wanted.names)]
    taken = [name for name in asked if name in found]
    misfits = [n for n in taken if tuple(ours[n].shape) != found[n].shape]
    if misfits:
        name = misfits[0]
        raise HyperparameterError(
            f"warm_start.path: expected {name} of shape {tuple(ours[name].shape)}; "
            f"{path} has it of shape {found[name].shape}. Leave it out by "
            "warm_start.names, or use the shape of one for the other."
        )
    if not taken:
        raise HyperparameterError(
            f"warm_start.names: expected patterns of weights that are in {path}, which "
            f"has {_listed(sorted(found))}; received {', '.join(wanted.names)} for "
            f"{_listed(list(ours))}. See warm_start.rename."
        )
    if not wanted.rename:
        _check_order(model, ours, found, taken)
    for name in taken:
        ours[name].assign(found[name])
    print(f"Warm start: {len(taken)} of {len(ours)} weights are those of {path}.")
    missing = [name for name in ours if name not in taken]
    unexpected = [n for n in found if n not in taken and not variable_names.is_seed(n)]
    for what, names in (("Not from there", missing), ("Unused there", unexpected)):
        if names:
            print(f"  {what}: {', '.join(names)}")


def _check_order(
    model: tfgpipe.PipelinedModel,
    ours: Iterable[str],
    found: Iterable[str],
    taken: Sequence[str],
) -> None:
    """Checks that layers which are counted by their order are as many as there.

    Raises:
        HyperparameterError: If not, since then the order does not say which is which.
    """
    for layer, own in variable_names.moved_layers(model).items():
        here, there = (variable_names.num_siblings(x, layer) for x in (ours, found))
        if here != there and any(name.startswith(f"{layer}/") for name in taken):
            raise HyperparameterError(
                f"warm_start.rename: expected OLD=NEW for {layer}, as {own} is called "
                f"here, since names count layers in their order, and {here} are called "
                f"so here, {there} there; received none. Say which it is, as "
                f"{own}/={layer}/."
            )


def _read(path: Path, model: tfgpipe.PipelinedModel) -> Mapping[str, np.ndarray]:
    """Returns the weights there, by name."""
    if path.suffix in _FILES and path.is_file():
        return _of_file(path, model)
    if re.fullmatch(r"step-\d+", path.name):
        return _of_checkpoint(path)
    folder = run_dir.checkpoints(path)
    newest = latest_valid(folder)
    if newest is None:
        raise HyperparameterError(
            "warm_start.path: expected the folder of a run, a step-* folder among its "
            "checkpoints, a .keras, .weights.h5 or .safetensors file; received "
            f"{str(path)!r}."
        )
    return _weights(newest)


def _fetched(url: str, folder: Path) -> Path:
    """Copies a file, a checkpoint or a run, with its newest checkpoint, to a folder."""
    there: Any = files.to_path(url, name="warm_start.path")
    target = folder / there.name
    try:
        if there.suffix in _FILES or re.fullmatch(r"step-\d+", there.name):
            there.fs.get(there.path, str(target), recursive=True)
        else:
            remote_run.RemoteRun(url, target).fetch(all_steps=False)
    except (OSError, UsageError) as error:
        raise HyperparameterError(
            f"warm_start.path: expected weights that can be read; received {url!r}: "
            f"{error}"
        ) from None
    return target


def _of_checkpoint(path: Path) -> Mapping[str, np.ndarray]:
    folder, step = path.parent, int(path.name.removeprefix("step-"))
    try:
        return _weights(store.read(folder, step))
    except store.DamagedError as error:
        raise HyperparameterError(
            f"warm_start.path: expected a checkpoint that can be read; that of step "
            f"{step} in {folder} is damaged: {error}."
        ) from None


def _weights(checkpoint: store.Checkpoint) -> Mapping[str, np.ndarray]:
    return {
        name: value.numpy()
        for name, value in checkpoint.values.items()
        if not name.startswith(variable_names.OPTIMIZER)
    }


def _of_file(path: Path, model: tfgpipe.PipelinedModel) -> Mapping[str, np.ndarray]:
    try:
        if path.suffix == ".safetensors":
            return _safetensors(path)
        with tf.device("CPU:0"):
            if path.suffix == ".keras":
                loaded = keras.models.load_model(path, compile=False)
            else:
                loaded = quantization.plain_copy(model)
                loaded.load_weights(path)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise HyperparameterError(
            f"warm_start.path: {path} could not be loaded: {reason}. A .keras file "
            "needs its own layers registered, a .weights.h5 file the layers of this "
            "experiment."
        ) from None
    return {
        name: keras.ops.convert_to_numpy(v)
        for name, v in variable_names.weights(loaded).items()
    }


def _safetensors(path: Path) -> Mapping[str, np.ndarray]:
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file
    except ImportError:
        raise HyperparameterError(
            "warm_start.path: expected the package safetensors for such files; "
            "received an environment without. Try: pip install safetensors"
        ) from None
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def _renamed(
    found: Mapping[str, np.ndarray], rules: tuple[str, ...]
) -> Mapping[str, np.ndarray]:
    for rule in rules:
        old, equals, new = rule.partition("=")
        if not (equals and old) or not any(name.startswith(old) for name in found):
            raise HyperparameterError(
                "warm_start.rename: expected OLD=NEW, OLD the beginning of names such "
                f"as {_listed(sorted(found))}; received {rule!r}."
            )
        called = [name for name in found if name.startswith(old)]
        found = {
            **{name: value for name, value in found.items() if name not in called},
            **{new + name.removeprefix(old): found[name] for name in called},
        }
    return found


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
