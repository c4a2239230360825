"""Choices of a user, as frozen values that answer questions, found once by their names.

`schedule`, `remat`, `balance` and `transfer_dtype` are such. Nobody compares names: a
choice of a user's own is a value like those that have one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar, cast

from tfgpipe._util import argument_checks

_C = TypeVar("_C", bound="Choice")


class Choice:
    """A choice, of which each kind is a frozen dataclass.

    Attributes:
        name: Name in tables and saved models. Of the class.
    """

    name: ClassVar[str] = "custom"

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make the value again."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]  # A dataclass.

    @classmethod
    def from_config(cls: type[_C], config: dict[str, Any]) -> _C:
        """Makes a value from what `get_config` returned."""
        return cls(**config)

    def with_config(self: _C, config: dict[str, Any]) -> _C:
        """Returns a value like this one with what `get_config` returned."""
        return self.from_config(config)

    def __str__(self) -> str:
        return self.name


def find(
    argument: str, value: Any, of: type, named: Mapping[Any, _C], *, public: str
) -> _C:
    """Returns the choice of a name, or the choice itself.

    Args:
        argument: The argument that it was given as.
        value: A name, or a choice.
        of: The class of choices.
        named: The choices that have names.
        public: The public name of the class.

    Raises:
        ValueError: If it is neither.
    """
    if isinstance(value, of):
        return cast(_C, value)
    hint = f" Or give a `{public}` of your own."
    return named[argument_checks.check_choice(argument, value, [*named], hint=hint)]
