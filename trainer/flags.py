"""The trainer's command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import absl.flags

MODES = ("train", "eval", "export", "describe", "inspect")

HELP = """\
Trains an experiment of params/ through a pipeline.

  python -m trainer --params=lm.Tiny --logdir=runs/tiny
  python -m trainer --params=lm.Tiny --logdir=runs/own --set='data.files=own/*'
  python -m trainer --params=lm.Tiny --mode=describe

  --params=NAME   the experiment; an unknown name lists those there are
  --logdir=DIR    the run's folder; a run that was stopped goes on from there
  --mode=MODE     train     train, evaluate, draw a sample (the default)
                  eval      evaluate the last checkpoint in DIR
                  export    write it to DIR/export: .keras, SavedModel, int8
                  describe  print the hyperparameters
                  inspect   print the stages, what they cost, the schedule
  --set=A.B=C     change a hyperparameter; may be repeated
  --trace_steps=A,B  time the devices from step A to B, draw DIR/pipeline.png
  --help          print this

Exit status  0  done
             1  wrong flags, a crash, or Ctrl-C
             2  wrong hyperparameters, or others than those of the run in DIR
             3  diverged: the loss is no longer finite
"""


class UsageError(Exception):
    """The command line is wrong."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """The values of the flags."""

    params: str
    logdir: str
    mode: str
    set: list[str]
    trace_steps: tuple[int, int] | None
    help: bool


def define() -> absl.flags.FlagValues:
    """Returns the trainer's flags, without those that other modules define."""
    flags = absl.flags.FlagValues()
    flags.set_gnu_getopt(True)
    # `HELP` says what they mean.
    absl.flags.DEFINE_string("params", "", None, flag_values=flags)
    absl.flags.DEFINE_string("logdir", "", None, flag_values=flags)
    absl.flags.DEFINE_enum("mode", "train", MODES, None, flag_values=flags)
    absl.flags.DEFINE_multi_string("set", [], None, flag_values=flags)
    absl.flags.DEFINE_list("trace_steps", [], None, flag_values=flags)
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
    except absl.flags.Error as error:
        raise UsageError(str(error)) from None
    if stray:
        raise UsageError(
            f"Expected flags only, such as --params=lm.Tiny; received {stray[0]!r}."
        )
    names = [own.name for own in dataclasses.fields(Flags)]
    chosen = {name: values[name].value for name in names}
    return Flags(**{**chosen, "trace_steps": _steps(chosen["trace_steps"])})


def _steps(numbers: list[str]) -> tuple[int, int] | None:
    """Returns the first and the last step to time, or None for none."""
    if not numbers:
        return None
    try:
        first, last = map(int, numbers)
    except ValueError:
        first = last = 0
    if not 1 <= first <= last:
        raise UsageError(
            "Expected --trace_steps=A,B, the first and the last step to time; received "
            f"{','.join(numbers)!r}."
        )
    return first, last
