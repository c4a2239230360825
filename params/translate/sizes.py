"""The size of an encoder-decoder, as hyperparameters. It loads no TensorFlow."""

from __future__ import annotations

from tfgpipe_params.lm.sizes import check_heads
from tfgpipe_trainer.hyperparams import Hyperparams, field


class EncoderDecoder(Hyperparams):
    """An encoder-decoder transformer, learnt positions, norms before each block."""

    num_encoder_layers: int = field(
        default=2, at_least=1, help="Number of encoder blocks."
    )
    num_decoder_layers: int = field(
        default=2, at_least=1, help="Number of decoder blocks."
    )
    width: int = field(default=64, at_least=1, help="Embedding dimension (d_model).")
    num_heads: int = field(default=4, at_least=1, help="Number of attention heads.")
    mlp_width: int = field(
        default=256, at_least=1, help="Hidden dimension of the MLP (d_ff)."
    )
    dropout: float = field(
        default=0.0,
        at_least=0,
        less_than=1,
        help="Dropout rate.",
    )

    def validate(self) -> None:
        """Checks that the heads share the width."""
        check_heads(width=self.width, num_heads=self.num_heads)
