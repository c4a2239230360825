"""The tables of hyperparameters, made from the classes of the trainer."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, Union

import tfgpipe_params
from tfgpipe_trainer import hyperparams
from tfgpipe_trainer.experiment import Experiment, defined_in
from tfgpipe_trainer.hyperparams import Hyperparams

_COLUMNS = "| name | values | default | |\n|---|---|---|---|"


def tables() -> str:
    """Returns the sections on all experiments as Markdown."""
    common = {field.name for field in dataclasses.fields(Experiment)}
    parts = ["## Every experiment", *groups(Experiment, common)]
    for module in sorted(m.name for m in pkgutil.iter_modules(tfgpipe_params.__path__)):
        found = {
            name: cls
            for name, cls in defined_in(f"tfgpipe_params.{module}").items()
            if not inspect.isabstract(cls)
        }
        if found:
            parts += _file(module, found, common)
    return "\n\n".join(parts) + "\n"


def _file(
    module: str, found: dict[str, type[Experiment]], common: set[str]
) -> Iterator[str]:
    """Yields the section on the experiments of one file."""
    file = importlib.import_module(f"tfgpipe_params.{module}")
    yield f"## params/{module}.py"
    yield _first_line(file)
    rows = [
        f"| `{module}.{name}` | {_first_line(cls)} | {_changes(cls)} |"
        for name, cls in sorted(found.items(), key=lambda item: _line(item[1]))
    ]
    yield "\n".join(["| experiment | | sets |\n|---|---|---|", *rows])
    shown: set[str] = set()
    for cls in found.values():
        own = {field.name for field in dataclasses.fields(cls)} - common
        for table in groups(cls, own):
            if table not in shown:
                shown.add(table)
                yield table


def groups(cls: type[Hyperparams], names: set[str]) -> Iterator[str]:
    """Yields a table for each group of fields, and one for the fields in no group."""
    annotations = typing.get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.name in names]
    alone = []
    for field in fields:
        group = _group(annotations[field.name])
        if group is None:
            alone.append(_row(field.name, field, annotations[field.name]))
        else:
            rows = "\n".join(_rows(field.name, group))
            yield f"**{field.name}**: {_first_line(group)}\n\n{_COLUMNS}\n{rows}"
    if alone:
        yield "\n".join([_COLUMNS, *alone])


def _rows(prefix: str, cls: type[Hyperparams]) -> Iterator[str]:
    annotations = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name = f"{prefix}.{field.name}"
        group = _group(annotations[field.name])
        if group is None:
            yield _row(name, field, annotations[field.name])
        else:
            yield from _rows(name, group)


def _row(name: str, field: dataclasses.Field[Any], annotation: Any) -> str:
    default = str(field.default) if field.default != "" else '""'
    words = field.metadata["help"].replace("|", r"\|").replace("*", r"\*")
    return f"| `{name}` | {_values(annotation)} | `{default}` | {words} |"


def _group(annotation: Any) -> type[Hyperparams] | None:
    """Returns the hyperparameter class, optional or not, of an annotation."""
    kinds = typing.get_args(annotation) or (annotation,)
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Hyperparams):
            return kind
    return None


def _values(annotation: Any) -> str:
    """Returns the values that a field takes, in words.

    >>> _values(Literal["sync", "ring"] | None)
    '`sync`, `ring`, `None`'
    >>> _values(tuple[int, ...])
    'int, ...'
    """
    origin, kinds = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{kind}`" for kind in kinds).replace("|", r"\|")
    if origin in (Union, types.UnionType):
        return ", ".join(map(_values, kinds))
    if origin is tuple:
        return ", ".join("..." if kind is Ellipsis else _values(kind) for kind in kinds)
    if annotation is type(None):
        return "`None`"
    return str(annotation.__name__)


def _changes(cls: type[Experiment]) -> str:
    """Returns what an experiment sets other than the defaults of the groups."""
    values = hyperparams.flatten(cls())
    defaults = dict(_defaults(cls))
    return ", ".join(
        f"`{name}={value}`".replace("|", r"\|")
        for name, value in values.items()
        if name in defaults and defaults[name] != value
    )


def _defaults(cls: type[Hyperparams], prefix: str = "") -> Iterator[tuple[str, Any]]:
    annotations = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        group = _group(annotations[field.name])
        if group is None:
            # An experiment may have changed the default of a field that it inherits.
            owner = next(
                base for base in reversed(cls.__mro__) if field.name in vars(base)
            )
            yield prefix + field.name, vars(owner)[field.name]
        else:
            yield from _defaults(group, f"{prefix}{field.name}.")


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def _line(cls: type) -> int:
    """Returns where a class begins in its file."""
    return inspect.getsourcelines(cls)[1]
