"""The named rematerialisation policies."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

from tfgpipe._util import choices
from tfgpipe.remat.auto import AutoRemat
from tfgpipe.remat.except_last import ExceptLastRemat
from tfgpipe.remat.layer import LayerRemat
from tfgpipe.remat.none import NoRemat
from tfgpipe.remat.policy import Remat
from tfgpipe.remat.products import ProductsRemat
from tfgpipe.remat.stage import StageRemat

# The name of a policy.
Name = Literal["stage", "layer", "except_last", "products", "auto", "none"]
NAMES: tuple[Name, ...] = get_args(Name)
"""The names of all policies."""

# An argument `remat`.
RematLike: TypeAlias = Name | Remat

_POLICIES: dict[str, Remat] = {
    policy.name: policy
    for policy in (
        *(StageRemat(), LayerRemat(), ExceptLastRemat()),
        *(ProductsRemat(), AutoRemat(), NoRemat()),
    )
}


def find(remat: Any, *, argument: str = "remat") -> Remat:
    """Returns the policy of a name, or the policy itself.

    >>> tfgpipe.remat.find("layer").recomputed(3)
    [2, 2, 1]

    Args:
        remat: One of `NAMES`, or a policy.
        argument: The argument that it was given as.

    Raises:
        ValueError: If it is neither.
    """
    return choices.find(argument, remat, Remat, _POLICIES, public="tfgpipe.remat.Remat")


def is_named(remat: Remat) -> bool:
    """Returns whether a policy is the one of its name."""
    return _POLICIES.get(remat.name) == remat
