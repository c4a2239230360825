"""From the command line to an exit status."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

import params
from tfgpipe import hyperparams
from tfgpipe.hyperparams import HyperparameterError
from trainer import devices, run_folder
from trainer.flags import HELP, Flags, UsageError, parse

# The modes that go on with a run, or begin one.
_WITH_FOLDER = ("train", "eval", "export")


def main(argv: Sequence[str]) -> int:
    """Does what a command line says and returns the exit status: see `flags.HELP`."""
    try:
        flags = parse(argv)
        if flags.help:
            print(HELP, end="")
        else:
            _run(flags)
    except UsageError as error:
        return _failed(1, f"{error}\nTry `python -m trainer --help`.")
    except HyperparameterError as error:
        return _failed(2, str(error))
    except KeyboardInterrupt:
        return _failed(1, "\nStopped. The same command goes on.")
    except FloatingPointError as error:
        return _failed(3, f"Diverged: {error}. Try a smaller optimizer.learning_rate.")
    return 0


def _run(flags: Flags) -> None:
    if not flags.params:
        names = ", ".join(params.experiments())
        raise UsageError(f"Expected --params=NAME, one of {names}.")
    if flags.mode in _WITH_FOLDER and not flags.logdir:
        raise UsageError(f"Expected --logdir=DIR, which --mode={flags.mode} needs.")
    experiment = hyperparams.override(params.find(flags.params)(), flags.set)
    folder = Path(flags.logdir)
    if flags.mode == "describe":
        print(f"{flags.params}: {inspect.getdoc(experiment)}\n")
        print(hyperparams.describe(experiment))
        return
    if flags.mode in ("eval", "export") and not run_folder.holds_run(folder):
        what = {"eval": "evaluate", "export": "export"}[flags.mode]
        raise UsageError(f"{folder} holds no checkpoint to {what}.")
    if flags.mode in _WITH_FOLDER:
        run_folder.claim(folder, name=flags.params, experiment=experiment)

    devices.start_tensorflow(experiment.pipelining)
    # TensorFlow comes with these, so they wait for the line above.
    from trainer.build import build, print_plan
    from trainer.checkpoints import Checkpoints
    from trainer.evaluate import comparison, evaluate
    from trainer.export import export
    from trainer.train import train

    model = build(experiment)
    if flags.mode == "inspect":
        print_plan(experiment, model)
    if flags.mode == "train":
        train(experiment, model, folder, trace_steps=flags.trace_steps)
    if flags.mode in ("eval", "export"):
        Checkpoints(folder / "checkpoints", model).restore()
    if flags.mode == "eval":
        validation = experiment.build_dataset("validation")
        losses = evaluate(experiment, model, validation)
        print(comparison(losses, unit=experiment.unit))
    if flags.mode == "export" or (flags.mode == "train" and experiment.training.export):
        export(experiment, model, folder, name=flags.params)


def _failed(status: int, message: str) -> int:
    print(message, file=sys.stderr)
    return status
