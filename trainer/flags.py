"""The command line of the trainer."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import absl.flags

from tfgpipe.cluster import WORKERS_VARIABLE
from tfgpipe_trainer import hyperparams
from tfgpipe_trainer.commands import COMMANDS, OF_CHECKPOINTS, TRAINING
from tfgpipe_trainer.errors import UsageError
from tfgpipe_trainer.experiment import Experiment, find, known_experiments
from tfgpipe_trainer.files import is_remote

MODES = tuple(each for each in COMMANDS if each != "smoke_test")
# What may have started this process among others.
ENGINES = ("slurm",)
# The command in a checkout.
PROGRAM = "python -m trainer"

_COMPUTING = (*TRAINING, *OF_CHECKPOINTS, "benchmark", "inspect")
# The modes in which a flag means something; --params and --logdir do in all.
_MODES_OF = {
    "sweep": TRAINING,
    "sweep_index": TRAINING,
    "set": tuple(mode for mode in MODES if mode not in ("diff", "template")),
    "checkpoint": OF_CHECKPOINTS,
    "watch": ("eval",),
    "smoke_test": TRAINING,
    "allow_changes": (*TRAINING, *OF_CHECKPOINTS),
    "trace_steps": TRAINING,
    "profile_steps": TRAINING,
    "tpu": _COMPUTING,
    "tpu_zone": _COMPUTING,
    "cluster": _COMPUTING,
    "hosts": TRAINING,
    "host_index": TRAINING,
    "device": (*_COMPUTING, "tune", "verify", "doctor"),
    "target": ("inspect",),
}
_FORMER = {"follow": "watch", "dry_run": "smoke_test", "host": "host_index"}
_EXCLUDED_BY = {
    "watch": ("checkpoint",),
    "sweep": ("smoke_test", "hosts", "cluster"),
    "smoke_test": ("trace_steps", "profile_steps", "allow_changes"),
}

HELP = """\
Trains an experiment: python -m trainer --params=NAME
  --params=NAME   the experiment (no flags: list all). For your own:
                  --mode=template > mine.py, then --params=mine.Mine
  --logdir=DIR    the run's folder, runs/NAME by default; a stopped run goes on
  --set=A.B=C     change a hyperparameter, as data.files='own/*'; repeatable
  --mode=MODE     train_and_eval (the default), or train alone
                  eval  decode  export  a checkpoint, by DIR's own params.txt
                  benchmark  time steps  tune  try settings  verify  gradients
                  inspect  stages, costs  tokenizer  train it  doctor  machine
                  describe  hyperparameters    diff A B  of experiments, or runs
  --checkpoint=N  the step to eval, decode or export; or latest, or best
  --watch         eval each new checkpoint until the run ends
  --smoke_test    build, make one step on zeros, print the plan
  --allow_changes go on with DIR's run with other hyperparameters
  --trace_steps=A,B  --profile_steps=A,B  step range: timeline, TF profiler
  --cluster=HOST:PORT,...  or  --tpu=NAME --tpu_zone=ZONE  run there
  --hosts=HOST:PORT,... --host_index=I  or --cluster=slurm, by srun  one of many
  --device=cpu    train on the CPU;  --target=h100-80g  inspect for that device
  --sweep=A.B=X,Y  a run for each value;  --sweep_index=I  the I-th alone
Exit status
  0  done                       3  diverged: loss or gradient not finite
  1  a crash, or wrong flags    42  stopped by a signal, all saved: start again
  2  wrong or changed           75  a worker is not there, or gone:
     hyperparameters                the same command goes on
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """The values of the flags."""

    params: str
    logdir: str
    mode: str
    set: list[str]
    sweep: list[str]
    sweep_index: int | None
    checkpoint: str
    watch: bool
    smoke_test: bool
    allow_changes: bool
    tpu: str
    tpu_zone: str
    cluster: str
    hosts: str
    device: str
    target: str
    host_index: int | None
    trace_steps: tuple[int, int] | None
    profile_steps: tuple[int, int] | None
    help: bool
    compared: tuple[str, ...] = ()
    started: float = dataclasses.field(default_factory=time.time)

    @property
    def engine(self) -> str:
        """The engine that has started this process, if --cluster names one."""
        return self.cluster if self.cluster in ENGINES else ""

    @property
    def workers(self) -> str:
        """The workers of --cluster, if it names these."""
        return "" if self.engine else self.cluster

    def experiment(self) -> Experiment:
        """Returns the experiment of --params, changed by --set.

        Raises:
            UsageError: If there is no --params.
        """
        if not self.params:
            raise UsageError(f"Expected --params=NAME, one of {known_experiments()}.")
        return hyperparams.override(find(self.params)(), self.set)


def program() -> str:
    """Returns the command that this process was started by."""
    name = os.path.basename(sys.argv[0])
    return name if name == "tfgpipe-train" else PROGRAM


def define() -> absl.flags.FlagValues:
    """Returns the trainer's flags, without those that other modules define."""
    flags = absl.flags.FlagValues()
    flags.set_gnu_getopt(True)
    # `HELP` says what they mean.
    absl.flags.DEFINE_enum("mode", MODES[0], MODES, None, flag_values=flags)
    for name in ("set", "sweep"):
        absl.flags.DEFINE_multi_string(name, [], None, flag_values=flags)
    # The supervisor, `python -m tfgpipe.cluster launch`, says it in the environment.
    cluster = os.environ.get(WORKERS_VARIABLE, "")
    names = ("params", "logdir", "tpu", "tpu_zone", "hosts", "target")
    texts = {**dict.fromkeys(names, ""), "cluster": cluster}
    texts.update(checkpoint="latest", device="auto")
    for name, default in texts.items():
        absl.flags.DEFINE_string(name, default, None, flag_values=flags)
    for name in ("host_index", "sweep_index"):
        absl.flags.DEFINE_integer(name, None, None, flag_values=flags)
    for name in ("trace_steps", "profile_steps"):
        absl.flags.DEFINE_list(name, [], None, flag_values=flags)
    for name in ("watch", "smoke_test", "allow_changes"):
        absl.flags.DEFINE_bool(name, False, None, flag_values=flags)
    absl.flags.DEFINE_bool("help", False, None, short_name="h", flag_values=flags)
    return flags


def parse(argv: Sequence[str]) -> Flags:
    """Returns the flags of a command line, program name first.

    Raises:
        UsageError: If a flag is unknown or wrong, or something is no flag.
    """
    values = define()
    try:
        stray = values(argv)[1:]
    except absl.flags.UnrecognizedFlagError as error:
        if new := _FORMER.get(error.flagname):
            raise UsageError(
                f"Expected --{new}; received its former name --{error.flagname}."
            ) from None
        raise UsageError(str(error)) from None
    except absl.flags.Error as error:
        raise UsageError(str(error)) from None
    mode = values["mode"].value
    _check_mode(values)
    compares = mode == "diff"
    if compares and len(stray) != 2:
        raise UsageError(
            "Expected --mode=diff A B, each the name of an experiment or the folder of "
            f"a run; received {' '.join(stray) or 'neither'}."
        )
    if stray and not compares:
        raise UsageError(
            f"Expected flags only, such as --params=lm.Tiny; received {stray[0]!r}."
        )
    for path in (values["logdir"].value if values["watch"].value else "", *stray):
        if is_remote(path):
            what = "--mode=diff" if stray else "--watch"
            raise UsageError(
                f"Expected a folder of this machine for {what}; received {path!r}. "
                "Copy it here."
            )
    if values["sweep_index"].present and not values["sweep"].value:
        raise UsageError("Expected --sweep=NAME=VALUE,VALUE with --sweep_index=I.")
    if values["tpu_zone"].value and not values["tpu"].value:
        raise UsageError("Expected --tpu=NAME with --tpu_zone=ZONE.")
    if values["device"].value == "cpu" and (
        values["tpu"].value or values["cluster"].value
    ):
        raise UsageError(
            "Expected --device=cpu without --tpu and --cluster, as it is about the "
            "devices of this machine."
        )
    _check_device(values["device"].value, values["target"].value)
    _check_checkpoint(values["checkpoint"].value)
    values["logdir"].value = os.path.expanduser(values["logdir"].value)
    own = [each.name for each in dataclasses.fields(Flags) if each.name in values]
    chosen: dict[str, Any] = {name: values[name].value for name in own}
    for name in ("trace_steps", "profile_steps"):
        chosen[name] = _steps(name, chosen[name])
    return Flags(**chosen, compared=tuple(map(os.path.expanduser, stray)))


def _check_mode(values: absl.flags.FlagValues) -> None:
    """Refuses flags that would be ignored."""
    mode = values["mode"].value
    for name, modes in _MODES_OF.items():
        if values[name].present and mode not in modes:
            raise UsageError(
                f"Expected --{name} with --mode={', '.join(modes)} only; received "
                f"--mode={mode}."
            )
    for name, others in _EXCLUDED_BY.items():
        for other in others:
            if values[name].value and values[other].present:
                raise UsageError(f"Expected --{name} without --{other}.")


def _check_device(device: str, target: str) -> None:
    if device not in ("auto", "cpu"):
        raise UsageError(
            f"Expected --device=auto or cpu; received {device!r}. With --mode=inspect "
            f"another device is --target={device}."
        )
    if not target:
        return
    from tfgpipe.accelerators import PLATFORMS

    if target not in PLATFORMS:
        raise UsageError(
            f"Expected --target to be one of {', '.join(PLATFORMS)}; received "
            f"{target!r}."
        )


def _check_checkpoint(text: str) -> None:
    if text not in ("latest", "best") and not re.fullmatch("[0-9]{1,18}", text):
        raise UsageError(
            f"Expected --checkpoint=latest, best, or a step; received {text!r}."
        )


def _steps(name: str, numbers: list[str]) -> tuple[int, int] | None:
    """Returns the first and the last step of a flag, or None for none."""
    if not numbers:
        return None
    try:
        first, last = map(int, numbers)
    except ValueError:
        first = last = 0
    if not 1 <= first <= last:
        what = "time" if name == "trace_steps" else "profile"
        raise UsageError(
            f"Expected --{name}=A,B, the first and the last step to {what}; received "
            f"{','.join(numbers)!r}."
        )
    return first, last
