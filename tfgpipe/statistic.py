"""What a layer learns of a mini-batch, one microbatch after the other.

A moving average that is to move once a step cannot be assigned by each microbatch. The
layer hands over what it has seen of its microbatch instead; that is merged with what
the microbatches before have shown, and when the last one has passed, the variables get
their new values from the whole:

    microbatch   0        1        2        the step
                 │        │        │
    nothing ──▶ merge ─▶ merge ─▶ merge ─▶ update ──▶ variables

What is merged travels like any other state, from one forward program to the next, so
recomputation, empty microbatches and compilation need nothing new.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any


class Statistic(abc.ABC):
    """One thing that one call of a layer has seen of its microbatch.

    Attributes:
        values: Tensors of fixed shapes that say it. All zero, they say nothing.
        variables: The `keras.Variable`s that move by it.
    """

    values: Sequence[Any]
    variables: Sequence[Any]

    @abc.abstractmethod
    def merge(self, earlier: Sequence[Any]) -> list[Any]:
        """Returns values that hold for this microbatch and earlier ones together."""

    @abc.abstractmethod
    def update(self, whole: Sequence[Any], before: Sequence[Any]) -> list[Any]:
        """Returns new values of the variables.

        Args:
            whole: What was merged of the whole mini-batch.
            before: The values of the variables so far.
        """
