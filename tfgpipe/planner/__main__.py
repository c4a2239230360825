"""Plans a Keras model: `python -m tfgpipe.planner`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfgpipe.planner import command

if TYPE_CHECKING:
    import keras


def main(argv: Sequence[str]) -> int:
    """Plans what a command line says and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tfgpipe.planner",
        description="Plans how to train a Keras model on devices that are not here.",
        add_help=False,
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="MODULE.NAME",
        help="a function without arguments that returns it, such as my_models.large",
    )
    add("--batch_size", type=int, required=True, metavar="N", help="over all replicas")
    add("--optimizer", default="adam", metavar="NAME", help="its name in Keras (adam)")
    add(
        "--policy",
        default="float32",
        metavar="NAME",
        help="dtype policy of layers that have none of their own (float32)",
    )
    return command.main(argv, parser, _subject)


def _subject(arguments: argparse.Namespace) -> command.Subject:
    build_model = _imported(arguments.model)

    def model() -> keras.Model:
        from tfgpipe.capture import dtype_policies

        with dtype_policies.default_policy_scope(arguments.policy):
            return build_model()

    def optimizer() -> keras.optimizers.Optimizer:
        import keras

        return keras.optimizers.get(arguments.optimizer)

    return command.Subject(
        name=arguments.model,
        model=model,
        optimizer=optimizer,
        batch_size=arguments.batch_size,
    )


def _imported(name: str) -> Any:
    """Returns the function of a dotted name; raises ValueError if there is none."""
    module, _, function = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), function)
        reason = "" if callable(found) else f"it is a {type(found).__name__}"
    except (ImportError, AttributeError, ValueError) as error:
        reason = str(error)
    if reason:
        raise ValueError(
            "Expected --model=MODULE.NAME, a function that can be imported from here "
            f"and returns a model; received {name!r}: {reason}."
        )
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv))
