"""The trainer: `python -m trainer` lists what there is to train.

Its modules are imported as `tfgpipe_trainer`, in a checkout by a link to this folder.

main         from the command line to an exit status
flags        the command line
commands/    the modes of the command line
experiment   the base class of experiments, and how they are found by name
config       the groups of hyperparameters that every experiment has
hyperparams  hyperparameter classes that text can override
train        a run: from its last checkpoint, if there is one, to its last step
callbacks    what happens between its steps
progress     what one sees of it: a live line, or plain lines, a picture of losses
measures     FLOPs, memory and norms of a step
writers      where measurements go: `metrics.jsonl`, TensorBoard, W&B, MLflow
goodput      where its time goes; a heartbeat, a watchdog
evaluate     what a trained model measures, and what it makes of new data
evaluators   further evaluations, by name
plan         the fastest configurations on other machines
optimizers   schedules, groups of weights, steps left out
validate_data   examples beside the network and its loss
devices      a device for each stage
hosts        hosts that train together
preemption   signals that ask a run to end
files        files of this machine and of others; files of records
run_dir      the folder of a run, its hyperparameters and its lock
remote_run   a run's folder on another machine
errors       what ends a run
batches      examples in an order of their own, as batches; mixtures
checkpoint/  checkpoints, their files, the names in them, warm starts

Tasks, with their networks and data, are in `params/`, which this does not import.
"""

import importlib.abc
import sys

_PROGRAMS = ("trainer.__main__", "trainer.plan")
# Where modules are that once were here.
_MOVED = {
    "tasks": "the folder of a task, such as tfgpipe_params.lm or tfgpipe_params.image",
    "models": "tfgpipe_params.lm, .image, .segmentation or .translate",
    "listing": "tfgpipe_trainer.commands.catalog",
    "modes": "tfgpipe_trainer.commands",
    "export": "tfgpipe_trainer.commands.runs",
    "stopping": "tfgpipe_trainer.preemption",
    "example_checks": "tfgpipe_trainer.validate_data",
    "tools": "tfgpipe_trainer.commands.trials",
    "data": "tfgpipe_trainer.batches, tfgpipe_params.lm or tfgpipe_params.image",
}


class _OldNames(importlib.abc.MetaPathFinder):
    """Refuses former names, `trainer.config` and `tfgpipe_trainer.tasks` as well."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        package, _, name = fullname.partition(".")
        # Another package may be called `trainer`.
        if package != __name__ or not name or fullname in _PROGRAMS:
            return
        new = _MOVED.get(name.partition(".")[0])
        if new is None and __name__ == "trainer":
            new = f"tfgpipe_{fullname}"
        if new is not None:
            raise ImportError(
                f"Expected an import from {new}; received the former name {fullname}."
            )


sys.meta_path.insert(0, _OldNames())
