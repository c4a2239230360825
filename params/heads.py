"""What the sizes of attention have in common, whatever network they are of."""

from __future__ import annotations

from trainer.hyperparams import HyperparameterError


def check(*, width: int, num_heads: int) -> None:
    """Checks that heads share the width.

    Raises:
        HyperparameterError: If they cannot.
    """
    if width % num_heads:
        raise HyperparameterError(
            f"width: expected a multiple of num_heads={num_heads}; received {width}."
        )
