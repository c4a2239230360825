"""Modes about experiments as texts, and the list of them, without TensorFlow."""

from __future__ import annotations

import contextlib
import glob
import importlib
import inspect
import os
import pkgutil
import re
import shlex
from pathlib import Path

from tfgpipe_trainer import hyperparams, run_dir
from tfgpipe_trainer.experiment import (
    PARAMS,
    Experiment,
    defined_in,
    find,
    find_of_run,
    not_imported,
)
from tfgpipe_trainer.flags import Flags, program

_COLUMNS = 100
_HEAD = """\
Trains an experiment, and goes on with the same command after any end. For example

    python -m trainer --params=lm.Tiny --logdir=runs/tiny

Experiments, and how long they take on two CPU cores:"""
_TAIL = """\
Your own, in any folder: python -m trainer --mode=template > mine.py, then
--params=mine.Mine; or any file that Python can import, --params=my_pkg.my_file.Mine.
--mode=describe prints hyperparameters, --mode=doctor looks at this machine, --help
lists the flags."""


def listing() -> str:
    """Returns the list of experiments of `params/`, by file, with how to run one.

    A file that cannot be imported, and an abstract class, have a line that says so.
    TensorFlow is imported only if a file there imports it.
    """
    params = importlib.import_module(PARAMS)
    num_here = num_accelerators_here()
    files = [
        "\n".join(lines)
        for module in pkgutil.iter_modules(params.__path__)
        if (lines := _of_module(module.name, num_here))
    ]
    return "\n\n".join([_HEAD, *files, _TAIL])


def _of_module(name: str, num_here: int) -> list[str]:
    """Returns the lines of one file, or folder, of `params/`."""
    try:
        found = defined_in(f"{PARAMS}.{name}")
    except (Exception, SystemExit) as error:
        return [_fit(not_imported(name, error))]
    module = importlib.import_module(f"{PARAMS}.{name}")
    order = list(vars(module))
    rows = [
        (f"{name}.{each}", *_cells(found[each], num_here))
        for each in sorted(found, key=order.index)
    ]
    if not rows:
        return []
    title = _first_line(module.__doc__)
    place = f"{name}/" if hasattr(module, "__path__") else f"{name}.py"
    widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
    return [
        _fit(f"params/{place}: {title or 'no description'}"),
        *(
            _fit(f"  {own:{widths[0]}}  {time:{widths[1]}}  {summary}")
            for own, time, summary in rows
        ),
    ]


def _cells(cls: type[Experiment], num_here: int) -> tuple[str, str]:
    """Returns the time, or why it cannot run here, and the summary."""
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        return "abstract", f"It lacks {missing}."
    needed = cls.num_accelerators
    if needed > num_here:
        return f"needs {needed} accelerator{'s' * (needed > 1)}", _summary(cls)
    return duration(cls), _summary(cls)


def _docstring(cls: type[Experiment]) -> str:
    text = cls.__doc__ or ""
    # A dataclass without one is given its signature.
    return "" if text.startswith(f"{cls.__name__}(") else inspect.cleandoc(text)


def _summary(cls: type[Experiment]) -> str:
    return _first_line(_docstring(cls)) or "No description."


def duration(cls: type[Experiment]) -> str:
    """Returns the duration of a run in a few words, of the docstring's `Time:`."""
    pattern = r"^Time: +(.+?)(?:[,;:]|\.?$|\. )"
    time = re.search(pattern, _docstring(cls), re.MULTILINE)
    return time[1] if time else "not measured"


def num_accelerators_here() -> int:
    """Counts the GPUs, or TPU chips, that this machine shows, without TensorFlow."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    num_tpus = len(glob.glob("/dev/accel[0-9]*"))
    return count_visible(num_gpus_there(), visible) + num_tpus


def num_gpus_there() -> int:
    """Counts the NVIDIA GPUs of this machine, visible to CUDA or not."""
    return len(glob.glob("/dev/nvidia[0-9]*"))


def count_visible(num_gpus: int, visible: str | None) -> int:
    """Counts the GPUs that CUDA shows to a process.

    >>> count_visible(4, None), count_visible(4, "0,2"), count_visible(4, "-1")
    (4, 2, 0)

    Args:
        num_gpus: Number of GPUs of the machine.
        visible: The value of `CUDA_VISIBLE_DEVICES`, or None where it is not set.
    """
    if visible is None:
        return num_gpus
    # CUDA stops at the first that it does not know.
    named = [each.strip() for each in visible.split(",")]
    shown = 0
    while shown < len(named) and named[shown] not in ("", "-1"):
        shown += 1
    return min(shown, num_gpus)


def _first_line(docstring: str | None) -> str:
    return inspect.cleandoc(docstring or "").partition("\n")[0]


def _fit(line: str) -> str:
    line = line.rstrip()
    return line if len(line) <= _COLUMNS else f"{line[: _COLUMNS - 3].rstrip()}..."


def show(text: str) -> None:
    """Prints a text, of which a reader such as `head` may have had enough."""
    with contextlib.suppress(BrokenPipeError):
        print(text.rstrip("\n"), flush=True)


def template(flags: Flags) -> None:
    """Prints an experiment to copy."""
    del flags
    show(inspect.getsource(importlib.import_module(f"{PARAMS}.template")))


def describe(flags: Flags) -> None:
    """Prints an experiment's docstring, and its hyperparameters with their helps."""
    experiment = flags.experiment()
    text = hyperparams.describe(experiment)
    show(f"{flags.params}: {inspect.getdoc(experiment)}\n\n{text}")


def diff(flags: Flags) -> None:
    """Prints differences of two experiments, or of the runs of two folders."""
    named = [*flags.compared, flags.params]
    old, new = (_experiment(each, named) for each in flags.compared)
    print(hyperparams.diff(old, new) or "No difference.")


def _experiment(name: str, named: list[str]) -> Experiment:
    folder = Path(name)
    if not folder.is_dir():
        return find(name)()
    own, text = run_dir.read(folder)
    return hyperparams.from_text(text, find_of_run(folder, own, named))


def tokenizer(flags: Flags) -> None:
    """Trains a tokenizer, and prints how good it is, and how to train with it."""
    print(flags.experiment().train_tokenizer())
    kept = [each for each in flags.set if not each.startswith("data.vocabulary_size")]
    logdir = flags.logdir or "runs/tokens"
    given = [f"--params={flags.params}", *(f"--set={each}" for each in kept)]
    command = f"{program()} {shlex.join([*given, f'--logdir={logdir}'])}"
    print(f"Train with it:\n  {command}")
