"""The planner's command line, with arguments added for what is to be planned.

`tfgpipe.planner` adds the name of a function that returns a Keras model; a program with
experiments of its own, as `trainer.plan`, adds arguments for these.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfgpipe import remat, schedules
from tfgpipe._compat import native_logging_off
from tfgpipe._util import CommandParser, report_crash
from tfgpipe.planner import devices, ranking
from tfgpipe.planner.devices import Device
from tfgpipe.planner.parallel_config import REMATS
from tfgpipe.report import supported_formats

if TYPE_CHECKING:
    import keras

_EPILOG = """\
Nothing is allocated and nothing runs: a model of any size will do.
exit status: 0 done, 1 wrong arguments, 2 nothing fits
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to plan.

    Attributes:
        name: Its name in the table.
        model: Returns the model, a Functional or Sequential one.
        optimizer: Returns the optimizer.
        batch_size: Rows of a mini-batch, over all replicas.
    """

    name: str
    model: Callable[[], keras.Model]
    optimizer: Callable[[], keras.optimizers.Optimizer]
    batch_size: int


def main(
    argv: Sequence[str],
    parser: argparse.ArgumentParser,
    subject: Callable[[argparse.Namespace], Subject],
) -> int:
    """Runs a command line and returns the exit status.

    Args:
        argv: The command line, program first.
        parser: Has `prog`, a description and the arguments of what is to be planned;
            made with `add_help=False`. The planner's are added.
        subject: Returns what these arguments name.

    Raises:
        SystemExit: After `--help`, with status 0; for wrong arguments, with 1.
    """
    parser = _parser(parser)
    arguments = parser.parse_args(argv[1:])
    try:
        if arguments.picture is not None:
            _check_picture(Path(arguments.picture))
        path = arguments.device_file
        kinds = [_device(name, path) for name in arguments.device.split(",")]
        result = _search(subject(arguments), kinds, arguments)
        _show(result, arguments)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.stderr.write("\nStopped.\n")
        return 1
    except Exception as error:  # Whatever it is, one sentence, and the rest in a file.
        sys.stderr.write(f"{report_crash(error, argv=argv)}\n")
        return 1
    return 0 if result.best else 2


def _parser(subject: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=subject.prog,
        description=subject.description,
        usage="%(prog)s [arguments]",
        epilog=_EPILOG,
        parents=[subject],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    kinds = "kinds, as in docs/how-to/planner.md"
    add("--device", required=True, metavar="NAME,...", help=kinds)
    add("--device_file", metavar="FILE", help="devices of your own, TOML or JSON")
    how_many = "how many in all, or of each kind"
    count = _list_of(_positive)
    add("--devices", type=count, required=True, metavar="N,...", help=how_many)
    powers = "values to try (powers of two)"
    add("--microbatches", type=_list_of(_positive), metavar="M,...", help=powers)
    named = "all named ones; auto searches for more"
    for name, choices, default, every in (
        ("--schedules", (*schedules.NAMES, "auto"), schedules.NAMES, named),
        ("--remats", remat.NAMES, REMATS, ",".join(REMATS)),
    ):
        kind = _list_of(functools.partial(_one_of, choices))
        tried = ",".join(default)
        add(name, type=kind, default=tried, metavar="NAME,...", help=f"({every})")
    add(
        "--best",
        type=_positive,
        default=5,
        metavar="N",
        help="configurations to print (5)",
    )
    add("--parts", action="store_true", help="print the memory of each device by part")
    add("--picture", metavar="FILE", help="draw that; its ending says the format")
    return parser


def _search(
    subject: Subject, kinds: Sequence[Device], arguments: argparse.Namespace
) -> ranking.SearchResult:
    with native_logging_off():
        import tensorflow as tf

        tf.config.list_physical_devices()
    from tfgpipe.planner import models

    with models.without_weights():
        model = subject.model()
    return ranking.search(
        models.read(model, name=subject.name),
        device=kinds,
        num_devices=arguments.devices,
        batch_size=subject.batch_size,
        num_slots=models.num_slots(subject.optimizer, model),
        names=arguments.schedules,
        remats=arguments.remats,
        microbatches=arguments.microbatches,
        num_best=arguments.best,
    )


def _show(result: ranking.SearchResult, arguments: argparse.Namespace) -> None:
    sys.stdout.write(f"{result}\n")
    shown = result.best[0] if result.best else result.closest
    if shown is None:
        return
    if arguments.parts:
        table = ranking.memory_table(shown)
        sys.stdout.write(f"\nGiB of {shown.config}\n{table}\n")
    if arguments.picture is not None:
        shown.plot_memory(path=arguments.picture)
        sys.stdout.write(f"\nMemory by part is drawn in {arguments.picture}.\n")


def _device(name: str, path: str | None) -> Device:
    try:
        table = devices.TABLE if path is None else devices.read(path)
        return devices.find(name, table)
    except (OSError, TypeError) as error:
        raise ValueError(str(error)) from None


def _check_picture(path: Path) -> None:
    """Raises ValueError for a picture that could not be written once it is drawn."""
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise ValueError(
            "Expected --picture=FILE in a folder that can be written to; received "
            f"'{path}'."
        )
    try:
        known = supported_formats()
    except ImportError as error:
        raise ValueError(str(error)) from None
    if path.suffix.lower() not in known:
        raise ValueError(
            f"Expected --picture=FILE that ends in one of {', '.join(known)}; received "
            f"'{path}'."
        )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more; received {text!r}")
    return int(text)


def _one_of(choices: Sequence[str], text: str) -> str:
    if text not in choices:
        raise argparse.ArgumentTypeError(
            f"expected some of {', '.join(choices)}; received {text!r}"
        )
    return text


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(map(kind, text.split(",")))
