"""Plans an experiment: `python -m tfgpipe.planner`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from tfgpipe._compat import native_logging_off
from tfgpipe._util import report_crash
from tfgpipe.planner import flags, picture, ranking
from tfgpipe.planner import plans as found
from trainer import hyperparams


def main(argv: Sequence[str]) -> int:
    """Does what a command line says and returns the exit status: see `flags.HELP`."""
    try:
        return _run(argv)
    except (flags.UsageError, hyperparams.HyperparameterError, ValueError) as error:
        sys.stderr.write(f"{error}\nTry `python -m tfgpipe.planner --help`.\n")
    except KeyboardInterrupt:
        sys.stderr.write("\nStopped.\n")
    except Exception as error:  # Whatever it is, one sentence, and the rest in a file.
        sys.stderr.write(f"{report_crash(error, argv=argv)}\n")
    return 1


def _run(argv: Sequence[str]) -> int:
    asked = flags.parse(argv)
    if asked is None:
        sys.stdout.write(flags.HELP)
        return 0
    experiment = _experiment(asked.params, asked.set)
    plans = _search(experiment, asked)
    sys.stdout.write(f"{plans}\n")
    shown = plans.best[0] if plans.best else plans.closest
    if shown is not None and asked.parts:
        sys.stdout.write(f"\nGiB of {shown.layout}\n{found.parts(shown)}\n")
    if shown is not None and asked.picture is not None:
        picture.plot_memory(shown, device=asked.device, path=asked.picture)
        sys.stdout.write(f"\nMemory by part is drawn in {asked.picture}.\n")
    return 0 if plans.best else 2


def _experiment(name: str, assignments: Sequence[str]) -> Any:
    """Returns the experiment `params.<name>`, with hyperparameters changed.

    Raises:
        UsageError: If there is none.
    """
    module, _, kind = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(f"params.{module}"), kind)
        experiment = found()
    except (ImportError, AttributeError, TypeError, ValueError):
        raise flags.UsageError(
            "Expected --params=MODULE.NAME, an experiment of params/ where this is "
            f"run, such as lm.OneBillion; received {name!r}."
        ) from None
    # Layers in shards would need their devices; what shards hold is worked out.
    whole = "pipelining.num_shards=1"
    return hyperparams.override(experiment, [*assignments, whole])


def _search(experiment: Any, asked: flags.Flags) -> found.Plans:
    with native_logging_off():
        import tensorflow as tf

        tf.config.list_physical_devices()
    from tfgpipe.planner import models

    with models.without_weights(), experiment.precision.scope():
        network = experiment.network()
        workload = models.read(network, name=asked.params)
    num_steps = experiment.training.num_steps
    return ranking.search(
        workload,
        device=asked.device,
        num_devices=asked.devices,
        batch_size=experiment.training.batch_size,
        num_slots=models.num_slots(
            lambda: experiment.optimizer.build(num_steps), network
        ),
        names=asked.schedules,
        remats=asked.remats,
        microbatches=asked.microbatches,
        num_best=asked.best,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv))
