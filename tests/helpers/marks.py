"""Cases that are too slow for every change."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def nightly(cases: Iterable[Any], *, gate: Collection[Any] = ()) -> list[Any]:
    """Returns the cases of the gate, and the others marked, so that they run nightly.

    A case of several arguments is a tuple.
    """
    marks = pytest.mark.nightly
    others = [case for case in cases if case not in gate]
    tuples = [case if isinstance(case, tuple) else (case,) for case in others]
    return [*gate, *(pytest.param(*case, marks=marks) for case in tuples)]
