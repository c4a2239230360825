"""The experiments: hyperparameter classes that `--params=lm.Tiny` finds by name.

An experiment lists only what differs from its parent class. Neither listing nor
describing one imports TensorFlow; building its model or dataset does.
"""

from __future__ import annotations

import difflib
import importlib
import inspect

from params.experiment import Experiment
from trainer.hyperparams import HyperparameterError

# The modules whose classes are experiments.
_MODULES = ["classifier", "image", "lm", "segmentation", "translate"]


def experiments() -> dict[str, type[Experiment]]:
    """Returns all experiments under their names, such as `"lm.Tiny"`."""
    found = {}
    for module_name in _MODULES:
        module = importlib.import_module(f"params.{module_name}")
        for name, cls in inspect.getmembers(module, inspect.isclass):
            if issubclass(cls, Experiment) and cls.__module__ == module.__name__:
                found[f"{module_name}.{name}"] = cls
    return found


def find(name: str) -> type[Experiment]:
    """Returns the experiment of a name.

    Raises:
        HyperparameterError: If there is none of that name.
    """
    found = experiments()
    if name not in found:
        near = difflib.get_close_matches(name, found, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise HyperparameterError(
            f"{name}: no such experiment. {hint}Expected one of {', '.join(found)}."
        )
    return found[name]
