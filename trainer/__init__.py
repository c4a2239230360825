"""The trainer: `python -m trainer` lists what there is to train.

Its modules are imported as `tfgpipe_trainer`, in a checkout by a link to this folder.

main         from the command line to an exit status
flags        the command line
listing      the experiments there are to run, one line each
machine_checks  what can fail, or be slow, on a machine: `--mode=doctor`
modes        what each mode does, once TensorFlow has started
experiment   the base class of experiments, and how they are found by name
config       the groups of hyperparameters that every experiment has
hyperparams  hyperparameter classes that text can override
train        a run: from its last checkpoint, if there is one, to its last step
callbacks    what happens between its steps
progress     what one sees of it: a live line, or plain lines
measures     FLOPs, memory and norms of a step
writers      where measurements go: `metrics.jsonl`, TensorBoard, W&B, MLflow
goodput      where its time goes; a heartbeat, a watchdog
loss_plot    the picture of its losses
evaluate     what a trained model measures, and what it makes of new data
evaluators   further evaluations, by name
sweep        a run for each of some values
export       the files of a trained model, and how accurate each of them is
tools        a benchmark, and one step on zeros
plan         the fastest configurations on other machines
optimizers   schedules and optimizers that Keras does not have
devices      a device for each stage
hosts        hosts that train together
stopping     signals that ask a run to end
files        paths of this machine and of others
run_dir      the folder of a run, its hyperparameters and its lock
remote_run   a run's folder on another machine
errors       what ends a run
checkpoint/  checkpoints, their files, the names in them, warm starts
data/        text, images and pairs of texts, as batches
models/      networks
tasks/       base classes of experiments, one module a task
"""

import importlib.abc
import sys


class _OldNames(importlib.abc.MetaPathFinder):
    """Refuses `trainer.config` and the like, which would be loaded a second time."""

    programs = ("trainer.__main__", "trainer.plan")

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname.startswith("trainer.") and fullname not in self.programs:
            raise ImportError(
                f"Expected an import from tfgpipe_{fullname}; received its former name "
                f"{fullname}, which another package may have as well."
            )


if __name__ == "trainer":
    sys.meta_path.insert(0, _OldNames())
