"""Hyperparameter classes: frozen, keyword-only dataclasses that text can override.

>>> from tfgpipe_trainer.hyperparams import Hyperparams, describe, field, override
>>> class Transformer(Hyperparams):
...     num_layers: int = field(default=4, help="Number of blocks.", at_least=1)
...     dropout: float = field(default=0.0, help="Share of activations dropped.")
>>> class Tiny(Hyperparams):
...     model: Transformer = field(default=Transformer(), help="Network.")
...     seed: int = field(default=0, help="Seed of everything random.")
>>> class Deep(Tiny):  # A subclass lists only what differs.
...     model = Transformer(num_layers=48)
>>> print(describe(override(Deep(), ["model.dropout=0.1", "seed=7"])))
model.num_layers  48   Number of blocks.
model.dropout     0.1  Share of activations dropped.
seed              7    Seed of everything random.

A value is checked when its object is constructed. Text, from a command line or a file,
goes through the same check: `override` and `from_text` first collect all assignments,
then construct each object of the tree once. So a check across fields
(`Hyperparams.validate`) never sees a half-changed object.

A field is an int, float, bool, str, Literal of strings, another hyperparameter class,
or an Optional or a tuple of such. The text of a value is its `repr`; quotes around a
string and brackets around a tuple may be left out. NaN is refused: it does not equal
itself, so a run could not be recognised by its hyperparameters.
"""

import ast
import dataclasses
import difflib
import fnmatch
import inspect
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Self, TypeVar, Union

_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


class HyperparameterError(ValueError):
    """A hyperparameter has a wrong name or a wrong value."""


class Former(NamedTuple):
    """A hyperparameter of another name before.

    Attributes:
        name: Its name now.
        values: Texts of values of now, by those of before that have changed.
    """

    name: str
    values: Mapping[str, str] = {}


def field(
    *,
    default: Any,
    help: str,  # noqa: A002 (as in argparse and absl)
    at_least: float | None = None,
    less_than: float | None = None,
    formerly: str = "",
    former_values: Mapping[str, str] = types.MappingProxyType({}),
) -> Any:
    """Declares one hyperparameter.

    Args:
        default: The value unless one is given.
        help: One line, for `describe`.
        at_least: The smallest number allowed.
        less_than: Upper bound of the numbers allowed, exclusive.
        formerly: Its former name, which is refused but in a text of `to_text`.
        former_values: Texts of values of now, by those of before that have changed.

    Example:

    >>> from tfgpipe_trainer.hyperparams import Hyperparams, field
    >>> class Batches(Hyperparams):
    ...     batch_size: int = field(default=8, help="Rows of a step.", at_least=1)
    >>> Batches(batch_size=0)
    Traceback (most recent call last):
        ...
    tfgpipe_trainer.hyperparams.HyperparameterError: batch_size: ...
    """
    return dataclasses.field(
        default=default,
        metadata={
            "help": help,
            "at_least": at_least,
            "less_than": less_than,
            "formerly": formerly,
            "former_values": former_values,
        },
    )


@typing.dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(field,)
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Hyperparams:
    """Base class that makes each subclass a frozen, keyword-only dataclass."""

    def __init_subclass__(cls) -> None:
        for name, former in cls.formers().items():
            own = vars(cls).get(name)
            if own is not None and not isinstance(own, dataclasses.Field):
                raise TypeError(f"{cls.__name__}.{name}: {_renamed(former)}")
        annotations = inspect.get_annotations(cls)
        known: dict[str, tuple[Any, Mapping[str, Any]]] = {}
        for base in reversed(cls.__mro__[1:]):
            if dataclasses.is_dataclass(base):
                hints, own = typing.get_type_hints(base), inspect.get_annotations(base)
                declared = (f for f in dataclasses.fields(base) if f.name in own)
                known |= {f.name: (hints[f.name], f.metadata) for f in declared}
        # A default is looked up as Python looks up any attribute, as dataclasses do
        # not: in all base classes, plain ones as well. It needs no annotation.
        inherited = []
        for name, (hint, metadata) in known.items():
            holder = next(each for each in cls.__mro__ if name in vars(each))
            annotations = {name: hint, **annotations}
            default = vars(holder)[name]
            # A group of a subclass brings its own type.
            group = _group(hint)
            if group is not None and hint is group and isinstance(default, group):
                annotations[name] = type(default)
            if not isinstance(default, dataclasses.Field):
                setattr(cls, name, field(default=default, **metadata))
            if holder is not cls:
                inherited.append(name)
        cls.__annotations__ = annotations
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        for name in inherited:  # A class below finds it where it is declared.
            delattr(cls, name)
        for each in dataclasses.fields(cls):
            if "help" not in each.metadata:
                raise TypeError(
                    f"{cls.__name__}.{each.name} is declared without help. Expected "
                    f'`{each.name}: TYPE = field(default=VALUE, help="One line.")`.'
                )

    def __new__(cls, **values: object) -> Self:
        """Refuses an unknown name as text overrides do, with a suggestion."""
        names = [own.name for own in dataclasses.fields(cls)]
        for name, value in values.items():
            if name in (formers := cls.formers()):
                renamed = _renamed(formers[name], str(value))
                raise HyperparameterError(f"{name}: {renamed}")
            _check_name(name, names, cls)
        return super().__new__(cls)

    @classmethod
    def formers(cls) -> dict[str, Former]:
        """Returns the fields that once had other names, by these."""
        fields = dataclasses.fields(cls)
        names = {"", *(own.name for own in fields)}
        return {
            own.metadata["formerly"]: Former(own.name, own.metadata["former_values"])
            for own in fields
            if own.metadata["formerly"] not in names
        }

    def __post_init__(self) -> None:
        annotations = typing.get_type_hints(type(self))
        for own in dataclasses.fields(self):
            value = getattr(self, own.name)
            least, limit = own.metadata["at_least"], own.metadata["less_than"]
            try:
                fitting = _fit(value, annotations[own.name])
                _check_bounds(fitting, least, limit)
            except (ValueError, OverflowError, SyntaxError, RecursionError):
                expected = _expected(annotations[own.name])
                if least is not None:
                    expected += f", at least {least}"
                if limit is not None:
                    expected += f", less than {limit}"
                received = str(value) if isinstance(value, _Text) else value
                raise HyperparameterError(
                    f"{own.name}: expected {expected}; received {received!r}."
                ) from None
            object.__setattr__(self, own.name, fitting)
        self.validate()

    def replace(self, **values: Any) -> Self:
        """Returns these hyperparameters with other values for some of them.

        >>> from tfgpipe_trainer.config import Training
        >>> Training(batch_size=8).replace(num_steps=20).batch_size
        8

        Raises:
            HyperparameterError: If a name or a value is wrong.
        """
        return dataclasses.replace(self, **values)

    def validate(self) -> None:
        """Checks fields against each other; a subclass may define it.

        Raises:
            HyperparameterError: With a message that starts with `"name_of_field: "`.
        """


def matching(option: str, pattern: str, named: Mapping[str, Any]) -> list[str]:
    """Returns the names of weights that a pattern of a hyperparameter matches.

    >>> from tfgpipe_trainer.hyperparams import matching
    >>> matching("training.frozen", "dense*", {"dense/kernel": 1, "out/kernel": 2})
    ['dense/kernel']

    Args:
        option: The hyperparameter, which an error names.
        pattern: The pattern, as of the shell.
        named: Weights by name.

    Raises:
        HyperparameterError: If it matches none.
    """
    found = [name for name in named if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        raise HyperparameterError(
            f"{option}: expected patterns of weights, such as "
            f"{', '.join(list(named)[:3])}; received {pattern!r}, which matches none."
        )
    return found


Params = TypeVar("Params", bound=Hyperparams)


class _Text(str):
    """A value still to be parsed."""


def flatten(params: Hyperparams) -> dict[str, Any]:
    """Returns every value under its dotted name, as in `"model.num_layers"`."""
    flat: dict[str, Any] = {}
    for own in dataclasses.fields(params):
        value = getattr(params, own.name)
        if isinstance(value, Hyperparams):
            inner = flatten(value)
            flat.update({f"{own.name}.{name}": inner[name] for name in inner})
        else:
            flat[own.name] = value
    return flat


def describe(params: Hyperparams) -> str:
    """Returns one line for each value: its name, the value, its help."""
    helps = dict(_helps(type(params)))
    rows = [(name, repr(value)) for name, value in flatten(params).items()]
    width, room = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    return "\n".join(
        f"{name:{width}}  {value:{room}}  {helps[name]}" for name, value in rows
    )


def diff(old: Hyperparams, new: Hyperparams) -> str:
    """Returns a line `name: old value -> new value` for each value that differs."""
    texts = [
        {name: repr(value) for name, value in flatten(params).items()}
        for params in (old, new)
    ]
    pairs = {
        name: [text.get(name, "absent") for text in texts]
        for name in texts[0] | texts[1]
    }
    return "\n".join(
        f"{name}: {was} -> {now}" for name, (was, now) in pairs.items() if was != now
    )


def override(params: Params, assignments: Iterable[str]) -> Params:
    """Returns `params` changed by assignments such as `"model.num_layers=12"`.

    Of several assignments to one name the last counts.

    Raises:
        HyperparameterError: If an assignment, its name or its value is wrong.
    """
    flat = flatten(params)
    for name, text in _assignments(assignments, type(params)):
        # An Optional group is either `group` itself, None, or `group.name`s.
        for other in list(flat):
            if other.startswith(f"{name}.") or name.startswith(f"{other}."):
                del flat[other]
        flat[name] = text
    return _unflatten(flat, type(params))


def to_text(params: Hyperparams) -> str:
    """Returns one line `name = value` for each value; `from_text` reads it back."""
    return "".join(f"{name} = {value!r}\n" for name, value in flatten(params).items())


def from_text(text: str, cls: type[Params]) -> Params:
    """Constructs a `cls` from what `to_text` wrote; `#` starts a line of comment.

    A hyperparameter without a line, as one that is newer than the text, has the default
    of `cls`.

    Raises:
        HyperparameterError: If a line, its name or its value is wrong.
    """
    lines = [line for line in text.split("\n") if line.strip() and line[0] != "#"]
    names = {name for name, _ in _helps(cls)}
    return override(cls(), [_of_now(line, cls, names) for line in lines])


def _of_now(line: str, cls: type[Hyperparams], names: set[str]) -> str:
    """Returns a line of text with the names and values of now."""
    name, equals, value = (part.strip() for part in line.partition("="))
    former = None if name in names else _former(name, cls)
    if former is None:
        return line
    text = value.strip("'\"")
    return f"{former.name} {equals} {former.values.get(text, value)}"


def _former(name: str, cls: type[Hyperparams]) -> Former | None:
    """Returns the name of now of a dotted former name, None for any other."""
    parts: list[str] = []
    group: type[Hyperparams] | None = cls
    values: Mapping[str, str] = {}
    for part in name.split("."):
        found = (
            Former(part) if group is None else group.formers().get(part, Former(part))
        )
        hints = {} if group is None else typing.get_type_hints(group)
        group = _group(hints.get(found.name))
        parts.append(found.name)
        values = found.values
    now = ".".join(parts)
    return Former(now, values) if now != name else None


def _renamed(former: Former, value: str = "") -> str:
    value = value.strip("'\"")
    now = f"={former.values[value]}" if value in former.values else ""
    return f"expected {former.name}{now}; received its former name."


def _assignments(
    lines: Iterable[str], cls: type[Hyperparams]
) -> Iterator[tuple[str, _Text]]:
    names = [name for name, _ in _helps(cls)]
    for line in lines:
        name, equals, text = (part.strip() for part in line.partition("="))
        if not equals:
            raise HyperparameterError(
                f"{line}: expected NAME=VALUE, such as {names[0]}=VALUE."
            )
        former = None if name in names else _former(name, cls)
        if former is not None:
            raise HyperparameterError(f"{name}: {_renamed(former, text)}")
        _check_name(name, names, cls)
        yield name, _Text(text)


def _unflatten(flat: Mapping[str, Any], cls: type[Params]) -> Params:
    values = {}
    annotations = typing.get_type_hints(cls)
    for own in dataclasses.fields(cls):
        group = _group(annotations[own.name])
        prefix = f"{own.name}."
        inner = {
            name.removeprefix(prefix): value
            for name, value in flat.items()
            if name.startswith(prefix)
        }
        if own.name in flat:
            values[own.name] = flat[own.name]
        elif group and inner:
            try:
                values[own.name] = _unflatten(inner, group)
            except HyperparameterError as error:
                raise HyperparameterError(f"{prefix}{error}") from None
    return cls(**values)


def _helps(cls: type[Hyperparams]) -> Iterator[tuple[str, str]]:
    """Yields dotted name and help of all that can be assigned in a `cls`."""
    annotations = typing.get_type_hints(cls)
    for own in dataclasses.fields(cls):
        group = _group(annotations[own.name])
        if group is not annotations[own.name]:
            yield own.name, own.metadata["help"]
        if group:
            for name, text in _helps(group):
                yield f"{own.name}.{name}", text


def _check_name(name: str, names: list[str], cls: type[Hyperparams]) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Expected {', '.join(names)}."
        raise HyperparameterError(f"{name}: {cls.__name__} has no such name. {hint}")


def _optional(annotation: Any) -> Any:
    """Returns the X of Optional[X], None of any other annotation."""
    union = typing.get_origin(annotation) in (Union, types.UnionType)
    kinds = typing.get_args(annotation)
    return kinds[0] if union and kinds[1:] == (type(None),) else None


def _group(annotation: Any) -> type[Hyperparams] | None:
    """Returns the hyperparameter class, Optional or not, of an annotation."""
    kind = _optional(annotation) or annotation
    return kind if isinstance(kind, type) and issubclass(kind, Hyperparams) else None


def _check_bounds(value: Any, least: float | None, limit: float | None) -> None:
    """Raises ValueError if a number is out of bounds; None is within all."""
    if value is None:
        return
    if (least is not None and value < least) or (limit is not None and value >= limit):
        raise ValueError


def _fit(value: Any, annotation: Any) -> Any:
    """Returns `value`, parsed if it is `_Text`, as a value of `annotation`.

    Raises:
        ValueError, OverflowError, SyntaxError: If it is none.
    """
    text = isinstance(value, _Text)
    origin, kinds = typing.get_origin(annotation), typing.get_args(annotation)
    if optional := _optional(annotation):
        absent = value == "None" if text else value is None
        return None if absent else _fit(value, optional)
    if origin is Literal:
        return kinds[kinds.index(_fit(value, str))]
    if origin is tuple:
        items = _split(value) if text else _exactly(value, tuple)
        if kinds[1:] == (Ellipsis,):
            kinds = kinds[:1] * len(items)
        return tuple(_fit(i, kind) for i, kind in zip(items, kinds, strict=True))
    if annotation not in (int, float, bool, str) and not _group(annotation):
        raise TypeError(f"A hyperparameter cannot be of type {annotation}.")
    if text:
        value = _parse(value, annotation)
    if annotation is float:
        value = float(value) if type(value) is int else _exactly(value, float)
        if math.isnan(value):
            raise ValueError
    return _exactly(value, annotation)


def _exactly(value: Any, kind: type) -> Any:
    """Returns `value` if it is a `kind`; True is no int, a subclass is no `kind`."""
    if type(value) is not kind:
        raise ValueError
    return value


def _parse(text: str, kind: type) -> Any:
    if kind is str:
        return ast.literal_eval(text) if text[:1] in ("'", '"') else str(text)
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower())
    return kind(text) if kind in (int, float) else None


def _split(text: str) -> list[_Text]:
    """Splits `"(1, 2)"`, `"[1, 2]"`, `"1, 2"` or `"1"` into the texts of its items."""
    inner = _items(text[1:-1]) if text[:1] + text[-1:] in ("()", "[]") else None
    items = _items(text) if inner is None else inner
    if items is None or "" in items:
        raise ValueError
    return items


def _items(text: str) -> list[_Text] | None:
    """Splits a text at commas outside quotes and brackets; None: none close."""
    items, depth, at = [""], 0, 0
    while at < len(text):
        # A quote inside a word is no quote.
        begins = items[-1].rstrip()[-1:] in ("", ",", "(", "[")
        quoted = _QUOTED.match(text, at) if begins else None
        token = quoted[0] if quoted else text[at]
        at += len(token)
        depth += (token in ("(", "[")) - (token in (")", "]"))
        if depth < 0:
            return None
        if token == "," and not depth:
            items.append("")
        else:
            items[-1] += token
    if not items[-1].strip():  # After the last comma.
        items.pop()
    return None if depth else [_Text(item.strip()) for item in items]


def _expected(annotation: Any) -> str:
    origin, kinds = typing.get_origin(annotation), typing.get_args(annotation)
    if optional := _optional(annotation):
        return f"{_expected(optional)} or None"
    if origin is Literal:
        return f"one of {', '.join(kinds)}"
    if origin is tuple and kinds[1:] == (Ellipsis,):
        return f"a tuple, each item {_expected(kinds[0])}"
    if origin is tuple:
        return f"a tuple of {' and '.join(map(_expected, kinds))}"
    words = {int: "an int", float: "a float", bool: "true or false", str: "a string"}
    return words.get(annotation) or f"a {annotation.__name__}"
