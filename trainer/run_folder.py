"""The run a folder belongs to, known by its hyperparameters in `params.txt`."""

from __future__ import annotations

from pathlib import Path

from params.experiment import Experiment
from tfgpipe import hyperparams
from tfgpipe.hyperparams import HyperparameterError


def holds_run(folder: Path) -> bool:
    """Returns whether there is anything to go on with: a checkpoint."""
    return (folder / "checkpoints" / "checkpoint").exists()


def claim(folder: Path, *, name: str, experiment: Experiment) -> None:
    """Makes a folder that of a run, or checks that it already is.

    Raises:
        HyperparameterError: If the folder belongs to a run of other hyperparameters.
    """
    path = folder / "params.txt"
    if not holds_run(folder):
        folder.mkdir(parents=True, exist_ok=True)
        text = f"# {name}\n{hyperparams.to_text(experiment)}"
        path.write_text(text, encoding="utf-8")
        return
    heading, _, text = path.read_text(encoding="utf-8").partition("\n")
    if heading == f"# {name}":
        theirs = hyperparams.from_text(text, type(experiment))
        difference = hyperparams.diff(theirs, experiment)
    else:
        difference = f"{heading.removeprefix('# ')} -> {name}"
    if difference:
        raise HyperparameterError(
            f"{folder} holds a run of other hyperparameters (its -> yours):\n\n"
            f"{difference}\n\nGive another --logdir, or its hyperparameters."
        )
