"""Files of a user's own, as hyperparameters name them."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from trainer.hyperparams import HyperparameterError


def matching(name: str, pattern: str, *, example: str) -> list[Path]:
    """Returns the files that a glob matches, in the order of their names.

    Args:
        name: The hyperparameter that says it, which errors name.
        pattern: The glob; `~` is the home directory, `**` any folders.
        example: A glob that an error shows.

    Raises:
        HyperparameterError: If there is none.
    """
    found = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    paths = [Path(each) for each in found if os.path.isfile(each)]
    if not paths:
        raise HyperparameterError(
            f"{name}: expected a glob that matches files, such as {example!r}; "
            f"received {pattern!r}, which matches none."
        )
    return paths
