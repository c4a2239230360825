"""Sizes of transformers, as hyperparameters. It loads no TensorFlow."""

from __future__ import annotations

from typing import Literal

from tfgpipe_trainer.hyperparams import HyperparameterError, Hyperparams, field


def check_heads(*, width: int, num_heads: int) -> None:
    """Checks that heads share the width.

    Raises:
        HyperparameterError: If they cannot.
    """
    if width % num_heads:
        raise HyperparameterError(
            f"width: expected a multiple of num_heads={num_heads}; received {width}."
        )


class Transformer(Hyperparams):
    """A decoder-only transformer with learnt positions and norms before each block."""

    num_layers: int = field(default=4, at_least=1, help="Number of transformer blocks.")
    width: int = field(default=128, at_least=1, help="Embedding dimension (d_model).")
    num_heads: int = field(default=4, at_least=1, help="Number of attention heads.")
    mlp_width: int = field(
        default=512, at_least=1, help="Hidden dimension of the MLP (d_ff)."
    )
    context: int = field(
        default=128, at_least=1, help="Context length in tokens (bytes by default)."
    )
    dropout: float = field(
        default=0.0,
        at_least=0,
        less_than=1,
        help="Dropout rate.",
    )
    softmax: Literal["tied", "untied"] = field(
        default="untied", help="tied: the embedding table is the output layer."
    )
    split_vocabulary: bool = field(
        default=False,
        help="Softmax on the devices of all stages; their order is searched for.",
    )
    num_experts: int = field(
        default=1, at_least=1, help="MLPs of a block; 2 or more: routed experts."
    )
    experts_per_token: int = field(
        default=2, at_least=1, help="Experts that a token is routed to."
    )
    balancing: float = field(
        default=0.01, at_least=0, help="Weight of the loss that balances experts."
    )

    def validate(self) -> None:
        """Checks that the heads share the width, and that there are enough experts."""
        check_heads(width=self.width, num_heads=self.num_heads)
        if 1 < self.num_experts < self.experts_per_token:
            raise HyperparameterError(
                f"experts_per_token: expected at most num_experts={self.num_experts}; "
                f"received {self.experts_per_token}."
            )
