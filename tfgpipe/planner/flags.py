"""The planner's command line."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import absl.flags

from tfgpipe import schedules
from tfgpipe.planner import devices
from tfgpipe.planner.devices import Device
from tfgpipe.planner.layout import REMATS
from tfgpipe.report import formats

HELP = """\
Plans how to train on devices that are not here.

  python -m tfgpipe.planner --params=lm.Small --device=a100-40g --devices=8

  --params=NAME      an experiment of params/: model, batch, optimizer
  --set=A.B=C        change a hyperparameter, as training.batch_size=64
  --device=NAME      what it is to run on; an unknown name lists those there are
  --device_file=FILE devices of your own, TOML or JSON: see docs/planner.md
  --devices=N        how many of them: replicas x stages x shards
  --microbatches=M   values to try, with commas (powers of two)
  --schedules=NAME   to try, with commas (gpipe,1f1b,interleaved,zero_bubble)
  --remats=NAME      to try, with commas (none,stage,layer)
  --best=N           how many to print (5)
  --parts            print what each device of the best holds, part by part
  --picture=FILE     draw that; the ending says the format, such as .png
  --help             print this

Nothing is allocated and nothing runs: a model of any size will do.
Exit status: 0 done, 1 wrong flags, 2 nothing fits
"""


class UsageError(Exception):
    """The command line is wrong."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """The values of the flags."""

    params: str
    set: list[str]
    device: Device
    devices: int
    microbatches: tuple[int, ...] | None
    schedules: tuple[schedules.Name, ...]
    remats: tuple[Any, ...]
    best: int
    parts: bool
    picture: str | None


def define() -> absl.flags.FlagValues:
    """Returns the planner's flags, without those that other modules define."""
    flags = absl.flags.FlagValues()
    flags.set_gnu_getopt(True)
    # `HELP` says what they mean.
    arguments: dict[str, Any] = {"help": None, "flag_values": flags}
    for name in ("params", "device", "device_file", "picture"):
        absl.flags.DEFINE_string(name, None, **arguments)
    absl.flags.DEFINE_multi_string("set", [], **arguments)
    absl.flags.DEFINE_integer("devices", None, **arguments)
    absl.flags.DEFINE_integer("best", 5, lower_bound=1, **arguments)
    absl.flags.DEFINE_list("microbatches", [], **arguments)
    absl.flags.DEFINE_list("schedules", list(schedules.NAMES), **arguments)
    absl.flags.DEFINE_list("remats", list(REMATS), **arguments)
    absl.flags.DEFINE_bool("parts", False, **arguments)
    absl.flags.DEFINE_bool("help", False, None, short_name="h", flag_values=flags)
    return flags


def parse(argv: Sequence[str]) -> Flags | None:
    """Returns what a command line asks for, None for help. The program comes first.

    Raises:
        UsageError: If a flag is unknown, missing or wrong.
    """
    flags = define()
    try:
        stray = flags(argv)[1:]
    except absl.flags.Error as error:
        raise UsageError(str(error)) from None
    values = {name: flags[name].value for name in flags}
    if values.pop("help"):
        return None
    if stray:
        raise UsageError(f"Expected flags only; received {stray[0]!r}.")
    for name, example in (
        ("params", "lm.OneBillion"),
        ("device", "h100-80g"),
        ("devices", "64"),
    ):
        if values[name] is None:
            raise UsageError(f"Expected --{name}=..., such as --{name}={example}.")
    if values["devices"] < 1:
        raise UsageError(
            f"Expected --devices of 1 or more; received {values['devices']}."
        )
    for name, choices in (("schedules", schedules.NAMES), ("remats", REMATS)):
        wrong = [each for each in values[name] if each not in choices]
        if wrong or not values[name]:
            raise UsageError(
                f"Expected --{name} of {', '.join(choices)}; received "
                f"{','.join(values[name])!r}."
            )
        values[name] = tuple(values[name])
    _check_picture(values["picture"])
    values["device"] = _device(values["device"], values.pop("device_file"))
    values["microbatches"] = _numbers(values["microbatches"])
    names = [each.name for each in dataclasses.fields(Flags)]
    return Flags(**{name: values[name] for name in names})


def _device(name: str, path: str | None) -> Device:
    """Returns a device of the table, or of a file."""
    try:
        table = devices.TABLE if path is None else devices.read(Path(path))
        return devices.find(name, table)
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(str(error)) from None


def _check_picture(path: str | None) -> None:
    """Refuses a picture that could not be written once it is drawn."""
    if path is None:
        return
    folder = Path(path).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(path).is_dir():
        raise UsageError(
            "Expected --picture=FILE in a folder that can be written to; received "
            f"{path!r}."
        )
    try:
        known = formats()
    except ImportError as error:
        raise UsageError(str(error)) from None
    suffix = Path(path).suffix.lower()
    if suffix not in known:
        raise UsageError(
            f"Expected --picture=FILE that ends in one of {', '.join(known)}; received "
            f"{path!r}."
        )


def _numbers(texts: Sequence[str]) -> tuple[int, ...] | None:
    try:
        numbers = tuple(int(text) for text in texts)
    except ValueError:
        numbers = (0,)
    if any(number < 1 for number in numbers):
        raise UsageError(
            "Expected --microbatches of 1 or more, such as 8,16,32; received "
            f"{','.join(texts)!r}."
        )
    return numbers or None
