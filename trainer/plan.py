"""Plans an experiment for devices that are not here: `python -m trainer.plan`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfgpipe import planner
from tfgpipe_trainer import hyperparams
from tfgpipe_trainer.experiment import find

if TYPE_CHECKING:
    import keras


def main(argv: Sequence[str]) -> int:
    """Plans what a command line says and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.plan",
        description="Plans how to train an experiment on devices that are not here.",
        add_help=False,
    )
    parser.add_argument(
        "--params",
        required=True,
        metavar="NAME",
        help="the experiment, such as lm.OneBillion: model, batch, optimizer",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        help="change a hyperparameter, as training.batch_size=64; repeatable",
    )
    return planner.main(argv, parser, _subject)


def _subject(arguments: argparse.Namespace) -> planner.Subject:
    experiment = hyperparams.override(find(arguments.params)(), arguments.set)
    if (num_shards := experiment.pipelining.num_shards) > 1:
        # Layers in shards would need their devices.
        experiment = hyperparams.override(experiment, ["pipelining.num_shards=1"])
        sys.stderr.write(
            f"pipelining.num_shards={num_shards} is left aside: every T is tried.\n"
        )

    def model() -> keras.Model:
        with experiment.precision.scope():
            return experiment.network()

    num_steps = experiment.training.num_steps
    return planner.Subject(
        name=arguments.params,
        model=model,
        optimizer=lambda: experiment.optimizer.build(num_steps),
        batch_size=experiment.training.batch_size,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv))
